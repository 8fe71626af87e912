"""Batches over a paged cache with random contents, and their attention in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from bench.gpu.shapes import CONFIGS, Sizes
from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.triton.kv_cache import TritonKVCache

BLOCK_SIZE = 16


def attention_config(sizes: Sizes, window: int | None = None) -> ModelConfig:
    """A single layer of the sizes' heads."""
    return replace(
        CONFIGS["toy"],
        num_layers=1,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_size=sizes.head_size,
        layer_windows=(window,),
    )


def paged_batch(rows: list[tuple[int, int]], device: torch.device) -> tuple[ForwardBatch, int]:
    """(batch, blocks of its cache); rows are (context before the step, new tokens), decodes first."""
    lens = [before + new for before, new in rows]
    starts = [0]
    for _, new in rows:
        starts.append(starts[-1] + new)
    needed = [-(-length // BLOCK_SIZE) for length in lens]
    order = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)) + 1).to(torch.int32)
    tables = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    used = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[used : used + count]
        used += count
    flat_rows = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([new for _, new in rows]))
    positions = torch.cat([torch.arange(before, before + new) for before, new in rows])
    slots = tables[flat_rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return ForwardBatch(
        token_ids=torch.zeros_like(positions).to(device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        num_decodes=sum(new == 1 for _, new in rows),
        logits_indices=torch.tensor(starts[1:], device=device) - 1,
        query_start_loc_list=starts,
        seq_lens_list=lens,
    ), used


def random_cache(config: ModelConfig, num_blocks: int, dtype: torch.dtype, device: torch.device) -> TritonKVCache:
    """The null block holds NaN: nothing of it may reach a result."""
    cache = TritonKVCache(config, num_blocks, BLOCK_SIZE, dtype, device)
    for tensor in (*cache.keys, *cache.values):
        for block in tensor.split(4096):
            block.copy_(torch.randn(block.shape, device=device))
        tensor[0] = float("nan")
    return cache


def exact_attention(query: torch.Tensor, batch: ForwardBatch, cache: TritonKVCache, window: int | None) -> torch.Tensor:
    """[T, num_heads * head_size] float64."""
    outs = []
    for row, seq_len in enumerate(batch.seq_lens_list):
        start, end = batch.query_start_loc_list[row : row + 2]
        blocks = batch.block_tables[row, : -(-seq_len // BLOCK_SIZE)].long()
        group = query.shape[1] // cache.keys[0].shape[2]
        key, value = (
            pool[0][blocks].flatten(0, 1)[:seq_len].double().repeat_interleave(group, 1)
            for pool in (cache.keys, cache.values)
        )
        q = query[start:end].double()
        scores = torch.einsum("thd,shd->hts", q, key) / math.sqrt(q.shape[-1])
        seen = torch.arange(seq_len, device=query.device)[None, :]
        at = torch.arange(seq_len - (end - start), seq_len, device=query.device)[:, None]
        hidden = (seen > at) | (seen <= at - (window or seq_len + 1))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hts,shd->thd", weights, value).flatten(1))
    return torch.cat(outs)
