"""Llamas made on the spot, of random weights, and the sizes that are measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.models.decoder import LoadParameter
from quartet.services.executor.models.parameters import parameter_shapes
from quartet.services.executor.models.rope import RopeConfig


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_size: int, vocab: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=5e5),
        max_position_embeddings=131_072,
        layer_windows=(None,) * layers,
        tie_word_embeddings=layers <= 16,
    )


CONFIGS = {
    "1b": _llama(2048, 8192, 16, 32, 8, 64, 128_256),
    "8b": _llama(4096, 14336, 32, 32, 8, 128, 128_256),
    "toy": _llama(64, 96, 2, 2, 1, 64, 300),
}


def random_parameters(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LoadParameter:
    """Each parameter as it is asked for, so that none is held twice."""
    shapes = parameter_shapes(config)
    generator = torch.Generator(device).manual_seed(0)

    def load(name: str) -> torch.Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        weight = torch.empty(shape, dtype=dtype, device=device)
        return weight.normal_(0.0, 1 / math.sqrt(shape[1]), generator=generator)

    return load


def num_weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Read in a decode step: all but the table of embeddings, unless it is the head too."""
    shapes = parameter_shapes(config)
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return (sum(math.prod(shape) for shape in shapes.values()) - embedding) * dtype.itemsize


@dataclass(frozen=True)
class Sizes:
    """What is measured; `toy` is for a CPU, to see that all of it runs."""

    decode_rows: int = 64
    decode_context: int = 4096
    prefill_tokens: int = 8192
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    vocab_size: int = 128_256
    matrix: int = 8192
    copy_bytes: int = 4 << 30
    num_requests: int = 64
    prompt_tokens: int = 512
    output_tokens: int = 512
    num_repeats: int = 10


TOY = Sizes(
    decode_rows=2,
    decode_context=40,
    prefill_tokens=40,
    num_heads=2,
    num_kv_heads=1,
    head_size=64,
    vocab_size=300,
    matrix=64,
    copy_bytes=1 << 16,
    num_requests=2,
    prompt_tokens=5,
    output_tokens=4,
    num_repeats=1,
)
