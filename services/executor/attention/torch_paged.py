"""Paged attention in plain torch: right on any device, quick enough on a CPU, and what kernels are
checked against.

Decode rows are gathered through their block tables into padded batches of like lengths; the query
heads that share a KV head become the query rows of one small product, so K and V are not repeated.
Prefill chunks are taken row by row over exactly the slots that they can see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quartet.services.executor.attention.length_groups import group_by_length
from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.kv_cache import KVCache

# Bounds what a batch of gathered decode rows takes: bytes of K (and as many of V).
_MAX_GATHERED_BYTES = 4 << 20
# Queries per mask: a long chunk's early queries need not look at (masked) late keys.
_QUERY_TILE = 256


@dataclass(slots=True)
class _DecodeGroup:
    """B decode rows padded to L slots. `rows` is None when the group is all decode rows in order."""

    rows: torch.Tensor | None
    block_ids: torch.Tensor  # [B * L / block_size]
    unreadable: torch.Tensor  # [n] of the B * L gathered slots: past a row's end, before its window
    mask: torch.Tensor  # [B, 1, 1, L] added to the scores


@dataclass(slots=True)
class _QueryTile:
    """Queries [start, end) of the batch over keys [key_start, key_end) of the chunk's gathered ones."""

    start: int
    end: int
    key_start: int
    key_end: int
    mask: torch.Tensor  # [end - start, key_end - key_start] added to the scores


@dataclass(slots=True)
class _PrefillChunk:
    block_ids: torch.Tensor  # [n]
    slot_start: int  # of the gathered slots, [slot_start, slot_end) are seen by at least one query
    slot_end: int
    tiles: list[_QueryTile]


@dataclass(slots=True)
class _Plan:
    decode_groups: list[_DecodeGroup]
    prefill_chunks: list[_PrefillChunk]


class TorchPagedAttention:
    """An AttentionBackend. Plans are made at the first layer with a given window, and shared by the rest."""

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None
        self._plans: dict[int | None, _Plan] = {}

    def prepare(self, batch: ForwardBatch) -> None:
        self._batch = batch
        self._plans.clear()

    def forward(
        self,
        query: torch.Tensor,
        layer: int,
        kv_cache: KVCache,
        batch: ForwardBatch,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """As AttentionBackend.forward; RuntimeError when `prepare` was not called for this batch."""
        if self._batch is not batch:
            raise RuntimeError("attention.prepare(batch) was not called for this batch")
        plan = self._plans.get(sliding_window)
        if plan is None:
            plan = self._plans[sliding_window] = _make_plan(batch, kv_cache, sliding_window, query.dtype)
        keys, values = kv_cache.keys[layer], kv_cache.values[layer]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        num_decodes = batch.num_decodes
        for group in plan.decode_groups:
            if group.rows is None:
                out[:num_decodes] = _decode(query[:num_decodes], keys, values, group, scale)
            else:
                out.index_copy_(0, group.rows, _decode(query.index_select(0, group.rows), keys, values, group, scale))
        for chunk in plan.prefill_chunks:
            _prefill(query, out, keys, values, chunk, scale)
        return out.flatten(1)


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _DecodeGroup, scale: float
) -> torch.Tensor:
    """query [B, num_heads, head_size] -> the same shape."""
    batch_size, num_heads, head_size = query.shape
    num_kv_heads = keys.shape[2]
    padded_len = group.mask.shape[-1]

    def gather(blocks: torch.Tensor) -> torch.Tensor:
        slots = blocks.index_select(0, group.block_ids).flatten(0, 1)
        # A mask cannot take a NaN back, so what must not be read becomes 0.
        slots.index_fill_(0, group.unreadable, 0)
        return slots.view(batch_size, padded_len, num_kv_heads, head_size).transpose(1, 2)

    heads_per_kv = num_heads // num_kv_heads
    attended = F.scaled_dot_product_attention(
        query.view(batch_size, num_kv_heads, heads_per_kv, head_size),
        gather(keys),
        gather(values),
        group.mask.expand(batch_size, num_kv_heads, heads_per_kv, padded_len),
        scale=scale,
    )
    return attended.reshape(batch_size, num_heads, head_size)


def _prefill(
    query: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk: _PrefillChunk,
    scale: float,
) -> None:
    def gather(blocks: torch.Tensor) -> torch.Tensor:
        slots = blocks.index_select(0, chunk.block_ids).flatten(0, 1)[chunk.slot_start : chunk.slot_end]
        return slots.transpose(0, 1).unsqueeze(0)

    chunk_keys, chunk_values = gather(keys), gather(values)
    for tile in chunk.tiles:
        attended = F.scaled_dot_product_attention(
            query[tile.start : tile.end].transpose(0, 1).unsqueeze(0),
            chunk_keys[:, :, tile.key_start : tile.key_end],
            chunk_values[:, :, tile.key_start : tile.key_end],
            tile.mask[None, None],
            scale=scale,
            enable_gqa=True,
        )
        out[tile.start : tile.end] = attended[0].transpose(0, 1)


