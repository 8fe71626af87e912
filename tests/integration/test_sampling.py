"""Sampling as a client sees it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

PROMPT = "Once upon a time"


def together(client, *requests):
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda options: client.generate(PROMPT, **options), requests))


def test_b1_a_seed_does_not_depend_on_neighbours(client):
    seeded = {"seed": 11, "temperature": 0.9, "max_tokens": 10, "ignore_eos": True}
    alone = client.generate(PROMPT, **seeded).token_ids
    for neighbour in ({"seed": 12}, {}, {}, {"seed": 11}):
        other = {"temperature": 0.9, "max_tokens": 10, "ignore_eos": True} | neighbour
        first, second = together(client, seeded, other)
        assert first.token_ids == alone
        assert (second.token_ids == alone) == (neighbour == {"seed": 11})


def test_b2_choices_differ_and_the_set_is_reproducible(client):
    options = {"n": 4, "seed": 7, "temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
    first, second = (client.generate(PROMPT, **options) for _ in range(2))
    assert sorted(first.choices) == [0, 1, 2, 3]
    texts = [first.choices[i].token_ids for i in range(4)]
    assert len({tuple(t) for t in texts}) == 4
    assert texts == [second.choices[i].token_ids for i in range(4)]
    assert first.usage.completion_tokens == 32
    single = client.generate(PROMPT, **(options | {"n": 1}))
    assert single.token_ids == texts[0]


def test_b4_without_a_seed_calls_differ(client):
    options = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
    results = [client.generate(PROMPT, **options) for _ in range(5)]
    assert len({tuple(r.token_ids) for r in results}) == 5
    assert len({r.started.seed for r in results}) == 5


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-4, 0.01])
def test_b5_tiny_temperatures_are_like_greedy(client, temperature):
    options = {"max_tokens": 12, "ignore_eos": True, "seed": 1}
    greedy = client.generate(PROMPT, temperature=0.0, **options)
    result = client.generate(PROMPT, temperature=temperature, **options)
    assert result.text.strip()
    if temperature <= 1e-4:
        assert result.token_ids == greedy.token_ids


def test_b7_kinds_of_sampling_mix_in_one_batch(client):
    base = {"max_tokens": 12, "ignore_eos": True, "seed": 3}
    mixed = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
        {"min_p": 0.05},
        {"presence_penalty": 1.0, "logprobs": 3},
        {"repetition_penalty": 1.3, "top_p": 0.2},
    ]
    requests = [base | extra for extra in mixed]
    solo = [client.generate(PROMPT, **options).token_ids for options in requests]
    for _ in range(2):
        assert [r.token_ids for r in together(client, *requests)] == solo


def test_b9_penalties_on_the_first_step(client):
    prompt = "hello" + " hello" * 7
    options = {"temperature": 0.0, "max_tokens": 1, "logprobs": 5}

    def top(**penalty):
        entry = client.generate(prompt, **options, **penalty).choices[0].logprobs[0]
        return {t.token_id: t.logprob for t in entry.top}

    base = top()
    assert top(presence_penalty=2.0) == pytest.approx(base, abs=1e-4)
    assert top(frequency_penalty=2.0) == pytest.approx(base, abs=1e-4)
    assert top(repetition_penalty=2.0) != pytest.approx(base, abs=1e-2)


def test_b10_penalties_do_something(client):
    options = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    plain = client.generate(PROMPT, **options).token_ids
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert client.generate(PROMPT, **options, **{penalty: 2.0}).token_ids != plain


def test_b12_scoring_generates_nothing(client, reference):
    import torch
    from support import oracle

    result = client.generate("The capital of France is Paris.", max_tokens=0, prompt_logprobs=10)
    ids = list(result.started.prompt_token_ids)
    assert result.usage.completion_tokens == 0 and not result.token_ids and result.finish_reason == "LENGTH"
    expected = torch.log_softmax(oracle.logits(reference, ids), dim=-1)
    for i in range(1, len(ids)):
        entry = result.prompt_logprobs[i].logprobs
        assert entry.token.token_id == ids[i] and len(entry.top) == 10
        assert entry.token.logprob == pytest.approx(float(expected[i - 1, ids[i]]), abs=1e-3)
    assert "max_tokens" in client.refused("x", max_tokens=0)
    assert "max_tokens" in client.refused("x", max_tokens=-1, prompt_logprobs=1)


def test_min_tokens_and_logit_bias(client):
    options = {"temperature": 0.0, "max_tokens": 12, "logit_bias": {2: 100.0}}
    assert client.generate(PROMPT, **options).token_ids == [2]
    held = client.generate(PROMPT, min_tokens=5, **options)
    assert 2 not in held.token_ids[:5] and held.token_ids[5:] == [2]
