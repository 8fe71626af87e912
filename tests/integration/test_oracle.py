"""Greedy fp32 through all four services against transformers, and what prefix hits must not change."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.oracle import assert_greedy

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a land far away,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are",
    "Roses are red, violets are blue,",
    "In 1969, the first man to walk on the Moon",
    "To make a good cup of tea, first",
    "The quick brown fox",
    "import numpy as np\n\nx = np.",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is 17 plus 25?\nA:",
    "The mitochondria is",
    "SELECT name, age FROM users WHERE",
    "Il était une fois",
    "1, 1, 2, 3, 5, 8,",
    "The main difference between a process and a thread is",
    "<html>\n<head>\n<title>",
    "Photosynthesis is the process by which",
    "My favourite book is",
    "🙂 means",
]


def words(count: int) -> str:
    """A prompt of exactly `count` tokens."""
    return "one" + " one" * (count - 1)


def test_twenty_prompts_together_equal_the_reference(client, reference):
    with ThreadPoolExecutor(20) as pool:
        results = list(pool.map(lambda p: client.generate(p, temperature=0.0, max_tokens=32, ignore_eos=True), PROMPTS))
    for result in results:
        assert len(result.token_ids) == 32 and result.finish_reason == "LENGTH"
        assert_greedy(reference, list(result.started.prompt_token_ids), result.token_ids)


def test_a_chat_answers_and_stops(client, reference):
    result = client.generate([{"role": "user", "content": "What is the capital of France?"}], temperature=0.0)
    assert result.text == "The capital of France is Paris."
    assert result.finish_reason == "STOP" and result.token_ids[-1] == 2
    assert_greedy(reference, list(result.started.prompt_token_ids), result.token_ids)
    assert result.usage.completion_tokens == len(result.token_ids)
    assert result.usage.prompt_tokens == len(result.started.prompt_token_ids)


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_a_prompt_sent_twice_hits_whole_blocks_but_its_last_token(client, length, cached):
    options = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "cache_salt": f"twice {length}"}
    first = client.generate(words(length), **options)
    second = client.generate(words(length), **options)
    assert first.usage.prompt_tokens == length
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, cached)
    assert first.token_ids == second.token_ids and first.text == second.text


def test_a_cache_hit_needs_the_same_salt(client):
    options = {"temperature": 0.0, "max_tokens": 1}
    prompt = "salted " + words(40)
    cached = [
        client.generate(prompt, cache_salt=salt, **options).usage.cached_tokens for salt in ("", "x", "", "x", "y")
    ]
    assert cached[:2] == [0, 0] and cached[2] == cached[3] > 0 and cached[4] == 0


def test_a_resumed_request_goes_on_where_it_was(client):
    """What a client does when gateway and tokenizer died: ids, seed and past again."""
    from quartet.shared.pb import inference_pb2 as pb

    options = {"temperature": 0.9, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    whole = client.generate("Once upon a time", **options)
    prompt = list(whole.started.prompt_token_ids)
    for cut in (1, 17, 23):
        past = pb.ChoicePast(index=0, past_token_ids=whole.token_ids[:cut])
        rest = [r.chunk for r in client.stream(prompt, past=[past], **options) if r.WhichOneof("event") == "chunk"]
        assert rest[0].start == cut
        assert [t for chunk in rest for t in chunk.token_ids] == whole.token_ids[cut:]
        assert whole.text.endswith("".join(chunk.text for chunk in rest))
