"""Tiny random models of shapes that the Triton kernels take."""

from __future__ import annotations

import dataclasses

import torch

from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.models.parameters import parameter_shapes
from quartet.services.executor.models.rope import RopeConfig, YarnScaling

LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=101,
    hidden_size=96,
    intermediate_size=72,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    max_position_embeddings=256,
    layer_windows=(None, None),
    tie_word_embeddings=True,
)
CONFIGS = {
    "llama": LLAMA,
    "mistral": dataclasses.replace(LLAMA, architecture="MistralForCausalLM", layer_windows=(9, None), head_size=80),
    "qwen2": dataclasses.replace(
        LLAMA,
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        num_heads=3,
        num_kv_heads=1,
        rope=RopeConfig(1e4, YarnScaling(4.0, 64, 1.2)),
    ),
    "qwen3": dataclasses.replace(LLAMA, architecture="Qwen3ForCausalLM", qk_norm=True, tie_word_embeddings=False),
}


def random_parameters(config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def parameter(shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        return (1 + 0.2 * values if len(shape) == 1 else 0.2 * values).to(dtype)

    return {name: parameter(shape) for name, shape in parameter_shapes(config).items()}
