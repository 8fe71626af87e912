"""Attention of prefill chunks over the paged cache: FlashAttention's loop over tiles of keys, which are
read through the block table. A chunk's own keys are in the cache already, after those computed before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quartet.services.executor.triton.tiles import Tile, padded


@triton.jit
def _attend(
    acc,
    highest,
    denominator,
    q,
    query_positions,
    keys,
    values,
    table,
    qk_scale,
    kv_stride,
    head_base,
    in_head,
    begin,
    end,
    first_seen,
    num_seen,
    window,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Over the keys at [begin, end); MASKED where not every query of the tile sees every key.
    What lies outside [first_seen, num_seen) is seen by no query and may hold anything."""
    offs_n = tl.arange(0, BLOCK_N)
    # Block ids are read a tile ahead: a load of keys that waits for another load would not be pipelined well.
    blocks = tl.load(table + (begin + offs_n) // BLOCK_SIZE, mask=begin + offs_n < num_seen, other=0)
    for first in range(begin, end, BLOCK_N):
        positions = first + offs_n
        if MASKED:
            live = (positions >= first_seen) & (positions < num_seen)
            mask = live[:, None] & in_head[None, :]
        else:
            mask = in_head[None, :]
        slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        offsets = slots[:, None] * kv_stride + head_base[None, :]
        following = positions + BLOCK_N
        blocks = tl.load(table + following // BLOCK_SIZE, mask=following < num_seen, other=0)
        k = tl.load(keys + offsets, mask=mask, other=0.0)
        v = tl.load(values + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if MASKED:
            seen = positions[None, :] <= query_positions[:, None]
            if HAS_WINDOW:
                seen &= positions[None, :] > query_positions[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * qk_scale)
        shift = new_highest
        if MASKED and HAS_WINDOW:
            # A query may see none of this tile nor of those before it.
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores * qk_scale - shift[:, None])
        correction = tl.exp2(highest - shift)
        denominator = denominator * correction + tl.sum(weights, 1)
        acc = acc * correction[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        highest = new_highest
    return acc, highest, denominator


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "group", "window", "table_stride"],
    do_not_specialize_on_alignment=["key_scales", "value_scales", "block_tables", "query_start_loc", "seq_lens"],
)
def paged_prefill_kernel(
    out,  # [T, num_heads, HEAD_SIZE]
    query,  # [T, num_heads, HEAD_SIZE]
    keys,  # [slots, num_kv_heads, HEAD_SIZE]
    values,
    key_scales,  # [num_kv_heads] float32, read when FP8
    value_scales,
    block_tables,  # [num_rows, width] int32
    query_start_loc,  # [num_rows + 1] int32
    seq_lens,  # [num_rows] int32
    scale,
    first_row,
    num_rows,
    group,
    window,
    query_stride,
    kv_stride,
    table_stride,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(0)
    num_heads = tl.num_programs(0) * group
    # A row's later tiles have more keys: those come first, so that no long one is left for the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    tile_queries = BLOCK_M // group

    # Rows begin at no more than this tile number, so a row has room for all of its tiles.
    start_of_first = tl.load(query_start_loc + first_row)
    row = first_row
    beyond = num_rows
    while beyond - row > 1:
        middle = (row + beyond) // 2
        row_tile = (tl.load(query_start_loc + middle) - start_of_first) // tile_queries + middle - first_row
        row = tl.where(row_tile <= tile, middle, row)
        beyond = tl.where(row_tile <= tile, beyond, middle)
    query_start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - query_start
    first_query = (tile - (query_start - start_of_first) // tile_queries - row + first_row) * tile_queries
    if first_query >= query_len:
        return
    num_computed = tl.load(seq_lens + row) - query_len

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_PADDED)
    in_head = offs_d < HEAD_SIZE
    queries = first_query + offs_m // group
    heads = kv_head * group + offs_m % group
    used = (queries < query_len) & (offs_m < tile_queries * group)
    tokens = (query_start + queries).to(tl.int64)
    mask = used[:, None] & in_head[None, :]
    q = tl.load(
        query + tokens[:, None] * query_stride + (heads[:, None] * HEAD_SIZE + offs_d[None, :]), mask=mask, other=0.0
    )
    query_positions = num_computed + queries
    qk_scale = scale * 1.4426950408889634
    if FP8:
        qk_scale *= tl.load(key_scales + kv_head)

    # Keys that some query of the tile sees are [first_seen, num_seen); [full_begin, full_end) all of them see.
    first_position = num_computed + first_query
    num_seen = num_computed + tl.minimum(first_query + tile_queries, query_len)
    full_end = (first_position + 1) // BLOCK_N * BLOCK_N
    first_seen = 0
    begin = 0
    full_begin = 0
    if HAS_WINDOW:
        first_seen = tl.maximum(first_position - window + 1, 0)
        begin = first_seen // BLOCK_N * BLOCK_N
        full_end = tl.maximum(full_end, begin)
        full_begin = (tl.maximum(num_seen - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        full_begin = tl.minimum(full_begin, full_end)

    table = block_tables + row.to(tl.int64) * table_stride
    head_base = kv_head * HEAD_SIZE + offs_d
    acc = tl.zeros([BLOCK_M, HEAD_PADDED], dtype=tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    denominator = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_WINDOW:
        acc, highest, denominator = _attend(
            acc, highest, denominator, q, query_positions, keys, values, table, qk_scale, kv_stride, head_base,
            in_head, begin, full_begin, first_seen, num_seen, window,
            BLOCK_N, BLOCK_SIZE, True, HAS_WINDOW, PRECISION,
        )  # fmt: skip
    acc, highest, denominator = _attend(
        acc, highest, denominator, q, query_positions, keys, values, table, qk_scale, kv_stride, head_base,
        in_head, full_begin, full_end, first_seen, num_seen, window,
        BLOCK_N, BLOCK_SIZE, False, HAS_WINDOW, PRECISION,
    )  # fmt: skip
    acc, highest, denominator = _attend(
        acc, highest, denominator, q, query_positions, keys, values, table, qk_scale, kv_stride, head_base,
        in_head, full_end, num_seen, first_seen, num_seen, window,
        BLOCK_N, BLOCK_SIZE, True, HAS_WINDOW, PRECISION,
    )  # fmt: skip

    acc = acc / tl.where(denominator > 0.0, denominator, 1.0)[:, None]
    if FP8:
        acc *= tl.load(value_scales + kv_head)
    offsets = tokens[:, None] * (num_heads * HEAD_SIZE) + (heads[:, None] * HEAD_SIZE + offs_d[None, :])
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


def num_prefill_tiles(num_tokens: int, num_rows: int, group: int, tile: Tile) -> int:
    """Programs per KV head for num_tokens of num_rows chunks: enough, however they are divided."""
    return num_tokens // (tile.block_m // group) + num_rows


def paged_prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor,
    value_scales: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    first_row: int,
    num_tokens: int,
    scale: float,
    sliding_window: int | None,
    tile: Tile,
) -> None:
    """out of the num_tokens tokens of the rows from first_row on.

    out [T, num_heads, head_size] contiguous; query the same, its tokens any stride apart; keys, values
    [blocks, block_size, num_kv_heads, head_size]; scales [num_kv_heads] float32; block_tables
    [R, width], query_start_loc [R + 1] and seq_lens [R] int32, of all rows.
    """
    _, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = keys.shape
    num_rows = len(seq_lens)
    group = num_heads // num_kv_heads
    paged_prefill_kernel[(num_kv_heads, num_prefill_tiles(num_tokens, num_rows - first_row, group, tile))](
        out,
        query,
        keys,
        values,
        key_scales,
        value_scales,
        block_tables,
        query_start_loc,
        seq_lens,
        scale,
        first_row,
        num_rows,
        group,
        sliding_window or 0,
        query.stride(0),
        keys.stride(1),
        block_tables.stride(0),
        HEAD_SIZE=head_size,
        HEAD_PADDED=padded(head_size),
        BLOCK_SIZE=block_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        HAS_WINDOW=sliding_window is not None,
        FP8=keys.dtype.itemsize == 1,
        PRECISION="ieee",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
