"""The names (Hugging Face's) and shapes of every parameter that a config calls for."""

from __future__ import annotations

from collections.abc import Iterator

from quartet.services.executor.models.config import ModelConfig

EMBED_TOKENS = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter that must be set; `lm_head.weight` only where it is not tied."""
    shapes: dict[str, tuple[int, ...]] = {EMBED_TOKENS: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes.update((prefix + name, shape) for name, shape in _layer_shapes(config))
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    yield "input_layernorm.weight", (hidden,)
    projections = (
        ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for name, rows, columns, has_bias in projections:
        yield f"{name}.weight", (rows, columns)
        if has_bias:
            yield f"{name}.bias", (rows,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_size,)
        yield "self_attn.k_norm.weight", (config.head_size,)
    yield "post_attention_layernorm.weight", (hidden,)
