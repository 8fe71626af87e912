"""The fused kernels in every configuration that the executor launches."""

from __future__ import annotations

from collections.abc import Iterator

from quartet.services.executor.triton.fused import (
    GATE_TILE,
    GATE_WARPS,
    HEADS_PER_PROGRAM,
    ROPE_WARPS,
    add_rms_norm_kernel,
    norm_warps,
    rope_and_write_kernel,
    silu_mul_kernel,
)
from quartet.services.executor.triton.kernel_spec import KernelSpec, Work
from quartet.services.executor.triton.kv_write import FP8_MAX
from quartet.services.executor.triton.tiles import BLOCK_SIZES, HEAD_SIZES, padded

_HIDDEN_SIZES = (576, 2048, 4096, 8192)
_DTYPES = ("bf16", "fp16")
# A Llama of 8B: hidden 4096, inner 14336, 32 query heads over 8, head size 128.
_TOKENS = 8192


def kernel_specs() -> Iterator[KernelSpec]:
    for dtype in _DTYPES:
        for hidden_size in _HIDDEN_SIZES:
            for has_addend in (False, True):
                yield _norm(dtype, hidden_size, has_addend)
        yield _gate(dtype, 14336)
        yield _gate(dtype, 1536)
        for head_size in HEAD_SIZES:
            for block_size in BLOCK_SIZES:
                for has_norm in (False, True):
                    yield _rope(dtype, dtype, head_size, block_size, has_norm, (80, 90, 100))
                    yield _rope(dtype, "fp8e4nv", head_size, block_size, has_norm, (90, 100))


def _norm(dtype: str, hidden_size: int, has_addend: bool) -> KernelSpec:
    tile = padded(hidden_size)
    work: tuple[Work, ...] = ()
    if hidden_size == 4096:
        transfers = 4 if has_addend else 2
        work = (Work(f"{_TOKENS} tokens", transfers * 2 * hidden_size * _TOKENS, 0),)
    return KernelSpec(
        name=f"add_rms_norm[{dtype},{hidden_size}{',add' if has_addend else ''}]",
        fn=add_rms_norm_kernel,
        signature={**dict.fromkeys(("out", "residual", "addend", "weight"), f"*{dtype}"), "eps": "fp32"},
        constexprs={"HIDDEN": hidden_size, "TILE": tile, "HAS_ADDEND": has_addend},
        num_warps=norm_warps(tile),
        quick=hidden_size == 576 and dtype == "bf16",
        work=work,
    )


def _gate(dtype: str, inner: int) -> KernelSpec:
    return KernelSpec(
        name=f"silu_mul[{dtype},{inner}]",
        fn=silu_mul_kernel,
        signature={"out": f"*{dtype}", "gate_up": f"*{dtype}"},
        constexprs={"INNER": inner, "TILE": GATE_TILE},
        num_warps=GATE_WARPS,
        quick=inner == 1536 and dtype == "bf16",
        work=(Work(f"{_TOKENS} tokens", 3 * 2 * inner * _TOKENS, 0),) if inner == 14336 else (),
    )


def _rope(
    dtype: str, kv_dtype: str, head_size: int, block_size: int, has_norm: bool, capabilities: tuple[int, ...]
) -> KernelSpec:
    fp8 = kv_dtype == "fp8e4nv"
    num_heads, num_kv_heads = 32, 8
    num_bytes = _TOKENS * head_size * (2 * (2 * num_heads + 2 * num_kv_heads) + (2 if fp8 else 4) * num_kv_heads)
    return KernelSpec(
        name=f"rope_and_write[{dtype},kv {kv_dtype},head {head_size},block {block_size}{',norm' if has_norm else ''}]",
        fn=rope_and_write_kernel,
        signature={
            "query": f"*{dtype}",
            "keys": f"*{kv_dtype}",
            "values": f"*{kv_dtype}",
            "qkv": f"*{dtype}",
            "cos": "*fp32",
            "sin": "*fp32",
            "query_norm": f"*{dtype}" if has_norm else "*fp32",
            "key_norm": f"*{dtype}" if has_norm else "*fp32",
            "key_scales": "*fp32",
            "value_scales": "*fp32",
            "slot_mapping": "*i64",
            "eps": "fp32",
        },
        constexprs={
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_SIZE": head_size,
            "BLOCK_SIZE": block_size,
            "HALF_TILE": padded(head_size // 2),
            "HEADS": HEADS_PER_PROGRAM,
            "HAS_NORM": has_norm,
            "FP8": fp8,
            "FP8_LIMIT": FP8_MAX,
        },
        num_warps=ROPE_WARPS,
        divisible_by_16=("query", "keys", "values", "qkv", "cos", "sin", "query_norm", "key_norm"),
        capabilities=capabilities,
        quick=head_size == 128 and block_size == 16 and dtype == "bf16",
        work=(Work(f"{_TOKENS} tokens", num_bytes, 0),) if head_size == 128 and block_size == 16 else (),
    )
