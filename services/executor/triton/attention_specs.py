"""The attention kernels in every configuration that TritonAttention and TritonKVCache launch."""

from __future__ import annotations

from collections.abc import Iterator

from quartet.services.executor.triton import paged_decode, paged_prefill
from quartet.services.executor.triton.kernel_spec import KernelSpec, Work
from quartet.services.executor.triton.kv_write import FP8_MAX, kv_write_kernel, num_write_warps
from quartet.services.executor.triton.tiles import (
    BLOCK_SIZES,
    HEAD_SIZES,
    MAX_GROUP,
    MIN_DECODE_TILES,
    decode_tile,
    padded,
    prefill_tile,
)

# Dtype of the queries and of the cache, as Triton names them.
_DTYPES = (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8e4nv"), ("fp16", "fp8e4nv"))
_ITEMSIZE = {"bf16": 2, "fp16": 2, "fp8e4nv": 1}
# Shapes whose expected times are stated: query heads, KV heads and head size of an 8B Llama.
_HEADS, _KV_HEADS, _HEAD_SIZE = 32, 8, 128


def kernel_specs() -> Iterator[KernelSpec]:
    yield from _plan_specs()
    for dtype, kv_dtype in _DTYPES:
        for head_size in HEAD_SIZES:
            for block_size in BLOCK_SIZES:
                for group in (16, MAX_GROUP):
                    yield _decode_spec(dtype, kv_dtype, head_size, block_size, group)
                for capability in _capabilities(kv_dtype):
                    for has_window in (False, True):
                        yield _prefill_spec(dtype, kv_dtype, head_size, block_size, has_window, capability)
            yield _write_spec(dtype, kv_dtype, head_size)
    for dtype in ("bf16", "fp16"):
        for head_size in HEAD_SIZES:
            yield _reduce_spec(dtype, head_size)


def _capabilities(kv_dtype: str) -> tuple[int, ...]:
    return (90, 100) if kv_dtype == "fp8e4nv" else (80, 90, 100)


def _is_quick(dtype: str, kv_dtype: str, head_size: int, block_size: int) -> bool:
    """One of each head size, block size and dtype, rather than all combinations."""
    return (dtype, kv_dtype, head_size, block_size) in {
        ("bf16", "bf16", 128, 16),
        ("bf16", "fp8e4nv", 128, 16),
        ("fp16", "fp16", 64, 32),
        ("bf16", "bf16", 80, 64),
        ("bf16", "bf16", 256, 16),
    }


def _plan_specs() -> Iterator[KernelSpec]:
    for block_n in (32, 64):
        yield KernelSpec(
            name=f"plan_decode n{block_n}",
            fn=paged_decode.plan_decode_kernel,
            signature={
                "parts": "*i32",
                "rows": "*i32",
                "seq_lens": "*i32",
                "num_rows": "i32",
                "num_parts": "i32",
                "window": "i32",
            },
            constexprs={"BLOCK_N": block_n, "MIN_TILES": MIN_DECODE_TILES, "ROWS": paged_decode.PLANNED_ROWS},
            divisible_by_16=("parts", "rows"),
            num_warps=4,
            quick=block_n == 64,
        )


def _decode_spec(dtype: str, kv_dtype: str, head_size: int, block_size: int, group: int) -> KernelSpec:
    tile = decode_tile(head_size, group, _ITEMSIZE[kv_dtype])
    quick = group == 16 and _is_quick(dtype, kv_dtype, head_size, block_size)
    return KernelSpec(
        name=f"paged_decode {dtype}/{kv_dtype} head {head_size} block {block_size} m{tile.block_m}",
        fn=paged_decode.paged_decode_kernel,
        signature={
            "out": f"*{dtype}",
            "partial_out": "*fp32",
            "partial_lse": "*fp32",
            "query": f"*{dtype}",
            "keys": f"*{kv_dtype}",
            "values": f"*{kv_dtype}",
            "key_scales": "*fp32",
            "value_scales": "*fp32",
            "block_tables": "*i32",
            "parts": "*i32",
            "scale": "fp32",
            "group": "i32",
            "query_stride": "i32",
            "kv_stride": "i32",
            "table_stride": "i32",
        },
        constexprs={
            "HEAD_SIZE": head_size,
            "HEAD_PADDED": padded(head_size),
            "BLOCK_SIZE": block_size,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "FP8": kv_dtype == "fp8e4nv",
            "PRECISION": "ieee",
        },
        divisible_by_16=(
            *("out", "partial_out", "partial_lse", "query", "keys", "values", "parts"),
            *("query_stride", "kv_stride"),
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        capabilities=_capabilities(kv_dtype),
        quick=quick,
        work=tuple(_decode_work(kv_dtype)) if quick and head_size == _HEAD_SIZE else (),
    )


def _decode_work(kv_dtype: str) -> Iterator[Work]:
    for num_rows, context in ((1, 4096), (64, 4096), (256, 1024), (8, 131072)):
        kv_bytes = 2 * num_rows * context * _KV_HEADS * _HEAD_SIZE * _ITEMSIZE[kv_dtype]
        query_bytes = 2 * 2 * num_rows * _HEADS * _HEAD_SIZE
        operations = 4 * num_rows * context * _HEADS * _HEAD_SIZE
        yield Work(f"{num_rows} x {context} tokens", kv_bytes + query_bytes, operations)


def _prefill_spec(
    dtype: str, kv_dtype: str, head_size: int, block_size: int, has_window: bool, capability: int
) -> KernelSpec:
    tile = prefill_tile(head_size, _ITEMSIZE[kv_dtype], capability)
    is_quick = _is_quick(dtype, kv_dtype, head_size, block_size)
    quick = is_quick and has_window == (head_size in (64, 80))
    return KernelSpec(
        name=f"paged_prefill {dtype}/{kv_dtype} head {head_size} block {block_size}"
        f"{' window' if has_window else ''} sm_{capability}",
        fn=paged_prefill.paged_prefill_kernel,
        signature={
            "out": f"*{dtype}",
            "query": f"*{dtype}",
            "keys": f"*{kv_dtype}",
            "values": f"*{kv_dtype}",
            "key_scales": "*fp32",
            "value_scales": "*fp32",
            "block_tables": "*i32",
            "query_start_loc": "*i32",
            "seq_lens": "*i32",
            "scale": "fp32",
            "first_row": "i32",
            "num_rows": "i32",
            "group": "i32",
            "window": "i32",
            "query_stride": "i32",
            "kv_stride": "i32",
            "table_stride": "i32",
        },
        constexprs={
            "HEAD_SIZE": head_size,
            "HEAD_PADDED": padded(head_size),
            "BLOCK_SIZE": block_size,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "HAS_WINDOW": has_window,
            "FP8": kv_dtype == "fp8e4nv",
            "PRECISION": "ieee",
        },
        divisible_by_16=("out", "query", "keys", "values", "query_stride", "kv_stride"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        capabilities=(capability,),
        quick=quick,
        work=tuple(_prefill_work(kv_dtype)) if quick and head_size == _HEAD_SIZE and capability == 90 else (),
    )


def _prefill_work(kv_dtype: str) -> Iterator[Work]:
    for chunk, computed in ((2048, 0), (8192, 0), (2048, 30720)):
        pairs = chunk * computed + chunk * (chunk + 1) // 2
        kv_bytes = 2 * (chunk + computed) * _KV_HEADS * _HEAD_SIZE * _ITEMSIZE[kv_dtype]
        query_bytes = 2 * 2 * chunk * _HEADS * _HEAD_SIZE
        yield Work(f"{chunk} tokens after {computed}", kv_bytes + query_bytes, 4 * pairs * _HEADS * _HEAD_SIZE)


def _write_spec(dtype: str, kv_dtype: str, head_size: int) -> KernelSpec:
    width = _KV_HEADS * head_size
    num_tokens = 8192
    return KernelSpec(
        name=f"kv_write {dtype}/{kv_dtype} {_KV_HEADS} heads of {head_size}",
        fn=kv_write_kernel,
        signature={
            "keys": f"*{kv_dtype}",
            "values": f"*{kv_dtype}",
            "key": f"*{dtype}",
            "value": f"*{dtype}",
            "key_scales": "*fp32",
            "value_scales": "*fp32",
            "slot_mapping": "*i64",
            "key_stride": "i32",
            "value_stride": "i32",
        },
        constexprs={
            "HEAD_SIZE": head_size,
            "NUM_KV_HEADS": _KV_HEADS,
            "BLOCK_SIZE": 16,
            "BLOCK": padded(width),
            "FP8": kv_dtype == "fp8e4nv",
            "FP8_LIMIT": FP8_MAX,
        },
        divisible_by_16=("keys", "values", "key", "value", "key_stride", "value_stride"),
        num_warps=num_write_warps(width),
        capabilities=_capabilities(kv_dtype),
        quick=head_size == 128 and dtype == "bf16",
        work=(Work(f"{num_tokens} tokens", 2 * num_tokens * width * (_ITEMSIZE[dtype] + _ITEMSIZE[kv_dtype]), 0.0),)
        if head_size == _HEAD_SIZE and dtype == "bf16"
        else (),
    )


def _reduce_spec(dtype: str, head_size: int) -> KernelSpec:
    return KernelSpec(
        name=f"reduce_decode {dtype} head {head_size}",
        fn=paged_decode.reduce_decode_kernel,
        signature={"out": f"*{dtype}", "partial_out": "*fp32", "partial_lse": "*fp32", "rows": "*i32"},
        constexprs={
            "HEAD_SIZE": head_size,
            "HEAD_PADDED": padded(head_size),
            "PARTS": paged_decode.REDUCED_PARTS,
        },
        num_warps=4,
        quick=head_size == 128 and dtype == "bf16",
    )
