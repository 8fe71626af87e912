"""Every kernel in every configuration that the executor launches."""

from __future__ import annotations

from quartet.services.executor.triton import attention_specs, fused_specs, sampling_specs
from quartet.services.executor.triton.kernel_spec import KernelSpec

# Each has kernel_specs() -> Iterable[KernelSpec].
_MODULES = (attention_specs, fused_specs, sampling_specs)


def kernel_specs() -> list[KernelSpec]:
    return [spec for module in _MODULES for spec in module.kernel_specs()]
