"""Steps without tensors against the same kernels called with tensors, the plain sampler among them."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch
from support.engine import Engine
from support.kernels import KINDS

from quartet.services.executor.native.decoder import NativeDecoder
from quartet.services.executor.native.engine import NativeEngine
from quartet.services.executor.native.library import Isa

VOCAB = 331
# The narrowest and the widest.
ENDS = sorted({*KINDS[:1], *KINDS[-1:]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers as hf

    torch.manual_seed(3)
    config = hf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    path = tmp_path_factory.mktemp("llama")
    hf.LlamaForCausalLM(config).save_pretrained(path)
    return path


def engines(folder: Path, kind: Isa, **sizes: int) -> list[Engine]:
    build = functools.partial(NativeDecoder, block_size=16, num_threads=2, isa=kind)
    made = [Engine(folder, native=build, as_tensors=as_tensors, **sizes) for as_tensors in (True, False)]
    assert isinstance(made[1].executor._runner._engine, NativeEngine)
    return made


SAMPLINGS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 2},
    {"temperature": 1.2, "min_p": 0.02, "seed": 3, "logprobs": 3},
    {"logit_bias": {5: 4.0}, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "temperature": 0.9, "seed": 4, "top_p": 0.7},
    {"min_tokens": 9, "stop_token_ids": list(range(0, VOCAB, 2)), "temperature": 1.0, "seed": 5},
    {"prompt_logprobs": 2, "temperature": 1.0, "seed": 6},
]


# With 17 tokens a step, pieces of prompts are cut to one token without a sample; with 24 blocks, rows are preempted.
@pytest.mark.parametrize("kind", ENDS, ids=lambda kind: kind.describe())
@pytest.mark.parametrize("sizes", [{}, {"budget": 17}, {"budget": 64, "num_blocks": 24, "max_num_seqs": 5}], ids=str)
def test_the_same_tokens_and_logprobs(folder: Path, kind: Isa, sizes: dict[str, int]) -> None:
    results = []
    for engine in engines(folder, kind, **sizes):
        rng = random.Random(0)
        for round_ in range(2):
            for sampling in SAMPLINGS:
                prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 16, 17, 40]))]
                engine.add(prompt, 12 + round_, **sampling)
                engine.run(steps=rng.randrange(4))
        engine.run()
        assert not engine.failed and len(engine.finished) == 2 * len(SAMPLINGS)
        results.append((engine.outputs, engine.prompt_logprobs))
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ENDS, ids=lambda kind: kind.describe())
def test_one_stream_grows_to_the_end_of_its_context(folder: Path, kind: Isa) -> None:
    outputs = []
    for engine in engines(folder, kind):
        engine.add([7] * 3, 253, temperature=1.0, seed=9)
        engine.run()
        outputs.append(engine.outputs)
    assert outputs[0] == outputs[1] and len(outputs[0][1, 0]) == 253
