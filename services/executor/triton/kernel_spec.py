"""A kernel in one configuration that the executor launches: enough to compile it where no GPU is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler import compile as compile_source


@dataclass(frozen=True)
class Work:
    """What one launch has to move and compute at least, for a stated shape.

    num_bytes   read from and written to the GPU's memory
    operations  on the matrix units, as floating-point operations of the useful part
    """

    shape: str
    num_bytes: float
    operations: float


@dataclass(frozen=True)
class KernelSpec:
    """name        unique: kernel and configuration
    fn          the @triton.jit function
    signature   argument name -> Triton type ("*bf16", "i32", "fp32"); constexprs are left out
    constexprs  argument name -> value
    divisible_by_16  arguments that are multiples of 16 at every launch; None: all pointers and no ints
    capabilities     compute capabilities (80, 90, 100) that it is launched on
    quick       among the few that are compiled in every test run
    work        shapes for the table of expected times
    """

    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible_by_16: tuple[str, ...] | None = None
    capabilities: tuple[int, ...] = (80, 90, 100)
    quick: bool = False
    work: tuple[Work, ...] = field(default=())

    def compile(self, capability: int) -> CompiledKernel:
        """For a GPU of that compute capability (90: sm_90), as the launch would do it there."""
        names = self.fn.arg_names
        signature = {name: "constexpr" if name in self.constexprs else self.signature[name] for name in names}
        divisible = self.divisible_by_16
        if divisible is None:
            divisible = tuple(name for name, kind in self.signature.items() if kind.startswith("*"))
        attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
        source = ASTSource(self.fn, signature, dict(self.constexprs), attrs)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return compile_source(source, target=GPUTarget("cuda", capability, 32), options=options)
