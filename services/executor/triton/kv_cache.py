"""KV memory on a GPU, of the model's dtype or of 8 bits with scales."""

from __future__ import annotations

import torch

from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.triton.kv_write import kv_write


class TritonKVCache(KVCache):
    """A KVCache that may be float8_e4m3fn: what is stored times its head's scale is the key or value.

    key_scales, value_scales: [num_layers, num_kv_heads] float32, 1 until set; not used by wider caches.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(config, num_blocks, block_size, dtype, device)
        shape = (config.num_layers, config.num_kv_heads)
        self.key_scales = torch.ones(shape, dtype=torch.float32, device=device)
        self.value_scales = torch.ones(shape, dtype=torch.float32, device=device)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """As KVCache.write; slots of -1 and of the null block are not written."""
        kv_write(
            self.keys[layer],
            self.values[layer],
            _heads_together(key),
            _heads_together(value),
            slot_mapping,
            self.key_scales[layer],
            self.value_scales[layer],
        )


def _heads_together(heads: torch.Tensor) -> torch.Tensor:
    """[T, heads, head_size] with each token's heads in one piece, as a slice of a wider product has them."""
    in_one_piece = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return heads if in_one_piece else heads.contiguous()
