import pytest
import torch
from support.kernels import KINDS

from quartet.services.executor.native.library import Isa


@pytest.fixture(params=KINDS, ids=lambda kind: kind.describe())
def isa(request: pytest.FixtureRequest) -> Isa:
    kind: Isa = request.param
    return kind


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
