"""bf16 costs less than 1 % of perplexity against transformers in fp32, on a fixed text and the real model."""

import functools
import math
from pathlib import Path

import pytest
import torch
from support import oracle
from support.engine import Engine

import bench.perplexity
from quartet.services.executor.native.decoder import NativeDecoder
from quartet.services.executor.native.library import detect_isa
from quartet.services.tokenizer.loaders import load_tokenizer
from quartet.shared.model_files import resolve_model

TEXT = (Path(__file__).parents[2] / "data" / "alice.txt").read_text()


@pytest.fixture(scope="module")
def path():
    torch.set_num_threads(1)
    return resolve_model("smollm2-135m-instruct").path


@pytest.fixture(scope="module")
def reference(path):
    """(the text's ids, transformers' mean negative log-probability of them)"""
    ids = load_tokenizer(path).tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert len(ids) > 600
    logprobs = torch.log_softmax(oracle.logits(oracle.smollm2(path), ids)[:-1], dim=-1)
    found = -float(logprobs.gather(1, torch.tensor(ids[1:])[:, None]).mean())
    assert 5 < math.exp(found) < 100, "the text is no test of the model"
    return ids, found


def score(engine, ids):
    request_id = engine.add(ids, 0, prompt_logprobs=0)
    engine.run()
    entries = engine.prompt_logprobs[request_id]
    assert len(entries) == len(ids) and entries[0] is None
    return -sum(entry.logprob for entry in entries[1:]) / (len(ids) - 1)


NATIVE = pytest.mark.skipif(not detect_isa(), reason="no compiled kernels here")


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=NATIVE)])
def test_bf16_keeps_the_perplexity(path, reference, kernels):
    ids, expected = reference
    native = functools.partial(NativeDecoder, block_size=16, num_threads=2) if kernels == "native" else None
    engine = Engine(path, dtype="bfloat16", num_blocks=80, native=native)
    ours = score(engine, ids)
    assert abs(math.exp(ours - expected) - 1) < 0.01, (math.exp(ours), math.exp(expected))


@pytest.mark.skipif(not detect_isa(), reason="no compiled kernels here")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("budget", [256, 4])
def test_quantized_weights_keep_the_perplexity(path, reference, quantization, budget):
    """Steps of 256 tokens and of 4 multiply by different kernels."""
    ids, expected = reference
    native = functools.partial(NativeDecoder, block_size=16, num_threads=2, quantization=quantization)
    engine = Engine(path, dtype="bfloat16", num_blocks=80, budget=budget, native=native)
    assert abs(math.exp(score(engine, ids) - expected) - 1) < 0.01, (quantization, budget)


@pytest.mark.skipif(not detect_isa(), reason="no compiled kernels here")
def test_rows_of_8_bits_keep_the_perplexity(path):
    """Steps of 32 tokens are multiplied as 8 bits, which costs the most; too little to be seen on a short text."""
    text = (Path(bench.perplexity.__file__).with_name("data") / "alice.txt").read_text()
    ids = load_tokenizer(path).tokenizer.encode(text, add_special_tokens=False).ids[:8192]
    loaded = bench.perplexity.loaders(path, 2, "auto")
    expected = bench.perplexity.score(loaded["bf16"](), ids, window=1024, budget=256)
    for quantization in ("int8", "int4"):
        ours = bench.perplexity.score(loaded[quantization](), ids, window=1024, budget=32)
        assert abs(math.exp(ours - expected) - 1) < 0.01, quantization
