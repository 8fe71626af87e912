"""The decoder whose steps are cuBLAS products with one fused kernel between each two of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quartet.services.executor.attention.interface import AttentionBackend
from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.models.decoder import LayerWeights, LoadParameter
from quartet.services.executor.models.linear import Linear
from quartet.services.executor.models.parameters import EMBED_TOKENS, FINAL_NORM, LM_HEAD
from quartet.services.executor.models.rope import RotaryEmbedding
from quartet.services.executor.triton.fused import add_rms_norm, rope_and_write, silu_mul
from quartet.services.executor.triton.kv_cache import TritonKVCache


class TritonDecoder:
    """A Model, as models.Decoder; its KVCache is a TritonKVCache. Nothing of a step waits for the device, so
    one may be captured in a graph."""

    def __init__(self, config: ModelConfig, load: LoadParameter) -> None:
        """`load` as for models.Decoder."""
        self.config = config
        self.embed_tokens = load(EMBED_TOKENS)
        self.dtype = self.embed_tokens.dtype
        self.device = self.embed_tokens.device
        self.layers = [_Layer(config, index, load) for index in range(config.num_layers)]
        self.norm = load(FINAL_NORM)
        self.lm_head = Linear(self.embed_tokens if config.tie_word_embeddings else load(LM_HEAD))
        self._rotary = RotaryEmbedding(config.rope, config.head_size, self.device)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache, attention: AttentionBackend) -> torch.Tensor:
        """As models.Decoder.forward."""
        if not isinstance(kv_cache, TritonKVCache):
            raise TypeError(f"a TritonDecoder needs a TritonKVCache, not a {type(kv_cache).__name__}")
        residual = F.embedding(batch.token_ids, self.embed_tokens)
        cos, sin = self._rotary(batch.positions)
        addend: torch.Tensor | None = None
        for layer in self.layers:
            addend = layer.forward(residual, addend, cos, sin, batch, kv_cache, attention)
        return add_rms_norm(residual, addend, self.norm, self.config.rms_norm_eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden_size] -> [S, vocab_size] float32."""
        return self.lm_head(hidden).float()


class _Layer(LayerWeights):
    def forward(
        self,
        residual: torch.Tensor,
        addend: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: ForwardBatch,
        kv_cache: TritonKVCache,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """residual [T, hidden_size] grows in place, by the last layer's `addend` too; returns this layer's."""
        config, index = self.config, self.index
        qkv = self.qkv(add_rms_norm(residual, addend, self.input_norm, config.rms_norm_eps))
        query = rope_and_write(
            qkv,
            cos,
            sin,
            batch.slot_mapping,
            kv_cache.keys[index],
            kv_cache.values[index],
            None if self.qk_norm is None else (self.qk_norm[0], self.qk_norm[-1]),
            config.rms_norm_eps,
            kv_cache.key_scales[index],
            kv_cache.value_scales[index],
        )
        attended = attention.forward(
            query, index, kv_cache, batch, scale=config.head_size**-0.5, sliding_window=self.window
        )
        projected = self.o(attended)
        normed = add_rms_norm(residual, projected, self.post_attention_norm, config.rms_norm_eps)
        return self.down(silu_mul(self.gate_up(normed)))
