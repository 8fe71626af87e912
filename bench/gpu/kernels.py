"""Every kernel against float64 on the device, at shapes with awkward edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from bench.gpu.batches import BLOCK_SIZE, attention_config, exact_attention, paged_batch, random_cache
from bench.gpu.shapes import CONFIGS, Sizes, random_parameters
from quartet.services.executor import sampler
from quartet.services.executor.attention.torch_paged import TorchPagedAttention
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.models.decoder import Decoder
from quartet.services.executor.models.rope import RopeConfig, RotaryEmbedding
from quartet.services.executor.sampling_rows import SamplingRows
from quartet.services.executor.triton.backend import TritonAttention
from quartet.services.executor.triton.decoder import TritonDecoder
from quartet.services.executor.triton.device_sampler import DeviceSampler
from quartet.services.executor.triton.fused import add_rms_norm, rope_and_write, silu_mul
from quartet.services.executor.triton.kv_cache import TritonKVCache
from quartet.shared.sampling_params import SamplingParams

# Of the largest value.
TOLERANCE = 2.0**-6


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest, relative to the largest value expected; NaN where a place was not written."""
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def check_all(sizes: Sizes, device: torch.device, is_toy: bool) -> dict[str, dict[str, object]]:
    """By name: error and whether it is small enough, or what was raised."""
    results: dict[str, dict[str, object]] = {}
    for name, check in _checks(sizes, device, is_toy):
        try:
            error = check()
            results[name] = {"error": error, "passed": error <= TOLERANCE}
        except Exception as raised:  # one kernel that does not run is one result
            results[name] = {"error": f"{type(raised).__name__}: {raised}"[:500], "passed": False}
    return results


def _checks(sizes: Sizes, device: torch.device, is_toy: bool) -> Iterator[tuple[str, Callable[[], float]]]:
    for hidden in (576,) if is_toy else (576, 2048, 4096, 8192):
        yield f"add_rms_norm {hidden}", lambda hidden=hidden: _norm(hidden, device)
    yield "silu_mul", lambda: _gate(1536, device)
    kv_dtypes = [torch.bfloat16, torch.float8_e4m3fn]
    head_sizes = (64,) if is_toy else (64, 80, 96, 128, 256)
    for head_size in head_sizes:
        for kv_dtype in kv_dtypes:
            name = str(kv_dtype).removeprefix("torch.")
            yield f"rope_and_write head {head_size} kv {name}", lambda h=head_size, d=kv_dtype: _rope(h, d, device)
            for window in (None, 20):
                yield (
                    f"attention head {head_size} kv {name} window {window}",
                    lambda h=head_size, d=kv_dtype, w=window: _attention(h, d, w, is_toy, device),
                )
    yield "sampler", lambda: _sampler(sizes.vocab_size, device)
    yield "decoder", lambda: _decoder(device)


def _random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(torch.bfloat16)


def _norm(hidden: int, device: torch.device) -> float:
    residual, addend, weight = (_random(5, hidden, device=device) for _ in range(3))
    out = add_rms_norm(residual, addend, weight[0], 1e-5)
    return error_of(out, F.rms_norm(residual.double(), (hidden,), weight[0].double(), 1e-5))


def _gate(width: int, device: torch.device) -> float:
    gate_up = _random(5, 2 * width, device=device)
    gate, up = gate_up.double().chunk(2, -1)
    return error_of(silu_mul(gate_up), F.silu(gate) * up)


