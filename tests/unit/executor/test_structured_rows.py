"""Rows that follow a grammar: what they may draw, how they end, go on from outputs, and fail alone."""

import json
import threading
from typing import Any

import numpy as np
import pytest
import torch

from quartet.services.executor import allowed_tokens, structured_rows
from quartet.services.executor.allowed_tokens import keep_allowed
from quartet.services.executor.sampler import sample
from quartet.services.executor.sampling_rows import SamplingRows
from quartet.services.executor.structured_rows import StructuredRows
from quartet.shared.messages import LOGPROB_FLOOR, Vocabulary
from quartet.shared.sampling_params import SamplingParams, StructuredKind, StructuredOutput

# Bytes, then some longer tokens, then the end and another special one.
TOKENS = [bytes([i]) for i in range(256)] + [b"yes", b"no", b'{"', b'": ', b"  ", b"<end>", b"<tool>"]
END, TOOL = 261, 262
YES_OR_NO = StructuredOutput(StructuredKind.CHOICE, '["yes", "no"]')
# The model's embedding is padded.
VOCAB_SIZE = 300


def send_vocabulary(rows: StructuredRows, fingerprint: str = "v", part: int = 100) -> None:
    for start in range(0, len(TOKENS), part):
        tokens = TOKENS[start : start + part]
        special = [i for i in (END, TOOL) if start <= i < start + len(tokens)]
        rows.add_vocabulary(Vocabulary(fingerprint, len(TOKENS), start, tokens, special))


@pytest.fixture
def rows() -> StructuredRows:
    rows = StructuredRows(VOCAB_SIZE)
    send_vocabulary(rows)
    return rows


def add(rows: StructuredRows, req_index: int, structured: StructuredOutput, outputs: str = "", **more: Any) -> None:
    given: dict[str, Any] = {"vocabulary": "v", "end_ids": {END}} | more
    rows.add(req_index, structured, outputs=list(outputs.encode()), **given)


def allowed(rows: StructuredRows, req_index: int) -> set[bytes]:
    found = rows.allowed(np.array([req_index]))
    assert found is not None
    assert not rows.failure(req_index), rows.failure(req_index)
    ids = np.flatnonzero(np.unpackbits(found.bits[0], bitorder="little"))
    return {TOKENS[i] for i in ids.tolist() if i < len(TOKENS)}


def feed(rows: StructuredRows, req_index: int, *token_ids: int) -> None:
    for token_id in token_ids:
        rows.append(np.array([req_index]), np.array([token_id]))


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(StructuredKind.REGEX, text)


def test_the_end_of_a_rows_last_occupant_allows_the_next_nothing(rows: StructuredRows) -> None:
    add(rows, 2, regex("a?"))
    assert b"a" in allowed(rows, 2)
    held = threading.Event()
    rows._thread.submit(held.wait)
    feed(rows, 2, END)
    rows.remove(2)
    add(rows, 2, regex("abc"), outputs="a")
    rows._rows[2].wait()
    held.set()
    assert allowed(rows, 2) == {b"b"}


def test_only_what_leads_on_to_a_complete_output_can_be_drawn(rows: StructuredRows) -> None:
    add(rows, 2, YES_OR_NO)
    assert allowed(rows, 2) == {b"y", b"yes", b"n", b"no"}
    feed(rows, 2, ord("y"))
    assert allowed(rows, 2) == {b"e"}
    feed(rows, 2, ord("e"), ord("s"))
    assert allowed(rows, 2) == {b"<end>"}


def test_an_output_that_may_end_or_go_on(rows: StructuredRows) -> None:
    add(rows, 0, regex("a+"), end_ids={END, ord("\n")})
    assert allowed(rows, 0) == {b"a"}
    feed(rows, 0, ord("a"))
    assert allowed(rows, 0) == {b"a", b"<end>", b"\n"}


def test_a_stop_token_cannot_be_drawn_within_the_output(rows: StructuredRows) -> None:
    add(rows, 0, regex("a[b\n]c"), end_ids={END, ord("\n")})
    feed(rows, 0, ord("a"))
    assert allowed(rows, 0) == {b"b"}


def test_behind_the_end_everything_goes(rows: StructuredRows) -> None:
    add(rows, 0, YES_OR_NO)
    assert allowed(rows, 0)
    feed(rows, 0, 256, END, 7)
    assert len(allowed(rows, 0)) == len(set(TOKENS))


def test_special_tokens_are_no_text(rows: StructuredRows) -> None:
    add(rows, 0, regex(".*"))
    assert b"<" in allowed(rows, 0) and b"<tool>" not in allowed(rows, 0)


