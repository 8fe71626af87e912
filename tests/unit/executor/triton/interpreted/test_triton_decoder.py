"""The decoder on Triton's kernels against the plain one, on tiny random models."""

import itertools

import pytest
import torch
from support.tiny_config import CONFIGS, LLAMA, random_parameters

from quartet.services.executor.attention.torch_paged import TorchPagedAttention
from quartet.services.executor.input_batch import InputBatch
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.models.decoder import Decoder
from quartet.services.executor.triton.backend import TritonAttention
from quartet.services.executor.triton.decoder import TritonDecoder
from quartet.services.executor.triton.kv_cache import TritonKVCache

torch.set_num_threads(1)

BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS = 16, 12, 4


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
