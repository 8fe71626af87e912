"""Kernels for what stands between the matrix products: norms, rotation with the cache write, the gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Heads that one program of the rotation takes; a token's work is too small for a program per head.
_HEADS_PER_PROGRAM = 8
_GATE_TILE = 1024


@triton.jit
def add_rms_norm_kernel(
    out,
    residual,
    addend,
    weight,
    eps,
    HIDDEN: tl.constexpr,
    TILE: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
):
    """One program a token: residual += addend (rounded to its dtype), out = rms_norm(residual) * weight."""
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, TILE)
    inside = column < HIDDEN
    value = tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDEND:
        value += tl.load(addend + row + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    normed = value * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, normed.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    residual: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """residual, addend [T, H] contiguous, weight [H]. Adds in place, then norms: returns [T, H]."""
    num_tokens, hidden_size = residual.shape
    out = torch.empty_like(residual) if out is None else out
    tile = triton.next_power_of_2(hidden_size)
    add_rms_norm_kernel[(num_tokens,)](
        out,
        residual,
        residual if addend is None else addend,
        weight,
        eps,
        HIDDEN=hidden_size,
        TILE=tile,
        HAS_ADDEND=addend is not None,
        num_warps=norm_warps(tile),
    )
    return out


def norm_warps(tile: int) -> int:
    """Of add_rms_norm_kernel: some 16 values a thread."""
    return max(1, min(16, tile // 512))


@triton.jit
def _load_heads(qkv, row, first, end, norm_weight, eps, HEAD_SIZE, HALF_TILE: tl.constexpr, HAS_NORM: tl.constexpr, HEADS: tl.constexpr):
    """Heads [first, first + HEADS) of a token, those before `end`, as float32 halves [HEADS, HALF_TILE]."""
    HALF: tl.constexpr = HEAD_SIZE // 2
    heads = first + tl.arange(0, HEADS)
    column = tl.arange(0, HALF_TILE)
    inside = (heads < end)[:, None] & (column < HALF)[None, :]
    source = qkv + row + heads[:, None] * HEAD_SIZE + column[None, :]
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_SIZE + eps)
        within = column < HALF
        low *= scale[:, None] * tl.load(norm_weight + column, mask=within, other=0.0).to(tl.float32)[None, :]
        high *= scale[:, None] * tl.load(norm_weight + HALF + column, mask=within, other=0.0).to(tl.float32)[None, :]
    return low, high, heads, inside
