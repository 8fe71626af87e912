"""ModelConfig from a Hugging Face config.json, in its older and newer spellings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quartet.services.executor.models.config import ARCHITECTURES, ModelConfig, ModelError, number, whole_number
from quartet.services.executor.models.rope import (
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)

_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# What the classes assume where the file is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Raises ModelError naming the entry that is missing, malformed or not supported."""
    architecture = _architecture(raw)
    values = {**_DEFAULTS[architecture], **raw}
    if raw.get("quantization_config"):
        method = dict(raw["quantization_config"]).get("quant_method")
        raise ModelError(f"quantization_config {method!r} is not supported: give an unquantized or a GGUF model")

    hidden_size = _integer(values, "hidden_size")
    num_heads = _integer(values, "num_attention_heads")
    num_layers = _integer(values, "num_hidden_layers")
    attention_bias = bool(values.get("attention_bias")) and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(values, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_integer(values, "num_key_value_heads", num_heads),
        head_size=_integer(values, "head_dim", hidden_size // max(num_heads, 1)),
        rms_norm_eps=_number(values, "rms_norm_eps", 1e-6),
        rope=_rope(values),
        max_position_embeddings=_integer(values, "max_position_embeddings"),
        layer_windows=_layer_windows(architecture, values, num_layers),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=bool(values.get("mlp_bias")) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=bool(values.get("tie_word_embeddings")),
        hidden_act=str(values.get("hidden_act", "silu")),
        dtype=_dtype(values),
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or [_BY_MODEL_TYPE.get(str(raw.get("model_type")), raw.get("model_type"))]
    if named[0] not in ARCHITECTURES:
        raise ModelError(f"architecture {named[0]!r} is not supported (known: {', '.join(ARCHITECTURES)})")
    return str(named[0])


def _dtype(values: Mapping[str, Any]) -> str | None:
    name = values.get("dtype") or values.get("torch_dtype")
    return None if name is None else str(name).removeprefix("torch.")


def _layer_windows(architecture: str, values: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    layer_types = values.get("layer_types")
    known = {"full_attention", "sliding_attention"}
    if layer_types is not None and (len(layer_types) != num_layers or not known.issuperset(layer_types)):
        raise ModelError(f"layer_types must name {num_layers} layers as {' or '.join(sorted(known))}: {layer_types}")

    slides = architecture == "MistralForCausalLM" or (
        architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") and bool(values.get("use_sliding_window"))
    )
    window = _integer(values, "sliding_window") if slides and values.get("sliding_window") is not None else None
    if architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
        uniform = "full_attention" if window is None else "sliding_attention"
        if layer_types is not None and set(layer_types) != {uniform}:
            raise ModelError(f"layer_types {layer_types} is not supported for {architecture}")
        return (window,) * num_layers
    if layer_types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    full_layers = _integer(values, "max_window_layers")
    return tuple(None if layer < full_layers else window for layer in range(num_layers))


def _rope(values: Mapping[str, Any]) -> RopeConfig:
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ModelError(f"rope_scaling must be an object, not {rope!r}")
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial!r} is not supported")
    theta = rope.get("rope_theta")
    if theta is None:
        theta = values.get("rope_theta")
    return RopeConfig(
        theta=_number({"rope_theta": theta}, "rope_theta", 10_000.0),
        scaling=_rope_scaling(rope, _integer(values, "max_position_embeddings")),
    )


def _rope_scaling(rope: Mapping[str, Any], max_position_embeddings: int) -> RopeScaling | None:
    # "type" is the older spelling of "rope_type"; where a file has both, the newer one counts.
    kind = rope.get("rope_type") or rope.get("type") or "default"
    trained = _integer(rope, "original_max_position_embeddings", max_position_embeddings)
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(_factor(rope))
        case "llama3":
            low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
            if high <= low:
                raise ModelError(f"rope high_freq_factor {high} must be above low_freq_factor {low}")
            return Llama3Scaling(_factor(rope), low, high, trained)
        case "yarn":
            factor = _factor(rope) if rope.get("factor") is not None else max_position_embeddings / trained
            inferred = yarn_attention_factor(factor, rope.get("mscale"), rope.get("mscale_all_dim"))
            return YarnScaling(
                factor=factor,
                original_max_position_embeddings=trained,
                attention_factor=_number(rope, "attention_factor", inferred),
                beta_fast=_number(rope, "beta_fast", 32.0) or 32.0,
                beta_slow=_number(rope, "beta_slow", 1.0) or 1.0,
                truncate=bool(rope.get("truncate", True)),
            )
        case _:
            raise ModelError(f"rope type {kind!r} is not supported (known: default, linear, llama3, yarn)")


def _factor(rope: Mapping[str, Any]) -> float:
    factor = _number(rope, "factor")
    if factor <= 0:
        raise ModelError(f"rope factor must be above 0, not {factor}")
    return factor


def _integer(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    return whole_number(name, values.get(name), default)


def _number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    return number(name, values.get(name), default)
