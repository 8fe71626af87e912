"""Scheduler core and executor together against transformers, on tiny random models of every architecture."""

import random

import pytest
import torch
from support.engine import Engine
from support.oracle import assert_greedy

VOCAB = 320
LENGTHS = [1, 15, 16, 17, 32, 33, 200]
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def build(name):
    import transformers as hf

    torch.manual_seed(7)
    if name == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON, tie_word_embeddings=True))
    elif name == "mistral":
        model = hf.MistralForCausalLM(hf.MistralConfig(**COMMON, sliding_window=24))
    elif name == "qwen2":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**COMMON))
    else:
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**COMMON, head_dim=32))
    # The default initialisation is so narrow that attention hardly matters; biases and norms are trivial.
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
        else:
            parameter.data.mul_(4.0)
    return model.float().eval()


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def pair(request, tmp_path_factory):
    """(the reference, the folder it was saved to)"""
    torch.set_num_threads(1)
    model = build(request.param)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return model, path


def prompts(seed=1):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def check(engine, reference, ids, prompts, count):
    assert not engine.failed
    for request_id, prompt in zip(ids, prompts, strict=True):
        output = engine.outputs[request_id, 0]
        assert len(output) == count
        assert_greedy(reference, prompt, output)


def test_alone(pair):
    reference, path = pair
    engine = Engine(path)
    for prompt in prompts():
        request_id = engine.add(prompt, 24)
        engine.run()
        check(engine, reference, [request_id], [prompt], 24)


@pytest.mark.parametrize("budget", [256, 64])
def test_batched(pair, budget):
    reference, path = pair
    engine = Engine(path, budget=budget)
    ids = [engine.add(prompt, 40) for prompt in prompts()]
    engine.run()
    check(engine, reference, ids, prompts(), 40)


def test_prefix_hits(pair):
    reference, path = pair
    engine = Engine(path)
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB) for _ in range(70)]
    for round_ in range(3):
        batch = [shared[:cut] + tail for cut in (33, 48, 70) for tail in ([5], [5, 6, 7])]
        ids = [engine.add(prompt, 20) for prompt in batch]
        engine.run()
        check(engine, reference, ids, batch, 20)
        if round_:
            assert [engine.cached[i, 0] for i in ids] == [(len(p) - 1) // 16 * 16 for p in batch]


def test_a_pool_so_small_that_requests_are_preempted(pair):
    reference, path = pair
    engine = Engine(path, num_blocks=20, budget=64)
    batch = [p for p in prompts() if len(p) > 1] + prompts(2)
    ids = [engine.add(prompt, 60) for prompt in batch]
    engine.run()
    assert engine.num_preemptions() > 0
    check(engine, reference, ids, batch, 60)


def test_arrivals_join_a_running_batch(pair):
    reference, path = pair
    engine = Engine(path, budget=64)
    ids, batch = [], []
    for prompt in prompts(4) + prompts(5):
        ids.append(engine.add(prompt, 30))
        batch.append(prompt)
        engine.run(steps=3)
    engine.run()
    check(engine, reference, ids, batch, 30)


def test_siblings_share_their_prompt(pair):
    reference, path = pair
    engine = Engine(path)
    prompt = prompts(6)[-1]
    request_id = engine.add(prompt, 16, n=3)
    engine.run()
    for index in range(3):
        assert_greedy(reference, prompt, engine.outputs[request_id, index])
    assert [engine.cached[request_id, i] for i in range(3)] == [0, 192, 192]
