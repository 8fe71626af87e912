"""KV memory: a pool of blocks per layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quartet.services.executor.models.config import ModelConfig

_PAGE_BYTES = 4096


class KVCache:
    """Paged keys and values of all layers.

    pools[layer]: [2, num_blocks + 1, block_size, num_kv_heads, head_size], contiguous: keys[layer] and
    values[layer], unless compiled kernels divide it in their own way (attention.h). Block 0 is the null
    block: it is never handed out, so padding tokens may write to its slots, and block tables are filled up
    with it; whatever it holds must never reach a result. Usable ids are 1 to num_blocks.
    A slot is block_id * block_size + offset.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks + 1, block_size, config.num_kv_heads, config.head_size)
        # Not zeroed: memory that was not taken yet costs nothing.
        self.pools = [_empty((2, *shape), dtype, torch.device(device)) for _ in range(config.num_layers)]
        self.keys = [pool[0] for pool in self.pools]
        self.values = [pool[1] for pool in self.pools]
        self._key_slots = [keys.flatten(0, 1) for keys in self.keys]
        self._value_slots = [values.flatten(0, 1) for values in self.values]

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_size * dtype.itemsize

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """key, value [T, num_kv_heads, head_size] go to slot_mapping [T] int64."""
        self._key_slots[layer].index_copy_(0, slot_mapping, key)
        self._value_slots[layer].index_copy_(0, slot_mapping, value)


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU from a page's start on: kernels lay out runs of a page, and hardware fetches ahead within one."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = torch.empty(num_bytes + _PAGE_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % _PAGE_BYTES
    return memory[start : start + num_bytes].view(dtype).view(shape)
