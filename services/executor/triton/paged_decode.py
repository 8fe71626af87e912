"""Attention of one-token rows over the paged cache (flash-decoding).

The keys of all rows are cut into parts of like size, a program takes one part for one KV head with all
the query heads that share it, and rows of more than one part are reduced afterwards. The cut is made on
the device from seq_lens: a launch, captured once, serves any lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quartet.services.executor.triton.tiles import MIN_DECODE_TILES, Tile, padded

# Columns of the parts' table: row (-1: no part), first position, end, number of parts of the row.
PART_COLUMNS = 4
# Columns of the rows' table: first part, number of parts.
ROW_COLUMNS = 2
PLANNED_ROWS = 256
REDUCED_PARTS = 16


@triton.jit
def _row_parts(lens, valid, window, tiles_per_part, BLOCK_N: tl.constexpr):
    """First position seen, tiles per part and number of parts of each row."""
    start = tl.maximum(lens - window, 0)
    tiles = (lens - start + BLOCK_N - 1) // BLOCK_N
    count = tl.maximum((tiles + tiles_per_part // 2) // tiles_per_part, 1)
    each = tl.maximum((tiles + count - 1) // count, 1)
    count = tl.maximum((tiles + each - 1) // each, 1)
    return start, each, tl.where(valid, count, 0)


@triton.jit(do_not_specialize=["num_rows", "num_parts", "window"], do_not_specialize_on_alignment=["seq_lens"])
def plan_decode_kernel(
    parts,  # [grid, 4] int32, out
    rows,  # [num_rows, 2] int32, out
    seq_lens,  # [>= num_rows] int32
    num_rows,
    num_parts,
    window,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    ROWS: tl.constexpr,
):
    part = tl.program_id(0)
    offsets = tl.arange(0, ROWS)
    total = 0
    for base in range(0, num_rows, ROWS):
        index = base + offsets
        lens = tl.load(seq_lens + index, mask=index < num_rows, other=0)
        total += tl.sum((tl.minimum(lens, window) + BLOCK_N - 1) // BLOCK_N)
    tiles_per_part = tl.maximum((total + num_parts - 1) // num_parts, MIN_TILES)

    row, begin, end, row_count = -1, 0, 0, 0
    first = 0
    for base in range(0, num_rows, ROWS):
        index = base + offsets
        valid = index < num_rows
        lens = tl.load(seq_lens + index, mask=valid, other=0)
        start, each, count = _row_parts(lens, valid, window, tiles_per_part, BLOCK_N)
        firsts = first + tl.cumsum(count) - count
        if part == 0:
            tl.store(rows + 2 * index, firsts, mask=valid)
            tl.store(rows + 2 * index + 1, count, mask=valid)
        begins = start + (part - firsts) * each * BLOCK_N
        ends = tl.minimum(begins + each * BLOCK_N, lens)
        # At most one row has this part: sums pick its values.
        mine = (firsts <= part) & (part < firsts + count)
        row += tl.sum(tl.where(mine, index + 1, 0))
        begin += tl.sum(tl.where(mine, begins, 0))
        end += tl.sum(tl.where(mine, ends, 0))
        row_count += tl.sum(tl.where(mine, count, 0))
        first += tl.sum(count)
    tl.store(parts + 4 * part, row)
    tl.store(parts + 4 * part + 1, begin)
    tl.store(parts + 4 * part + 2, end)
    tl.store(parts + 4 * part + 3, row_count)


@triton.jit(
    do_not_specialize=["group", "table_stride"],
    do_not_specialize_on_alignment=["key_scales", "value_scales", "block_tables"],
)
def paged_decode_kernel(
    out,  # [>= num_rows, num_heads, HEAD_SIZE]
    partial_out,  # [grid, num_heads, HEAD_SIZE] float32
    partial_lse,  # [grid, num_heads] float32, log2 of the sum of exponentials
    query,  # [>= num_rows, num_heads, HEAD_SIZE]
    keys,  # [slots, num_kv_heads, HEAD_SIZE]
    values,
    key_scales,  # [num_kv_heads] float32, read when FP8
    value_scales,
    block_tables,  # [>= num_rows, width] int32
    parts,  # [grid, 4] int32
    scale,
    group,
    query_stride,
    kv_stride,
    table_stride,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    num_heads = tl.num_programs(0) * group
    row = tl.load(parts + 4 * part)
    if row < 0:
        return
    begin = tl.load(parts + 4 * part + 1)
    end = tl.load(parts + 4 * part + 2)
    row_count = tl.load(parts + 4 * part + 3)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_PADDED)
    in_head = offs_d < HEAD_SIZE
    heads = kv_head * group + offs_m
    used = offs_m < group
    head_offsets = heads[:, None] * HEAD_SIZE + offs_d[None, :]
    head_mask = used[:, None] & in_head[None, :]

    q = tl.load(query + row.to(tl.int64) * query_stride + head_offsets, mask=head_mask, other=0.0)
    qk_scale = scale * 1.4426950408889634
    if FP8:
        qk_scale *= tl.load(key_scales + kv_head)
    table = block_tables + row.to(tl.int64) * table_stride
    head_base = kv_head * HEAD_SIZE + offs_d

    acc = tl.zeros([BLOCK_M, HEAD_PADDED], dtype=tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    denominator = tl.zeros([BLOCK_M], dtype=tl.float32)
    # Block ids are read a tile ahead: a load of keys that waits for another load would not be pipelined well.
    blocks = tl.load(table + (begin + offs_n) // BLOCK_SIZE, mask=begin + offs_n < end, other=0)
    for first in range(begin, end, BLOCK_N):
        positions = first + offs_n
        live = positions < end
        slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        offsets = slots[:, None] * kv_stride + head_base[None, :]
        mask = live[:, None] & in_head[None, :]
        following = positions + BLOCK_N
        blocks = tl.load(table + following // BLOCK_SIZE, mask=following < end, other=0)
        k = tl.load(keys + offsets, mask=mask, other=0.0)
        v = tl.load(values + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * qk_scale
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        correction = tl.exp2(highest - new_highest)
        denominator = denominator * correction + tl.sum(weights, 1)
        acc = acc * correction[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        highest = new_highest

    # An empty row sums to nothing and gives zeros.
    acc = acc / tl.where(denominator > 0.0, denominator, 1.0)[:, None]
    if FP8:
        acc *= tl.load(value_scales + kv_head)
    if row_count == 1:
        row_out = out + row.to(tl.int64) * num_heads * HEAD_SIZE
        tl.store(row_out + head_offsets, acc.to(out.dtype.element_ty), mask=head_mask)
    else:
        first_head = part.to(tl.int64) * num_heads
        tl.store(partial_out + first_head * HEAD_SIZE + head_offsets, acc, mask=head_mask)
        tl.store(partial_lse + first_head + heads, highest + tl.log2(denominator), mask=used)


@triton.jit
def reduce_decode_kernel(
    out,  # [>= num_rows, num_heads, HEAD_SIZE]
    partial_out,
    partial_lse,
    rows,  # [num_rows, 2] int32
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    first = tl.load(rows + 2 * row)
    count = tl.load(rows + 2 * row + 1)
    if count <= 1:
        return
    offs_d = tl.arange(0, HEAD_PADDED)
    in_head = offs_d < HEAD_SIZE
    acc = tl.zeros([HEAD_PADDED], dtype=tl.float32)
    highest = float("-inf")
    denominator = 0.0
    for base in range(0, count, PARTS):
        index = base + tl.arange(0, PARTS)
        live = index < count
        entries = (first + index).to(tl.int64) * num_heads + head
        lse = tl.load(partial_lse + entries, mask=live, other=float("-inf"))
        mask = live[:, None] & in_head[None, :]
        outs = tl.load(partial_out + entries[:, None] * HEAD_SIZE + offs_d[None, :], mask=mask, other=0.0)
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        weights = tl.exp2(lse - new_highest)
        correction = tl.exp2(highest - new_highest)
        denominator = denominator * correction + tl.sum(weights, 0)
        acc = acc * correction + tl.sum(outs * weights[:, None], 0)
        highest = new_highest
    row_out = out + (row * num_heads + head) * HEAD_SIZE
    tl.store(row_out + offs_d, (acc / denominator).to(out.dtype.element_ty), mask=in_head)


def plan_decode(
    parts: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, num_parts: int, window: int, block_n: int
) -> None:
    """Cuts num_rows = len(rows) decode rows into parts.

    parts [num_parts + num_rows, 4] int32 and rows [num_rows, 2] int32 are written, seq_lens [>= num_rows]
    int32 is read, on the device.
    """
    plan_decode_kernel[(len(parts),)](
        parts,
        rows,
        seq_lens,
        len(rows),
        num_parts,
        window,
        BLOCK_N=block_n,
        MIN_TILES=MIN_DECODE_TILES,
        ROWS=PLANNED_ROWS,
        num_warps=4,
    )


def paged_decode(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor,
    value_scales: torch.Tensor,
    block_tables: torch.Tensor,
    parts: torch.Tensor,
    rows: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    *,
    scale: float,
    tile: Tile,
) -> None:
    """out[row] for the len(rows) decode rows, which are also the first tokens of query.

    out [T, num_heads, head_size] contiguous; query the same, its tokens any stride apart; keys, values
    [blocks, block_size, num_kv_heads, head_size]; scales [num_kv_heads] float32; parts and rows as
    plan_decode made them; partial_out [len(parts), num_heads, head_size] and partial_lse
    [len(parts), num_heads] float32 are scratch.
    """
    _, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = keys.shape
    paged_decode_kernel[(num_kv_heads, len(parts))](
        out,
        partial_out,
        partial_lse,
        query,
        keys,
        values,
        key_scales,
        value_scales,
        block_tables,
        parts,
        scale,
        num_heads // num_kv_heads,
        query.stride(0),
        keys.stride(1),
        block_tables.stride(0),
        HEAD_SIZE=head_size,
        HEAD_PADDED=padded(head_size),
        BLOCK_SIZE=block_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        FP8=keys.dtype.itemsize == 1,
        PRECISION="ieee",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    reduce_decode_kernel[(len(rows), num_heads)](
        out,
        partial_out,
        partial_lse,
        rows,
        HEAD_SIZE=head_size,
        HEAD_PADDED=padded(head_size),
        PARTS=REDUCED_PARTS,
        num_warps=4,
    )