def test_a_row_goes_on_from_its_outputs(rows: StructuredRows) -> None:
    add(rows, 1, YES_OR_NO, outputs="ye")
    assert allowed(rows, 1) == {b"s"}
    add(rows, 3, YES_OR_NO, outputs="yes")
    assert allowed(rows, 3) == {b"<end>"}


def test_rows_do_not_share_where_they_are(rows: StructuredRows) -> None:
    add(rows, 0, YES_OR_NO)
    add(rows, 1, YES_OR_NO)
    feed(rows, 0, ord("n"))
    assert allowed(rows, 0) == {b"o"} and allowed(rows, 1) == {b"y", b"yes", b"n", b"no"}
    rows.remove(0)
    assert rows.allowed(np.array([0])) is None
    add(rows, 0, regex("x"))
    assert allowed(rows, 0) == {b"x"}


def test_whitespace_in_json_is_bounded(rows: StructuredRows) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    add(rows, 0, StructuredOutput(StructuredKind.JSON_SCHEMA, schema))
    feed(rows, 0, ord("{"), ord(" "))
    assert b" " not in allowed(rows, 0) and b"  " not in allowed(rows, 0)
    add(rows, 1, StructuredOutput(StructuredKind.JSON_OBJECT))
    feed(rows, 1, ord("{"), ord("\n"), *[ord(" ")] * 16)
    assert not {b" ", b"\n", b"\t"} & allowed(rows, 1)
    feed(rows, 1, ord("}"))
    assert allowed(rows, 1) == {b"<end>"}


@pytest.mark.parametrize(
    ("structured", "more", "reason", "invalid"),
    [
        (regex("(a"), {}, "unclosed group", True),
        (YES_OR_NO, {"vocabulary": "other"}, "has not been sent", False),
        (YES_OR_NO, {"outputs": "maybe"}, "do not follow", False),
        (StructuredOutput(StructuredKind.JSON_SCHEMA, '{"type": "yaml"}'), {}, "yaml", True),
        (StructuredOutput(StructuredKind.GRAMMAR, "start: missing"), {}, "missing", True),
        (StructuredOutput(StructuredKind.GRAMMAR, "start: <[99999]>"), {}, "", True),
    ],
)
def test_a_row_fails_alone(
    rows: StructuredRows, structured: StructuredOutput, more: dict[str, Any], reason: str, invalid: bool
) -> None:
    add(rows, 0, structured, **more)
    add(rows, 1, YES_OR_NO)
    both = np.array([1, 0])
    found = rows.allowed(both)
    assert found is not None and found.places.tolist() == [0], "the failed row is not masked"
    assert rows.failed(both).tolist() == [False, True]
    assert reason in rows.failure(0) and rows.failure(0)
    assert rows.invalid(0) == invalid and not rows.invalid(1)
    feed(rows, 0, 5)
    assert allowed(rows, 1) == {b"y", b"yes", b"n", b"no"}


def test_where_no_token_is_left_the_row_fails() -> None:
    rows = StructuredRows(VOCAB_SIZE)
    rows.add_vocabulary(Vocabulary("v", 3, 0, [b"a", b"b", b"<end>"], [2]))
    rows.add(0, regex("abc"), "v", [], {2})
    feed(rows, 0, 0)
    assert rows.allowed(np.array([0])) is not None and not rows.failure(0)
    feed(rows, 0, 1)
    rows.allowed(np.array([0]))
    assert "no token" in rows.failure(0) and rows.invalid(0)


def test_what_takes_too_long_to_follow_fails(rows: StructuredRows, monkeypatch: pytest.MonkeyPatch) -> None:
    add(rows, 0, YES_OR_NO)
    assert allowed(rows, 0)
    monkeypatch.setattr(structured_rows, "MAX_MASK_SECONDS", -1.0)
    feed(rows, 0, ord("y"))
    rows.allowed(np.array([0]))
    assert "too long" in rows.failure(0) and rows.invalid(0)


@pytest.mark.parametrize(
    "parts",
    [
        [Vocabulary("w", 4, 1, [b"a"])],
        [Vocabulary("w", 4, 0, [b"a", b"b"]), Vocabulary("w", 4, 3, [b"c"])],
        [Vocabulary("w", 4, 0, [b"a", b"b"]), Vocabulary("x", 4, 2, [b"c", b"d"])],
        [Vocabulary("w", 1, 0, [b"a", b"b"])],
        [Vocabulary("w", 0, 0, [])],
        [Vocabulary("w", 4, 0, [b"a", b"b"]), Vocabulary("w", 4, 2, [b"c"])],
    ],
)
def test_a_vocabulary_that_is_not_whole_is_none(rows: StructuredRows, parts: list[Vocabulary]) -> None:
    for part in parts:
        rows.add_vocabulary(part)
    add(rows, 0, YES_OR_NO, vocabulary="w")
    rows.allowed(np.array([0]))
    assert "has not been sent" in rows.failure(0)
    add(rows, 1, YES_OR_NO)
    assert allowed(rows, 1)


