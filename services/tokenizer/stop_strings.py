"""Finds stop strings in text that arrives in pieces, holding back no more than may belong to one.

All strings are looked for at once by an Aho-Corasick automaton: its depth is the length of the
longest end of the text that begins a stop string, which is what must be held back. The cost of a
piece is its own length, whatever came before.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Fed(NamedTuple):
    """`text` is let out; `stop` is the string that ended the text, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Of the matches that one piece completes, the earliest start wins; of those with one start the
    shortest, since it would have been complete first had the text come character by character."""

    def __init__(self, stop: Sequence[str], include_in_output: bool = False) -> None:
        self._automaton = _automaton(tuple(stop))
        self._include = include_in_output
        self._state = 0
        self._held = ""

    def feed(self, piece: str, honour: bool = True) -> Fed:
        """`honour` False lets stop strings that end in this piece pass (min_tokens). Not to be called after a stop."""
        auto = self._automaton
        state = self._state
        goto, fail, matches = auto.goto, auto.fail, auto.matches
        best: tuple[int, int] | None = None  # (start, length), counted from the start of `piece`
        for end, char in enumerate(piece, 1):
            while state and char not in goto[state]:
                state = fail[state]
            state = goto[state].get(char, 0)
            if matches[state] and honour:
                for length in matches[state]:
                    found = (end - length, length)
                    if best is None or found < best:
                        best = found
        text = self._held + piece
        if best is not None:
            start, length = best[0] + len(self._held), best[1]
            self._state, self._held = 0, ""
            return Fed(text[: start + length if self._include else start], text[start : start + length])
        self._state = state
        cut = len(text) - auto.hold[state]
        self._held = text[cut:]
        return Fed(text[:cut])

    def release(self) -> str:
        """The text has ended without a stop: what was held back belongs to it."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton(NamedTuple):
    goto: list[dict[str, int]]
    fail: list[int]
    matches: list[tuple[int, ...]]  # lengths of the stop strings that end in this state
    hold: list[int]  # the longest end of the text that is a proper prefix of a stop string


@functools.lru_cache(maxsize=256)
def _automaton(stop: tuple[str, ...]) -> _Automaton:
    goto: list[dict[str, int]] = [{}]
    depth = [0]
    own: list[int] = [0]
    for string in stop:
        state = 0
        for char in string:
            if char not in goto[state]:
                goto[state][char] = len(goto)
                goto.append({})
                depth.append(depth[state] + 1)
                own.append(0)
            state = goto[state][char]
        own[state] = len(string)

    fail = [0] * len(goto)
    matches: list[tuple[int, ...]] = [()] * len(goto)
    hold = [0] * len(goto)
    queue = deque([0])
    while queue:
        state = queue.popleft()
        if state:
            matches[state] = ((own[state],) if own[state] else ()) + matches[fail[state]]
            hold[state] = depth[state] if goto[state] else hold[fail[state]]
        for char, child in goto[state].items():
            if state:
                back = fail[state]
                while back and char not in goto[back]:
                    back = fail[back]
                fail[child] = goto[back].get(char, 0)
            queue.append(child)
    return _Automaton(goto, fail, matches, hold)
