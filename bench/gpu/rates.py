"""Attention, sampling and the fused kernels against what the card's memory and matrix units allow."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bench.gpu.batches import attention_config, paged_batch, random_cache
from bench.gpu.shapes import Sizes
from bench.gpu.timing import matrix_peak, memory_bandwidth, seconds
from quartet.services.executor.sampling_rows import SamplingRows
from quartet.services.executor.triton.backend import TritonAttention
from quartet.services.executor.triton.device_sampler import DeviceSampler
from quartet.services.executor.triton.fused import add_rms_norm, silu_mul
from quartet.shared.sampling_params import SamplingParams

DECODE_GOAL = 0.85
PREFILL_GOAL = 0.60


def measure(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    with torch.inference_mode():
        bandwidth, peak = memory_bandwidth(sizes, device), matrix_peak(sizes, device)
        result: dict[str, Any] = {"copy_bytes_per_second": bandwidth, "matrix_operations_per_second": peak}
        for name in ("bfloat16", "float8_e4m3fn"):
            result[f"decode_{name}"] = _decode(sizes, getattr(torch, name), bandwidth, device)
        result["prefill"] = _prefill(sizes, peak, device)
        result["sampling"] = _sampling(sizes, bandwidth, device)
        result["fused"] = _fused(sizes, bandwidth, device)
    return result


def _decode(sizes: Sizes, kv_dtype: torch.dtype, bandwidth: float, device: torch.device) -> dict[str, Any]:
    config = attention_config(sizes)
    batch, num_blocks = paged_batch([(sizes.decode_context - 1, 1)] * sizes.decode_rows, device)
    cache = random_cache(config, num_blocks, kv_dtype, device)
    backend = TritonAttention(config, kv_dtype, sizes.decode_rows, device)
    query = torch.randn(sizes.decode_rows, sizes.num_heads, sizes.head_size, device=device).to(torch.bfloat16)
    backend.prepare(batch)
    scale = sizes.head_size**-0.5

    def attend() -> torch.Tensor:
        return backend.forward(query, 0, cache, batch, scale=scale, sliding_window=None)

    kv_shape = (sizes.decode_rows, sizes.num_kv_heads, sizes.decode_context, sizes.head_size)
    num_bytes = 2 * np.prod(kv_shape) * kv_dtype.itemsize
    took = seconds(attend, device, sizes.num_repeats)
    result = {"seconds": took, "bandwidth_share": num_bytes / took / bandwidth, "goal": DECODE_GOAL}
    if kv_dtype == torch.bfloat16:
        key, value = (torch.randn(kv_shape, device=device).to(torch.bfloat16) for _ in range(2))
        q = query[:, :, None]
        result["sdpa_seconds"] = _try(
            lambda: F.scaled_dot_product_attention(q, key, value, scale=scale, enable_gqa=True), sizes, device
        )
    return result


def _prefill(sizes: Sizes, peak: float, device: torch.device) -> dict[str, Any]:
    config, num_tokens = attention_config(sizes), sizes.prefill_tokens
    batch, num_blocks = paged_batch([(0, num_tokens)], device)
    cache = random_cache(config, num_blocks, torch.bfloat16, device)
    backend = TritonAttention(config, torch.bfloat16, 1, device)
    query = torch.randn(num_tokens, sizes.num_heads, sizes.head_size, device=device).to(torch.bfloat16)
    backend.prepare(batch)
    scale = sizes.head_size**-0.5

    def attend() -> torch.Tensor:
        return backend.forward(query, 0, cache, batch, scale=scale, sliding_window=None)

    operations = 2 * num_tokens**2 * sizes.num_heads * sizes.head_size  # two products, half of each seen
    took = seconds(attend, device, sizes.num_repeats)
    q = query.transpose(0, 1)[None]
    key, value = (
        torch.randn(1, sizes.num_kv_heads, num_tokens, sizes.head_size, device=device).to(torch.bfloat16)
        for _ in range(2)
    )
    sdpa = _try(
        lambda: F.scaled_dot_product_attention(q, key, value, scale=scale, is_causal=True, enable_gqa=True),
        sizes,
        device,
    )
    flex = _flex(q, key, value, scale, sizes, device) if device.type == "cuda" else None
    return {
        "seconds": took,
        "matrix_peak_share": operations / took / peak,
        "goal": PREFILL_GOAL,
        "sdpa_seconds": sdpa,
        "flex_seconds": flex,
    }


def _flex(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, sizes: Sizes, device: torch.device
) -> float | str:
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        length = q.shape[2]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=str(device))
        compiled = torch.compile(flex_attention)
        return seconds(
            lambda: compiled(q, key, value, block_mask=mask, scale=scale, enable_gqa=True), device, sizes.num_repeats
        )
    except Exception as error:  # it needs a compiler, which may not be there: a comparison, no check
        return f"{type(error).__name__}: {error}"[:300]


def _try(work: Any, sizes: Sizes, device: torch.device) -> float | str:
    try:
        with warnings.catch_warnings(action="ignore"):
            return seconds(work, device, sizes.num_repeats)
    except RuntimeError as error:
        return str(error)[:300]


def _sampling(sizes: Sizes, bandwidth: float, device: torch.device) -> dict[str, Any]:
    rows = np.arange(sizes.decode_rows)
    logits = torch.randn(len(rows), sizes.vocab_size, device=device) * 3
    on_device = torch.from_numpy(rows).to(device)
    result = {}
    for name, params in {
        "greedy": SamplingParams(temperature=0.0),
        "temperature": SamplingParams(),
        "top_k 50, top_p 0.9": SamplingParams(top_k=50, top_p=0.9),
        "top_p 0.9, flat": SamplingParams(top_p=0.9, temperature=50.0),
    }.items():
        state = SamplingRows(len(rows), sizes.vocab_size)
        for row in rows.tolist():
            state.add(row, params, [], 0, np.zeros(1, np.int32), 1)
        sampler = DeviceSampler(state, len(rows), device)
        sampler.add(rows.tolist())
        took = seconds(lambda s=sampler: s.sample(logits, on_device, on_device, rows), device, sizes.num_repeats)
        result[name] = {"seconds": took, "logits_read_once_seconds": logits.nbytes / bandwidth}
    return result


def _fused(sizes: Sizes, bandwidth: float, device: torch.device) -> dict[str, float]:
    """Shares of the memory's bandwidth."""
    num_tokens, hidden = sizes.prefill_tokens, sizes.num_heads * sizes.head_size
    residual, addend = (torch.randn(num_tokens, hidden, device=device).to(torch.bfloat16) for _ in range(2))
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    gate_up = torch.randn(num_tokens, 4 * hidden, device=device).to(torch.bfloat16)
    norm = seconds(lambda: add_rms_norm(residual, addend, weight, 1e-5), device, sizes.num_repeats)
    gate = seconds(lambda: silu_mul(gate_up), device, sizes.num_repeats)
    return {
        "add_rms_norm": 4 * residual.nbytes / norm / bandwidth,
        "silu_mul": 1.5 * gate_up.nbytes / gate / bandwidth,
    }
