"""What a decoder is made of, whichever file format told it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quartet.services.executor.models.rope import RopeConfig

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ACTIVATIONS = ("silu",)


class ModelError(ValueError):
    """The model cannot be served as it is; the message names the file's value that stands in the way."""


def whole_number(name: str, value: Any, default: int | None = None) -> int:
    """A file's value, or `default` where it has none. Raises ModelError naming it when it is no integer."""
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{name} must be a whole number, not {value!r}")
    return value


def number(name: str, value: Any, default: float | None = None) -> float:
    """As whole_number, of any number."""
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{name} must be a number, not {value!r}")
    return float(value)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only transformer.

    layer_windows  one entry per layer: None attends to everything before, w to the last w positions
                   including its own
    qkv_bias, o_bias, mlp_bias  whether those projections have a bias
    qk_norm        RMSNorm over each head of query and key before rotation
    dtype          name of the dtype the weights were saved for, None when the file does not say
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    layer_windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelError(f"architecture {self.architecture!r} is not supported (known: {', '.join(ARCHITECTURES)})")
        if self.hidden_act not in ACTIVATIONS:
            raise ModelError(f"hidden_act {self.hidden_act!r} is not supported (known: {', '.join(ACTIVATIONS)})")
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_size % 2:
            raise ModelError(f"head_size {self.head_size} is odd: it cannot be rotated in halves")
        if len(self.layer_windows) != self.num_layers:
            raise ModelError(f"{len(self.layer_windows)} layer windows for {self.num_layers} layers")
        for window in self.layer_windows:
            if window is not None and window < 1:
                raise ModelError(f"sliding_window must be at least 1, not {window}")
