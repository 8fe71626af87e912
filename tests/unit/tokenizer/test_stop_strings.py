"""Stop strings, against a reference that looks at the whole text after each piece."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.services.tokenizer.stop_strings import StopStrings


def naive(pieces: list[str], stop: list[str], include: bool, ignored: int = 0) -> tuple[list[str], str | None]:
    """Text let out so far after each piece, and the stop; matches in the first `ignored` pieces do not count."""
    text, let_out = "", []
    for i, piece in enumerate(pieces):
        before = len(text)
        text += piece
        found = [
            (start, len(s), s)
            for s in stop
            for start in range(len(text))
            if text.startswith(s, start) and start + len(s) > before and i >= ignored
        ]
        if found:
            start, length, s = min(found)
            let_out.append(text[: start + length] if include else text[:start])
            return let_out, s
        held = max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        let_out.append(text[: len(text) - held])
    let_out.append(text)
    return let_out, None


def fed(pieces: list[str], stop: list[str], include: bool, ignored: int = 0) -> tuple[list[str], str | None]:
    checker, text, let_out = StopStrings(stop, include), "", []
    for i, piece in enumerate(pieces):
        out, found = checker.feed(piece, honour=i >= ignored)
        text += out
        let_out.append(text)
        if found is not None:
            return let_out, found
    let_out.append(text + checker.release())
    return let_out, None


@settings(max_examples=1500, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=5), max_size=8),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    ignored=st.integers(0, 4),
)
def test_same_as_the_naive_reference(pieces: list[str], stop: list[str], include: bool, ignored: int) -> None:
    assert fed(pieces, stop, include, ignored) == naive(pieces, stop, include, ignored)


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "found"),
    [
        (["The quick bro", "wn", " fo", "x"], ["wn fo"], "The quick bro", "wn fo"),  # A4: across pieces
        (["x", "DEF"], ["DE"], "x", "DE"),  # A5: within one
        (["abcdef"], ["de", "bc"], "a", "bc"),  # the earliest start, not the first in the list
        (["abcdef"], ["bcd", "bc"], "a", "bc"),  # of one start the shortest
        (["aab", "aac"], ["aabaac"], "", "aabaac"),
        (["ab", "ab", "ac"], ["abac"], "ab", "abac"),  # a match may begin inside a failed one
        (["\u9f9c", "\u9f9c\u4e00"], ["\u9f9c\u4e00"], "\u9f9c", "\u9f9c\u4e00"),
    ],
)
def test_cut(pieces: list[str], stop: list[str], text: str, found: str) -> None:
    let_out, by = fed(pieces, stop, include=False)
    assert (let_out[-1], by) == (text, found)
    let_out, by = fed(pieces, stop, include=True)
    assert (let_out[-1], by) == (text + found, found)


def test_only_a_real_partial_match_is_held_back() -> None:
    checker = StopStrings(["a 40-character string that never occurs!"])
    assert checker.feed("Hello").text == "Hello"
    assert checker.feed(" I see a").text == " I see "
    assert checker.feed(" 4").text == ""
    assert checker.feed("th man").text == "a 4th man"
    assert checker.feed(" a").text == " "
    assert checker.release() == "a"


def test_the_cost_does_not_grow_with_the_text() -> None:
    checker = StopStrings(["never this", "nor that" * 100])
    piece = "word and n "

    def seconds() -> float:
        start = time.process_time()
        for _ in range(20_000):
            checker.feed(piece)
        return time.process_time() - start

    first = seconds()
    for _ in range(3):
        last = seconds()
    assert last < 3 * first + 0.2


def test_a_stop_string_made_to_be_slow_is_not() -> None:
    checker = StopStrings(["a" * 1000 + "b"])
    start = time.process_time()
    for _ in range(200):
        checker.feed("a" * 100)
    assert time.process_time() - start < 1.0
