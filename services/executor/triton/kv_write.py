"""Stores a step's keys and values to their slots of the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quartet.services.executor.triton.tiles import padded

FP8_MAX = 448.0


@triton.jit(do_not_specialize_on_alignment=["key_scales", "value_scales", "slot_mapping"])
def kv_write_kernel(
    keys,  # [slots, num_kv_heads, HEAD_SIZE], out
    values,
    key,  # [T, num_kv_heads, HEAD_SIZE]
    value,
    key_scales,  # [num_kv_heads] float32, read when FP8
    value_scales,
    slot_mapping,  # [T] int64
    key_stride,
    value_stride,
    HEAD_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    # Padding has slot -1 or one of the null block, which nobody reads.
    if slot < BLOCK_SIZE:
        return
    width: tl.constexpr = NUM_KV_HEADS * HEAD_SIZE
    offsets = tl.arange(0, BLOCK)
    mask = offsets < width
    k = tl.load(key + token * key_stride + offsets, mask=mask, other=0.0)
    v = tl.load(value + token * value_stride + offsets, mask=mask, other=0.0)
    if FP8:
        heads = offsets // HEAD_SIZE
        k = k.to(tl.float32) / tl.load(key_scales + heads, mask=mask, other=1.0)
        v = v.to(tl.float32) / tl.load(value_scales + heads, mask=mask, other=1.0)
        k = tl.clamp(k, -FP8_LIMIT, FP8_LIMIT, propagate_nan=tl.PropagateNan.ALL)
        v = tl.clamp(v, -FP8_LIMIT, FP8_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    tl.store(keys + slot * width + offsets, k.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + slot * width + offsets, v.to(values.dtype.element_ty), mask=mask)


def num_write_warps(width: int) -> int:
    """For rows of so many elements: 16 bytes of 2-byte elements per thread, within reason."""
    return min(max(padded(width) // 256, 1), 8)


def kv_write(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor,
    value_scales: torch.Tensor,
) -> None:
    """key, value [T, num_kv_heads, head_size], tokens any stride apart, to slots [T] int64 of keys, values
    [blocks, block_size, num_kv_heads, head_size], which are divided by scales [num_kv_heads] float32
    and saturate when the cache is 8-bit. Slots of -1 and of the null block are not written."""
    _, block_size, num_kv_heads, head_size = keys.shape
    if len(key) == 0:
        return
    kv_write_kernel[(len(key),)](
        keys,
        values,
        key,
        value,
        key_scales,
        value_scales,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        HEAD_SIZE=head_size,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        BLOCK=padded(num_kv_heads * head_size),
        FP8=keys.dtype.itemsize == 1,
        FP8_LIMIT=FP8_MAX,
        num_warps=num_write_warps(num_kv_heads * head_size),
    )
