"""How KV memory is laid out, and how much of it was used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.tiny_config import LLAMA

from quartet.services.executor.block_table import BlockTable
from quartet.services.executor.kv_cache import KVCache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_and_values_are_the_halves_of_a_pool_that_begins_with_a_page(dtype: torch.dtype) -> None:
    cache = KVCache(LLAMA, 5, 16, dtype, "cpu")
    assert len(cache.pools) == LLAMA.num_layers
    for pool, keys, values in zip(cache.pools, cache.keys, cache.values, strict=True):
        assert pool.data_ptr() % 4096 == 0
        assert pool.nbytes == 6 * KVCache.bytes_per_block(LLAMA, 16, dtype) // LLAMA.num_layers
        assert keys.is_contiguous() and values.is_contiguous()
        assert keys.shape == values.shape == (6, 16, LLAMA.num_kv_heads, LLAMA.head_size)
        keys.fill_(1.0)
        values.fill_(2.0)
        assert (pool[0] == 1).all() and (pool[1] == 2).all()


def test_the_highest_block_is_remembered_when_its_row_is_gone() -> None:
    table = BlockTable(4, 8, 16)
    assert table.highest == 0
    table.append(np.array([0, 1]), np.array([3, 9]))
    table.append(np.array([0]), np.array([5]))
    table.append(np.array([], np.int64), np.array([], np.int64))
    table.clear(np.array([0, 1]))
    assert table.highest == 9