def test_the_last_four_vocabularies_are_kept(rows: StructuredRows) -> None:
    for i in range(3):
        rows.add_vocabulary(Vocabulary(f"v{i}", 2, 0, [b"y", b"n"]))
    send_vocabulary(rows)
    rows.add_vocabulary(Vocabulary("v3", 2, 0, [b"y", b"n"]))
    add(rows, 0, YES_OR_NO)
    assert allowed(rows, 0)
    add(rows, 1, YES_OR_NO, vocabulary="v0")
    assert "has not been sent" in rows.failure(1)


def test_masked_tokens_have_finite_log_probabilities_and_never_come() -> None:
    state = SamplingRows(3, VOCAB_SIZE)
    send_vocabulary(state.structured)
    params = SamplingParams(temperature=1.0, seed=3, logprobs=5, structured=YES_OR_NO)
    prompt = np.array([1], np.int32)
    state.add(0, params, [END], 0, prompt, 1, "v")
    state.add(1, SamplingParams(temperature=0.0), [END], 0, prompt, 1)
    state.add(2, SamplingParams(temperature=0.0, structured=regex("(")), [END], 0, prompt, 1, "v")
    logits = torch.randn(3, 320, generator=torch.Generator().manual_seed(1))
    logits[0, 256:258] -= 30.0
    plain = int(logits[1, :VOCAB_SIZE].argmax())
    output = sample(logits, state, np.array([0, 1, 2]), np.zeros(3, np.int64))
    assert TOKENS[output.token_ids[0]] in (b"y", b"yes", b"n", b"no") and output.token_ids[1] == plain
    assert output.logprobs is not None and output.logprobs[0] is not None
    entry = output.logprobs[0]
    assert len(entry.top) == 5 and all(np.isfinite(logprob) for _, logprob in entry.top)
    assert entry.top[4][1] == LOGPROB_FLOOR and entry.rank <= 4
    assert np.exp([logprob for _, logprob in entry.top]).sum() == pytest.approx(1.0, abs=1e-4)
    assert state.structured.failed(np.array([0, 1, 2])).tolist() == [False, False, True]


def test_bits_are_applied_alike_on_every_kind_of_device() -> None:
    state = StructuredRows(VOCAB_SIZE)
    send_vocabulary(state)
    for i, text in enumerate(["[a-f]{3}", "x", ".*"]):
        add(state, i, regex(text))
    found = state.allowed(np.array([2, 3, 0, 1]))
    assert found is not None and found.places.tolist() == [0, 2, 3]
    logits = torch.randn(4, VOCAB_SIZE)
    unpacked = np.unpackbits(found.bits, axis=1, bitorder="little", count=VOCAB_SIZE)
    expected = logits.clone()
    for place, bits in zip(found.places, unpacked, strict=True):
        expected[place][torch.from_numpy(bits == 0)] = -torch.inf
    keep_allowed(logits, found)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 3, "top_p": 0.8, "temperature": 0.3}],
)
def test_few_tokens_are_drawn_as_from_the_whole_row(monkeypatch: pytest.MonkeyPatch, params: dict[str, float]) -> None:
    def draws() -> list[int]:
        state = SamplingRows(4, VOCAB_SIZE)
        send_vocabulary(state.structured)
        for i, text in enumerate(["[a-f]", "[a-z]", ".", "(yes|no)"]):
            sampling = SamplingParams(seed=i, structured=regex(text), **params)  # type: ignore[arg-type]
            state.add(i, sampling, [END], 0, np.array([1], np.int32), 1, "v")
        generator = torch.Generator().manual_seed(5)
        logits = [torch.randn(4, VOCAB_SIZE, generator=generator) * 2 for _ in range(40)]
        rows = np.array([3, 1, 0, 2])
        return [t for i, each in enumerate(logits) for t in sample(each, state, rows, np.full(4, i)).token_ids.tolist()]

    few = draws()
    monkeypatch.setattr(allowed_tokens, "FEW_WORDS", 2)
    mixed = draws()
    monkeypatch.setattr(allowed_tokens, "FEW_WORDS", -1)
    assert few == mixed == draws() and len(set(few)) > 10
