"""The kinds of CPU that this one can stand in for where compiled kernels are tested; none without the kernels."""

from quartet.services.executor.native.library import Isa, detect_isa

AVX512 = Isa.AVX512_BF16 | Isa.VNNI


def _here(*kinds: Isa) -> list[Isa]:
    return [kind for kind in kinds if kind & detect_isa() == kind]


KINDS = _here(Isa.AVX2, AVX512, AVX512 | Isa.AMX)
# Those that differ in products only, too.
KINDS_OF_PRODUCTS = [*KINDS, *_here(Isa.AVX2 | Isa.AVX_VNNI)]
