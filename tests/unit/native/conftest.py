import pytest
import torch

from quartet.services.executor.native.library import Isa, detect_isa


def kinds() -> list[Isa]:
    """Every kind of CPU that this one can stand in for; none, and the tests are skipped, without the kernels."""
    all_kinds = [Isa.AVX512_BF16 | Isa.VNNI, Isa.AVX512_BF16 | Isa.VNNI | Isa.AMX]
    return [kind for kind in all_kinds if kind & detect_isa() == kind]


@pytest.fixture(params=kinds(), ids=lambda kind: kind.describe())
def isa(request: pytest.FixtureRequest) -> Isa:
    kind: Isa = request.param
    return kind


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
