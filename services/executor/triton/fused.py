"""Kernels for what stands between the matrix products: norms, rotation with the cache write, the gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quartet.services.executor.triton.kv_write import FP8_MAX
from quartet.services.executor.triton.tiles import padded

# Heads that one program of the rotation takes: a token has too little work for a program per head.
HEADS_PER_PROGRAM = 8
ROPE_WARPS = 2
GATE_TILE = 1024
GATE_WARPS = 4


@triton.jit
def add_rms_norm_kernel(
    out, residual, addend, weight, eps, HIDDEN: tl.constexpr, TILE: tl.constexpr, HAS_ADDEND: tl.constexpr
):
    """A program per token: residual += addend (rounded to its dtype), out = rms_norm(residual) * weight."""
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


@triton.jit
def _normed_halves(source, inside, norm_weight, column, eps, HEAD_SIZE: tl.constexpr, HAS_NORM: tl.constexpr):
    """The first and second halves of heads at `source` [heads, half] in float32, normed over each head."""
    half: tl.constexpr = HEAD_SIZE // 2
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_SIZE + eps)[:, None]
        low *= scale * tl.load(norm_weight + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
        high *= scale * tl.load(norm_weight + half + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
    return low, high


@triton.jit
def _stored(value, scale, dtype: tl.constexpr, FP8: tl.constexpr, FP8_LIMIT: tl.constexpr):
    """What the cache holds of a value: 8-bit floats are value / scale and saturate; a NaN stays one."""
    if FP8:
        value = tl.clamp(value / scale, -FP8_LIMIT, FP8_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return value.to(dtype)


@triton.jit(do_not_specialize_on_alignment=["key_scales", "value_scales", "slot_mapping"])
def rope_and_write_kernel(
    query,
    keys,
    values,
    qkv,
    cos,
    sin,
    query_norm,
    key_norm,
    key_scales,
    value_scales,
    slot_mapping,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF_TILE: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FP8: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
):
    """Programs (token, group of HEADS heads): the first groups are query's, then key's, then value's."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    half: tl.constexpr = HEAD_SIZE // 2
    query_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    column = tl.arange(0, HALF_TILE)
    row = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE)
    angle = token * HEAD_SIZE + column
    # sin's first half is stored negated (see RotaryEmbedding).
    cosine = tl.load(cos + angle, mask=column < half, other=0.0)[None, :]
    sine = tl.load(sin + half + angle, mask=column < half, other=0.0)[None, :]
    if group < query_groups:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < NUM_HEADS) & (column < half)[None, :]
        place = head * HEAD_SIZE + column[None, :]
        low, high = _normed_halves(row + place, inside, query_norm, column, eps, HEAD_SIZE, HAS_NORM)
        target = query + token * (NUM_HEADS * HEAD_SIZE) + place
        tl.store(target, (low * cosine - high * sine).to(query.dtype.element_ty), mask=inside)
        tl.store(target + half, (high * cosine + low * sine).to(query.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slot_mapping + token)
        # Padding has slot -1 or one of the null block, which nobody reads.
        if slot >= BLOCK_SIZE:
            is_key = group < query_groups + kv_groups
            first = tl.where(is_key, group - query_groups, group - query_groups - kv_groups) * HEADS
            head = first + tl.arange(0, HEADS)[:, None]
            inside = (head < NUM_KV_HEADS) & (column < half)[None, :]
            place = head * HEAD_SIZE + column[None, :]
            target = slot * (NUM_KV_HEADS * HEAD_SIZE) + place
            dtype: tl.constexpr = keys.dtype.element_ty
            if is_key:
                source = row + NUM_HEADS * HEAD_SIZE + place
                low, high = _normed_halves(source, inside, key_norm, column, eps, HEAD_SIZE, HAS_NORM)
                scale = tl.load(key_scales + head, mask=head < NUM_KV_HEADS, other=1.0)
                key_low, key_high = low * cosine - high * sine, high * cosine + low * sine
                tl.store(keys + target, _stored(key_low, scale, dtype, FP8, FP8_LIMIT), mask=inside)
                tl.store(keys + target + half, _stored(key_high, scale, dtype, FP8, FP8_LIMIT), mask=inside)
            else:
                source = row + (NUM_HEADS + NUM_KV_HEADS) * HEAD_SIZE + place
                low, high = _normed_halves(source, inside, key_norm, column, eps, HEAD_SIZE, False)
                scale = tl.load(value_scales + head, mask=head < NUM_KV_HEADS, other=1.0)
                tl.store(values + target, _stored(low, scale, dtype, FP8, FP8_LIMIT), mask=inside)
                tl.store(values + target + half, _stored(high, scale, dtype, FP8, FP8_LIMIT), mask=inside)


@triton.jit
def silu_mul_kernel(out, gate_up, INNER: tl.constexpr, TILE: tl.constexpr):
    """Programs (token, tile): out [T, INNER] = silu(gate) * up, from gate_up [T, 2 * INNER]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < INNER
    gate = tl.load(gate_up + token * (2 * INNER) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * INNER) + INNER + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * INNER + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def norm_warps(tile: int) -> int:
    """Warps of add_rms_norm_kernel: some 16 values a thread."""
    return max(1, min(16, tile // 512))


def add_rms_norm(residual: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual, addend [T, H] contiguous, weight [H]. Adds in place; returns the normed sum [T, H]."""
    num_tokens, hidden_size = residual.shape
    out = torch.empty_like(residual)
    tile = padded(hidden_size)
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


def rope_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    key_scales: torch.Tensor,
    value_scales: torch.Tensor,
) -> torch.Tensor:
    """Norms and rotates heads of query and key, stores key and value. Returns query [T, num_heads, head_size].

    qkv [T, (num_heads + 2 * num_kv_heads) * head_size] contiguous; cos, sin [T, 1, head_size] of RotaryEmbedding;
    norms: the weights [head_size] of query's and key's norm; the cache's arguments as of kv_write.
    """
    num_tokens = qkv.shape[0]
    block_size, num_kv_heads, head_size = keys.shape[1:]
    num_heads = qkv.shape[1] // head_size - 2 * num_kv_heads
    query = torch.empty((num_tokens, num_heads, head_size), dtype=qkv.dtype, device=qkv.device)
    groups = triton.cdiv(num_heads, HEADS_PER_PROGRAM) + 2 * triton.cdiv(num_kv_heads, HEADS_PER_PROGRAM)
    query_norm, key_norm = norms or (cos, cos)
    rope_and_write_kernel[(num_tokens, groups)](
        query,
        keys,
        values,
        qkv,
        cos,
        sin,
        query_norm,
        key_norm,
        key_scales,
        value_scales,
        slot_mapping,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        HALF_TILE=padded(head_size // 2),
        HEADS=HEADS_PER_PROGRAM,
        HAS_NORM=norms is not None,
        FP8=keys.dtype.itemsize == 1,
        FP8_LIMIT=FP8_MAX,
        num_warps=ROPE_WARPS,
    )
    return query


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I] contiguous, gate first -> silu(gate) * up [T, I]."""
    num_tokens, width = gate_up.shape
    out = torch.empty((num_tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    silu_mul_kernel[(num_tokens, triton.cdiv(width // 2, GATE_TILE))](
        out, gate_up, INNER=width // 2, TILE=GATE_TILE, num_warps=GATE_WARPS
    )
    return out
