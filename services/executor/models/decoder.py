"""One decoder for every supported architecture; what differs between them is in the config."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from quartet.services.executor.attention.interface import AttentionBackend
from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.models.linear import Linear
from quartet.services.executor.models.parameters import EMBED_TOKENS, FINAL_NORM, LM_HEAD
from quartet.services.executor.models.rope import RotaryEmbedding, rotate

LoadParameter = Callable[[str], torch.Tensor]


class Decoder:
    """Weights and the forward pass. Call under torch.inference_mode()."""

    def __init__(self, config: ModelConfig, load: LoadParameter) -> None:
        """`load` gives the named parameter of `parameter_shapes(config)` in the dtype and on the device
        to run with; each is asked for exactly once, in layer order, so that it can be converted late."""
        self.config = config
        self.embed_tokens = load(EMBED_TOKENS)
        self.dtype = self.embed_tokens.dtype
        self.device = self.embed_tokens.device
        self.layers = [DecoderLayer(config, index, load) for index in range(config.num_layers)]
        self.norm = load(FINAL_NORM)
        self.lm_head = Linear(self.embed_tokens if config.tie_word_embeddings else load(LM_HEAD))
        self._rotary = RotaryEmbedding(config.rope, config.head_size, self.device)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache, attention: AttentionBackend) -> torch.Tensor:
        """Computes the batch's tokens and stores their K/V. `attention.prepare(batch)` comes first.
        Returns the normed hidden states [T, hidden_size] in the model's dtype."""
        hidden = F.embedding(batch.token_ids, self.embed_tokens)
        cos, sin = self._rotary(batch.positions)
        for layer in self.layers:
            hidden = layer.forward(hidden, cos, sin, batch, kv_cache, attention)
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden_size] -> [S, vocab_size] float32."""
        return self.lm_head(hidden).float()


class LayerWeights:
    """A layer's parameters, those of products with the same input fused into one."""

    def __init__(self, config: ModelConfig, index: int, load: LoadParameter) -> None:
        def parameter(name: str) -> torch.Tensor:
            return load(f"model.layers.{index}.{name}")

        def linear(has_bias: bool, *names: str) -> Linear:
            return Linear(
                _fuse([parameter(f"{name}.weight") for name in names]),
                _fuse([parameter(f"{name}.bias") for name in names]) if has_bias else None,
            )

        self.config = config
        self.index = index
        self.window = config.layer_windows[index]
        self.input_norm = parameter("input_layernorm.weight")
        self.qkv = linear(config.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.o = linear(config.o_bias, "self_attn.o_proj")
        self.post_attention_norm = parameter("post_attention_layernorm.weight")
        self.gate_up = linear(config.mlp_bias, "mlp.gate_proj", "mlp.up_proj")
        self.down = linear(config.mlp_bias, "mlp.down_proj")
        self.qk_norm: torch.Tensor | None = None
        if config.qk_norm:
            # One product for query and key heads: [num_heads + num_kv_heads, head_size].
            query = parameter("self_attn.q_norm.weight").expand(config.num_heads, -1)
            key = parameter("self_attn.k_norm.weight").expand(config.num_kv_heads, -1)
            self.qk_norm = torch.cat((query, key))


class DecoderLayer(LayerWeights):
    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: ForwardBatch,
        kv_cache: KVCache,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """hidden [T, hidden_size] is added to in place."""
        config = self.config
        eps = config.rms_norm_eps
        num_heads, num_kv_heads, head_size = config.num_heads, config.num_kv_heads, config.head_size

        qkv = self.qkv(rms_norm(hidden, self.input_norm, eps))
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_size)
        query_key, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if self.qk_norm is not None:
            query_key = F.rms_norm(query_key, (head_size,), None, eps) * self.qk_norm
        query_key = rotate(query_key, cos, sin)
        query, key = query_key[:, :num_heads], query_key[:, num_heads:]
        kv_cache.write(self.index, key, value, batch.slot_mapping)
        attended = attention.forward(
            query, self.index, kv_cache, batch, scale=head_size**-0.5, sliding_window=self.window
        )
        hidden.add_(self.o(attended))

        gate, up = self.gate_up(rms_norm(hidden, self.post_attention_norm, eps)).chunk(2, -1)
        return hidden.add_(self.down(F.silu(gate).mul_(up)))


def _fuse(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension; the mean of squares is taken in float32."""
    return F.rms_norm(hidden, weight.shape, weight, eps)
