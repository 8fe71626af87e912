"""ModelConfig from the metadata and the tensor list of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quartet.services.executor.models.config import ModelConfig, ModelError, number, whole_number
from quartet.services.executor.models.rope import (
    FrequencyFactors,
    LinearScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)

# Mistral models are "llama" in GGUF.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_factors: tuple[float, ...] | None,
) -> ModelConfig:
    """tensor_shapes is by GGUF name, rows first; rope_factors is the file's `rope_freqs.weight`. Raises
    ModelError naming the key that stands in the way."""
    arch = metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ModelError(f"general.architecture {arch!r} is not supported (known: {', '.join(_ARCHITECTURES)})")
    meta = _Metadata(metadata, str(arch))
    if meta.optional("expert_count"):
        raise ModelError(f"{arch}.expert_count {meta.optional('expert_count')}: mixtures of experts are not supported")
    if "token_embd.weight" not in tensor_shapes:
        raise ModelError("the file has no tensor token_embd.weight")

    hidden_size = meta.integer("embedding_length")
    num_heads = meta.integer("attention.head_count")
    num_layers = meta.integer("block_count")
    head_size = meta.integer("attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.integer(key, head_size) != head_size:
            raise ModelError(f"{arch}.{key} {meta.optional(key)} differs from the head size {head_size}")
    window = meta.integer("attention.sliding_window", 0) or None
    return ModelConfig(
        architecture=_ARCHITECTURES[str(arch)],
        vocab_size=tensor_shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        intermediate_size=meta.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=meta.integer("attention.head_count_kv", num_heads),
        head_size=head_size,
        rms_norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
        rope=RopeConfig(meta.number("rope.freq_base", 10_000.0), _rope_scaling(meta, rope_factors)),
        max_position_embeddings=meta.integer("context_length"),
        layer_windows=(window,) * num_layers,
        qkv_bias="blk.0.attn_q.bias" in tensor_shapes,
        o_bias="blk.0.attn_output.bias" in tensor_shapes,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_shapes,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_shapes,
        tie_word_embeddings="output.weight" not in tensor_shapes,
    )


class _Metadata:
    """Typed access to the keys under the architecture's prefix."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self._metadata = metadata
        self._arch = arch

    def optional(self, key: str) -> Any:
        value = self._metadata.get(f"{self._arch}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{self._arch}.{key} differs from layer to layer, which is not supported")
            value = value[0]
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return whole_number(f"{self._arch}.{key}", self.optional(key), default)

    def number(self, key: str, default: float | None = None) -> float:
        return number(f"{self._arch}.{key}", self.optional(key), default)


def _rope_scaling(meta: _Metadata, rope_factors: tuple[float, ...] | None) -> RopeScaling | None:
    kind = meta.optional("rope.scaling.type")
    if kind is None:
        legacy = meta.optional("rope.scale_linear")
        kind = "linear" if legacy is not None else "none"
    if rope_factors is not None:
        if kind != "none":
            raise ModelError(f"rope_freqs.weight together with rope.scaling.type {kind!r} is not supported")
        return FrequencyFactors(rope_factors)
    match kind:
        case "none":
            return None
        case "linear":
            legacy = meta.number("rope.scale_linear", 1.0)
            return LinearScaling(meta.number("rope.scaling.factor", legacy))
        case "yarn":
            factor = meta.number("rope.scaling.factor")
            return YarnScaling(
                factor=factor,
                original_max_position_embeddings=meta.integer(
                    "rope.scaling.original_context_length", meta.integer("context_length")
                ),
                attention_factor=meta.number("rope.scaling.attn_factor", 1.0) * yarn_attention_factor(factor),
                beta_fast=meta.number("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=meta.number("rope.scaling.yarn_beta_slow", 1.0),
            )
        case _:
            raise ModelError(f"rope.scaling.type {kind!r} is not supported (known: none, linear, yarn)")