def _rope(head_size: int, kv_dtype: torch.dtype, device: torch.device) -> float:
    num_heads, num_kv_heads, num_tokens = 9, 3, 6
    qkv = _random(num_tokens, (num_heads + 2 * num_kv_heads) * head_size, device=device)
    positions = torch.tensor([0, 1, 15, 16, 4095, 100_000], device=device)
    cos, sin = RotaryEmbedding(RopeConfig(theta=1e4), head_size, device)(positions)
    slots = torch.tensor([16, 63, 17, -1, 40, 31], device=device)
    keys, values = torch.zeros(2, 4, BLOCK_SIZE, num_kv_heads, head_size, device=device).to(kv_dtype)
    weight = _random(2, head_size, device=device)
    ones = torch.ones(num_kv_heads, device=device)
    query = rope_and_write(qkv, cos, sin, slots, keys, values, (weight[0], weight[1]), 1e-5, ones, ones)
    q, k, v = qkv.view(num_tokens, -1, head_size).double().split([num_heads, num_kv_heads, num_kv_heads], 1)

    def rotated(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        x = F.rms_norm(x, (head_size,), norm.double(), 1e-5)
        return x * cos.double() + x.roll(head_size // 2, -1) * sin.double()

    written = slots >= BLOCK_SIZE
    errors = [error_of(query, rotated(q, weight[0]))]
    # Eight bits round to a sixteenth of a value.
    scale = 1.0 if kv_dtype == torch.bfloat16 else 0.125
    for pool, expected in ((keys, rotated(k, weight[1])), (values, v)):
        errors.append(scale * error_of(pool.flatten(0, 1).float()[slots[written]], expected[written]))
    return max(errors)


def _attention(head_size: int, kv_dtype: torch.dtype, window: int | None, is_toy: bool, device: torch.device) -> float:
    sizes = Sizes(num_heads=4 if is_toy else 8, num_kv_heads=2, head_size=head_size)
    long = 50 if is_toy else 3000
    rows = [(0, 1), (15, 1), (16, 1), (31, 1), (long, 1), (0, 17), (16, 16), (7, 33)]
    config = attention_config(sizes, window)
    batch, num_blocks = paged_batch(rows, device)
    cache = random_cache(config, num_blocks, kv_dtype, device)
    backend = TritonAttention(config, kv_dtype, len(rows), device)
    query = _random(len(batch.positions), sizes.num_heads, head_size, device=device)
    backend.prepare(batch)
    out = backend.forward(query, 0, cache, batch, scale=head_size**-0.5, sliding_window=window)
    return error_of(out, exact_attention(query, batch, cache, window))


def _sampler(vocab_size: int, device: torch.device) -> float:
    """0 when every row draws what the CPU's rules allow: greedy its token, the others from the CPU's set."""
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={7: 3.0}),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1, temperature=0.7),
        SamplingParams(top_p=1e-5),
        SamplingParams(top_k=20, top_p=0.9, seed=3),
        SamplingParams(min_p=0.2, seed=4),
    ]
    rows = np.arange(len(params))
    host, mirror = SamplingRows(len(params), vocab_size), SamplingRows(len(params), vocab_size)
    for row, param in enumerate(params):
        for state in (host, mirror):
            state.add(row, param, [], 0, np.array([7, 7, 9], np.int32), 2)
    device_sampler = DeviceSampler(mirror, len(params), device)
    device_sampler.add(rows.tolist())
    wrong = 0
    for index in range(8):
        logits = torch.randn(len(params), vocab_size, generator=torch.Generator().manual_seed(index)) * 2
        indices = np.full(len(params), index)
        expected = sampler.sample(logits.clone(), host, rows, indices).token_ids
        host.append(rows, expected)
        columns = [torch.from_numpy(column).to(device) for column in (rows, indices)]
        got = device_sampler.sample(logits.to(device), *columns, rows).token_ids.tolist()
        wrong += sum(a != b for a, b in zip(got[:4], expected[:4].tolist(), strict=True))
        top_k = logits[4].topk(20).indices.tolist()
        kept = torch.nonzero(logits[5] >= logits[5].max() + np.log(0.2))[:, 0].tolist()
        wrong += (got[4] not in top_k) + (got[5] not in kept)
    return float(wrong)


@torch.inference_mode()
def _decoder(device: torch.device) -> float:
    config = CONFIGS["toy"]
    batch, num_blocks = paged_batch([(0, 17), (0, 5)], device)
    dtype = torch.bfloat16
    hidden = []
    for build, make_cache, attention in (
        (Decoder, KVCache, TorchPagedAttention()),
        (TritonDecoder, TritonKVCache, TritonAttention(config, dtype, 2, device)),
    ):
        decoder = build(config, random_parameters(config, dtype, device))
        cache = make_cache(config, num_blocks, BLOCK_SIZE, dtype, device)
        attention.prepare(batch)
        hidden.append(decoder.forward(batch, cache, attention))
    # Two ways of rounding to bfloat16, over layers.
    return 0.25 * error_of(hidden[1], hidden[0])
