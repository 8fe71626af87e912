"""The torch backend against dense attention in float64."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quartet.services.executor.attention import torch_paged
from quartet.services.executor.attention.length_groups import group_by_length
from quartet.services.executor.kv_cache import KVCache

LENGTHS = [1, 15, 16, 17, 33]


def dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """query [n, H, D] are the last n positions of keys, values [L, Hkv, D]; float64."""
    num_new, num_heads, _ = query.shape
    seq_len, num_kv_heads, _ = keys.shape
    keys = keys.double().repeat_interleave(num_heads // num_kv_heads, 1)
    values = values.double().repeat_interleave(num_heads // num_kv_heads, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    positions = torch.arange(seq_len)
    queries = torch.arange(seq_len - num_new, seq_len)[:, None]
    hidden = positions > queries
    if window is not None:
        hidden |= positions <= queries - window
    scores.masked_fill_(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)


def check(
    make_batch: Any,
    make_row: Any,
    shapes: list[tuple[int, int, bool]],
    heads: tuple[int, int, int],
    window: int | None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-6,
) -> None:
    """shapes: (num_computed, num_new, is_decode) per row, decodes first."""
    num_heads, num_kv_heads, head_size = heads
    config: Any = SimpleNamespace(num_layers=2, num_kv_heads=num_kv_heads, head_size=head_size)
    total_blocks = sum((computed + new + block_size - 1) // block_size for computed, new, _ in shapes)
    cache = KVCache(config, total_blocks + 3, block_size, dtype, "cpu")
    for pool in cache.keys + cache.values:
        pool.fill_(float("nan"))
    free = list(range(1, total_blocks + 4))
    random.Random(0).shuffle(free)
    generator = torch.Generator().manual_seed(1)

    rows, stored = [], []
    for computed, new, is_decode in shapes:
        seq_len = computed + new
        blocks = [free.pop() for _ in range((seq_len + block_size - 1) // block_size)]
        rows.append(make_row(computed, new, blocks, [0] * new, is_decode))
        keys = torch.randn(seq_len, num_kv_heads, head_size, generator=generator).to(dtype)
        values = torch.randn(seq_len, num_kv_heads, head_size, generator=generator).to(dtype)
        slots = [blocks[position // block_size] * block_size + position % block_size for position in range(seq_len)]
        cache.write(1, keys, values, torch.tensor(slots))
        stored.append((keys, values))
    batch = make_batch(rows, block_size)
    query = torch.randn(len(batch.token_ids), num_heads, head_size, generator=generator).to(dtype)
    scale = head_size**-0.5

    backend = torch_paged.TorchPagedAttention()
    backend.prepare(batch)
    out = backend.forward(query, 1, cache, batch, scale=scale, sliding_window=window)
    assert out.dtype == dtype
    starts = batch.query_start_loc_list
    expected = [
        dense(query[start:end], keys, values, scale, window)
        for (start, end), (keys, values) in zip(itertools.pairwise(starts), stored, strict=True)
    ]
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 18, 40])
@pytest.mark.parametrize("heads", [(4, 4, 8), (6, 2, 8), (9, 3, 16), (4, 1, 8)])
def test_edges_of_blocks_and_windows(
    make_batch: Any, make_row: Any, heads: tuple[int, int, int], window: int | None
) -> None:
    decodes = [(length - 1, 1, True) for length in LENGTHS]
    fresh = [(0, length, False) for length in LENGTHS]
    chunks = [(computed, new, False) for computed in (15, 16, 17) for new in (1, 16, 17)]
    check(make_batch, make_row, decodes + fresh + chunks, heads, window)


@pytest.mark.parametrize("seed", range(20))
def test_random_mixed_batches(make_batch: Any, make_row: Any, seed: int) -> None:
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 2, 3])
    heads = (num_kv_heads * rng.choice([1, 2, 3, 4]), num_kv_heads, rng.choice([8, 16, 24]))
    decodes = [(rng.randrange(150), 1, True) for _ in range(rng.randrange(8))]
    chunks = [(rng.choice([0, rng.randrange(80)]), rng.randrange(1, 60), False) for _ in range(rng.randrange(4))]
    shapes = (decodes + chunks) or [(0, 1, False)]
    window = rng.choice([None, rng.randrange(1, 64)])
    check(make_batch, make_row, shapes, heads, window, block_size=rng.choice([1, 4, 16, 32]))


@pytest.mark.parametrize("window", [None, 20])
def test_rows_of_very_different_lengths_and_tiled_chunks(
    make_batch: Any, make_row: Any, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_paged, "_QUERY_TILE", 8)
    monkeypatch.setattr(torch_paged, "_MAX_GATHERED_BYTES", 8 * 4 * 2 * 8 * 4)
    decodes = [(length - 1, 1, True) for length in (3, 700, 4, 50, 49, 300, 1, 260, 16)]
    check(make_batch, make_row, [*decodes, (5, 37, False), (0, 9, False)], (4, 2, 8), window, block_size=4)


def test_bfloat16(make_batch: Any, make_row: Any) -> None:
    shapes = [(199, 1, True), (20, 1, True), (10, 40, False)]
    check(make_batch, make_row, shapes, (9, 3, 64), None, dtype=torch.bfloat16, tolerance=1e-2)


def test_a_batch_that_was_not_prepared_is_refused(make_batch: Any, make_row: Any) -> None:
    config: Any = SimpleNamespace(num_layers=1, num_kv_heads=1, head_size=8)
    cache = KVCache(config, 4, 16, torch.float32, "cpu")
    backend = torch_paged.TorchPagedAttention()
    first, second = (make_batch([make_row(0, 1, [1], [0])], 16) for _ in range(2))
    backend.prepare(first)
    with pytest.raises(RuntimeError, match="prepare"):
        backend.forward(torch.zeros(1, 1, 8), 0, cache, second, scale=1.0, sliding_window=None)


def test_groups_bound_padding_and_size() -> None:
    rng = random.Random(3)
    for _ in range(200):
        lengths = [rng.choice([1, 2, 13, 200, rng.randrange(1, 500)]) for _ in range(rng.randrange(40))]
        groups = group_by_length(lengths, max_padded=600)
        assert sorted(itertools.chain.from_iterable(groups)) == list(range(len(lengths)))
        for group in groups:
            padded = len(group) * max(lengths[row] for row in group)
            assert len(group) == 1 or padded <= 600
            assert padded <= max(64, sum(lengths[row] for row in group) / 0.75)


def test_bytes_per_block_is_what_the_cache_takes() -> None:
    config: Any = SimpleNamespace(num_layers=3, num_kv_heads=2, head_size=24)
    cache = KVCache(config, 10, 16, torch.bfloat16, "cpu")
    taken = sum(pool.nbytes for pool in cache.keys + cache.values)
    assert taken == 11 * KVCache.bytes_per_block(config, 16, torch.bfloat16)