def _make_plan(batch: ForwardBatch, kv_cache: KVCache, window: int | None, dtype: torch.dtype) -> _Plan:
    return _Plan(
        decode_groups=_decode_groups(batch, kv_cache, window, dtype),
        prefill_chunks=[
            _prefill_chunk(batch, row, kv_cache.block_size, window, dtype)
            for row in range(batch.num_decodes, len(batch.seq_lens_list))
        ],
    )


def _decode_groups(
    batch: ForwardBatch, kv_cache: KVCache, window: int | None, dtype: torch.dtype
) -> list[_DecodeGroup]:
    num_decodes, block_size = batch.num_decodes, kv_cache.block_size
    if num_decodes == 0:
        return []
    seq_lens = batch.seq_lens_list[:num_decodes]
    first_blocks = [0 if window is None else max(0, seq_len - window) // block_size for seq_len in seq_lens]
    num_blocks = [
        (seq_len + block_size - 1) // block_size - first for seq_len, first in zip(seq_lens, first_blocks, strict=True)
    ]
    bytes_per_block = kv_cache.keys[0][0].nbytes
    groups = group_by_length(num_blocks, _MAX_GATHERED_BYTES // bytes_per_block)

    device = batch.block_tables.device
    firsts = torch.tensor(first_blocks, dtype=torch.int64, device=device)
    counts = torch.tensor(num_blocks, dtype=torch.int64, device=device)
    return [
        _decode_group(
            batch,
            torch.tensor(sorted(rows), dtype=torch.int64, device=device),
            firsts,
            counts,
            max(num_blocks[row] for row in rows),
            block_size,
            window,
            dtype,
        )
        for rows in groups
    ]


def _decode_group(
    batch: ForwardBatch,
    rows: torch.Tensor,
    first_blocks: torch.Tensor,
    num_blocks: torch.Tensor,
    width: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> _DecodeGroup:
    device = rows.device
    columns = torch.arange(width, device=device)
    first, count = first_blocks[rows, None], num_blocks[rows, None]
    table_columns = (first + columns).clamp_(max=batch.block_tables.shape[1] - 1)
    block_ids = batch.block_tables[rows].gather(1, table_columns).long()
    block_ids.masked_fill_(columns >= count, 0)

    seq_lens = batch.seq_lens[rows, None]
    positions = first * block_size + torch.arange(width * block_size, device=device)
    readable = positions < seq_lens
    if window is not None:
        readable &= positions >= seq_lens - window
    mask = torch.zeros(readable.shape, dtype=dtype, device=device).masked_fill_(~readable, float("-inf"))
    return _DecodeGroup(
        rows=None if len(rows) == batch.num_decodes else rows,
        block_ids=block_ids.flatten(),
        unreadable=(~readable).flatten().nonzero().squeeze(1),
        mask=mask[:, None, None],
    )


def _prefill_chunk(
    batch: ForwardBatch, row: int, block_size: int, window: int | None, dtype: torch.dtype
) -> _PrefillChunk:
    start, end = batch.query_start_loc_list[row], batch.query_start_loc_list[row + 1]
    seq_len = batch.seq_lens_list[row]
    computed = seq_len - (end - start)
    # Position of the first slot that is gathered and seen.
    origin = 0 if window is None else max(0, computed - window + 1)
    first_block = origin // block_size
    device = batch.block_tables.device

    tiles = []
    for tile_start in range(start, end, _QUERY_TILE):
        tile_end = min(tile_start + _QUERY_TILE, end)
        first_query, last_query = computed + tile_start - start, computed + tile_end - start
        key_start = origin if window is None else max(origin, first_query - window + 1)
        queries = torch.arange(first_query, last_query, device=device)[:, None]
        positions = torch.arange(key_start, last_query, device=device)
        seen = positions <= queries
        if window is not None:
            seen &= positions > queries - window
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
        tiles.append(_QueryTile(tile_start, tile_end, key_start - origin, last_query - origin, mask))
    return _PrefillChunk(
        block_ids=batch.block_tables[row, first_block : (seq_len + block_size - 1) // block_size].long(),
        slot_start=origin - first_block * block_size,
        slot_end=seq_len - first_block * block_size,
        tiles=tiles,
    )
