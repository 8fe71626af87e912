"""The calls that lm-eval makes of a server of completions: log-likelihoods are those of transformers."""

import pytest
import torch
from support.http import post
from support.oracle import logits

# Rounding of fp32 sums in another order.
TOLERANCE = 2e-3
CONTEXTS = ["The sky is", "Q: 2+2=?\nA:", "x", "A longer beginning, with commas, and an end."]
CONTINUATIONS = [" blue", " 4", "yz", " Grüße"]


def encode(text):
    return list(text.encode())


def expected(model, context, continuation):
    """The sum of the continuation's log-probabilities, and whether greedy decoding gives it."""
    rows = torch.log_softmax(logits(model, context + continuation)[len(context) - 1 : -1], dim=-1)
    each = [float(rows[i, token_id]) for i, token_id in enumerate(continuation)]
    return sum(each), all(int(row.argmax()) == token_id for row, token_id in zip(rows, continuation, strict=True))


def scored(choice, context, cut):
    """As lm-eval reads a choice: without the context, and without the token that was generated in the end."""
    logprobs = choice["logprobs"]
    end = -1 if cut else None
    values = logprobs["token_logprobs"][len(context) : end]
    tops = logprobs["top_logprobs"][len(context) : end]
    return sum(values), all(value >= max(top.values()) for value, top in zip(values, tops, strict=True))


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_batches_of_token_ids_are_scored_as_transformers_does(line, max_tokens):
    pairs = [(encode(context), encode(text)) for context in CONTEXTS for text in CONTINUATIONS]
    # Greedy decoding's own continuation of one, so that both answers to "is it greedy" are there.
    own = int(logits(line.model, pairs[0][0])[-1].argmax())
    pairs[0] = (pairs[0][0], [own])
    body = {
        "model": line.name,
        "prompt": [context + continuation for context, continuation in pairs],
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    reply = post(line.http, "/v1/completions", body)
    assert reply.status == 200, reply
    choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(pairs)
    for choice, (context, continuation) in zip(choices, pairs, strict=True):
        num_tokens = len(context) + len(continuation) + max_tokens
        assert len(choice["logprobs"]["tokens"]) == num_tokens and choice["logprobs"]["token_logprobs"][0] is None
        score, greedy = scored(choice, context, max_tokens)
        wanted, wanted_greedy = expected(line.model, context, continuation)
        assert score == pytest.approx(wanted, abs=TOLERANCE * len(continuation))
        assert greedy == wanted_greedy
    assert scored(choices[0], pairs[0][0], max_tokens)[1]


def test_the_same_scores_whether_the_prefix_is_cached_or_not(line):
    context, continuation = encode("The very same beginning of a prompt, longer than a block. " * 3), encode(" end")
    body = {"prompt": [context + continuation], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    first, second = (post(line.http, "/v1/completions", body).json()["choices"][0] for _ in range(2))
    wanted, _ = expected(line.model, context, continuation)
    for choice in (first, second):
        assert scored(choice, context, True)[0] == pytest.approx(wanted, abs=TOLERANCE * len(continuation))


def test_text_until_a_stop_string(line):
    """generate_until."""
    body = {"prompt": ["Hello"], "max_tokens": 24, "temperature": 0, "stop": ["\n\n", "Q:"], "seed": 1234}
    (choice,) = post(line.http, "/v1/completions", body).json()["choices"]
    assert isinstance(choice["text"], str) and choice["finish_reason"] in ("stop", "length")
