"""What the decoder asks of an attention implementation."""

from __future__ import annotations

from typing import Protocol

import torch

from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.kv_cache import KVCache


class AttentionBackend(Protocol):
    def prepare(self, batch: ForwardBatch) -> None:
        """Once per step, before the first layer: make what all layers share."""

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
        """Causal attention of a mixed batch of decodes and prefill chunks over the paged cache.

        query [T, num_heads, head_size], rotated; the step's own K/V are in the cache already. A token at
        position p sees positions <= p, and with a window w only those > p - w. Query head h reads KV
        head h // (num_heads / num_kv_heads). Slots that no sequence of the batch has written may hold
        anything, NaN included. Returns [T, num_heads * head_size] in the query's dtype.
        """
        ...
