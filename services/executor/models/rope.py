"""Rotary position embeddings: the frequency rules models are trained with, and their application."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, a smooth passage between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """NTK-by-parts interpolation; cos and sin are multiplied by `attention_factor`."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """One divisor per frequency, as GGUF files carry for llama3 scaling (`rope_freqs.weight`)."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: RopeScaling | None = None


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What cos and sin are multiplied with when a config gives no `attention_factor`."""

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def inverse_frequencies(rope: RopeConfig, head_size: int) -> torch.Tensor:
    """Returns [head_size / 2] float32 on the CPU, in radians per position."""
    frequencies = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    inverse = 1.0 / (rope.theta**frequencies)
    match rope.scaling:
        case None:
            return inverse
        case LinearScaling(factor):
            return inverse / factor
        case Llama3Scaling():
            return _llama3(inverse, rope.scaling)
        case YarnScaling():
            return _yarn(rope.theta, head_size, rope.scaling)
        case FrequencyFactors(factors):
            return inverse / torch.tensor(factors, dtype=torch.float32)


def _llama3(inverse: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    context = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    scaled = torch.where(wavelength > context / low, inverse / scaling.factor, between)
    return torch.where(wavelength < context / high, inverse, scaled)


def _yarn(theta: float, head_size: int, scaling: YarnScaling) -> torch.Tensor:
    def dimension(rotations: float) -> float:
        context = scaling.original_max_position_embeddings
        return head_size * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001

    powers = theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    ramp = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - keep) + 1.0 / powers * keep


class RotaryEmbedding:
    """Makes the cos and sin of a step once; all layers share them."""

    def __init__(self, rope: RopeConfig, head_size: int, device: torch.device) -> None:
        self._inverse_frequencies = inverse_frequencies(rope, head_size).to(device)
        self._magnitude = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] int64 -> cos, sin, each [T, 1, head_size] float32. The first half of sin is
        negated, so that `rotate` needs no negation of its own."""
        angles = positions.to(torch.float32)[:, None] * self._inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._magnitude != 1.0:
            cos, sin = cos * self._magnitude, sin * self._magnitude
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads [T, N, head_size] rotated in float32, given back in their own dtype."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, swapped, sin).to(heads.dtype)
