"""The decoder on Triton's kernels against the plain one, on tiny random models."""

import dataclasses
import itertools

import pytest
import torch

from quartet.services.executor.attention.torch_paged import TorchPagedAttention
from quartet.services.executor.input_batch import InputBatch
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.models.decoder import Decoder
from quartet.services.executor.models.parameters import parameter_shapes
from quartet.services.executor.models.rope import RopeConfig, YarnScaling
from quartet.services.executor.triton.backend import TritonAttention
from quartet.services.executor.triton.decoder import TritonDecoder
from quartet.services.executor.triton.kv_cache import TritonKVCache

torch.set_num_threads(1)

BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS = 16, 12, 4

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


def poisoned(cache: KVCache) -> KVCache:
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))
    return cache


CASES = [*itertools.product(CONFIGS, [torch.float32]), ("llama", torch.bfloat16), ("qwen3", torch.float16)]


@torch.inference_mode()
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_mixed_batch_is_as_of_the_plain_decoder(name: str, dtype: torch.dtype, plans) -> None:
    config = CONFIGS[name]
    parameters = random_parameters(config, dtype)
    cpu = torch.device("cpu")
    plain, fused = Decoder(config, parameters.__getitem__), TritonDecoder(config, parameters.__getitem__)
    caches = [poisoned(kind(config, NUM_BLOCKS, BLOCK_SIZE, dtype, cpu)) for kind in (KVCache, TritonKVCache)]
    backends = [TorchPagedAttention(), TritonAttention(config, dtype, MAX_NUM_SEQS, cpu)]
    batch = InputBatch(
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=64,
        max_num_batched_tokens=64,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        vocab_size=config.vocab_size,
    )
    tokens = [(7 * i + 3) % config.vocab_size for i in range(40)]
    steps = [
        plans.plan(new=[plans.new_row(1, tokens[:33], [5, 2, 9])], prefill=[(1, 20)]),
        plans.plan(new=[plans.new_row(3, tokens[5:22], [4, 1])], prefill=[(3, 16), (1, 12)]),
        plans.plan(new=[plans.new_row(0, tokens[9:24], [11])], decode=[1, 3], prefill=[(0, 15)]),
    ]
    for plan in steps:
        step = batch.apply(plan)
        forward_batch = batch.forward_batch(step, cpu)
        hidden = []
        for decoder, cache, backend in zip((plain, fused), caches, backends, strict=True):
            backend.prepare(forward_batch)
            hidden.append(decoder.forward(forward_batch, cache, backend))
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
        torch.testing.assert_close(hidden[1], hidden[0], rtol=tolerance, atol=tolerance)
        logits = [decoder.compute_logits(h) for decoder, h in zip((plain, fused), hidden, strict=True)]
        assert logits[1].dtype == torch.float32
        torch.testing.assert_close(logits[1], logits[0], rtol=10 * tolerance, atol=10 * tolerance)


def test_a_plain_cache_is_refused() -> None:
    decoder = TritonDecoder(LLAMA, random_parameters(LLAMA, torch.float32).__getitem__)
    cache = KVCache(LLAMA, 1, BLOCK_SIZE, torch.float32, "cpu")
    with pytest.raises(TypeError, match="TritonKVCache"):
        decoder.forward(None, cache, None)
