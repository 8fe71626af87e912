"""An answer as a row of blocks: texts and tool calls, each of which begins, grows and ends before the next begins."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from quartet.services.gateway.events import Chunk
from quartet.shared.messages import FinishReason, TokenLogprobs


class Step(enum.Enum):
    BEGIN = enum.auto()
    GROW = enum.auto()
    END = enum.auto()


@dataclass
class Block:
    """A text, or a call where `call_id` is set, whose pieces are those of its arguments."""

    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: bool = False

    @property
    def content(self) -> str:
        return "".join(self.pieces)


class Change(NamedTuple):
    """`piece` and `logprobs` are what a block grows by."""

    step: Step
    block: Block
    piece: str = ""
    logprobs: list[TokenLogprobs] = []


class Blocks:
    """Of one choice. An answer in which nothing is said has one empty text where `never_empty`. Where tools may be
    called, blanks between texts and calls are no part of either: models write line feeds there."""

    def __init__(self, *, may_call: bool, never_empty: bool = False) -> None:
        self.blocks: list[Block] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.called = False
        self._may_call = may_call
        self._never_empty = never_empty
        self._open: Block | None = None
        self._call = -1
        # What waits for text that follows: log-probabilities of tokens without text, and blanks.
        self._logprobs: list[TokenLogprobs] = []
        self._blanks = ""

    def add(self, chunk: Chunk) -> list[Change]:
        changes: list[Change] = []
        if chunk.logprobs:
            self._logprobs = [*self._logprobs, *chunk.logprobs]
        parts = chunk.tool_calls
        if parts and parts[0].index == self._call and not parts[0].name:
            # A chunk may hold several deltas: the end of a call, and text that came after it.
            self._grow(changes, parts[0].arguments)
            parts = parts[1:]
        if chunk.text:
            self._add_text(chunk.text, changes)
        for part in parts:
            self._call, self.called, self._blanks = part.index, True, ""
            self._begin(changes, part.id, part.name)
            self._grow(changes, part.arguments)
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason
            if self._blanks and not self.called:
                self._grow_text(self._blanks, changes)
            if not self.blocks and self._never_empty:
                self._begin(changes)
            if self._open is not None and not self._open.call_id:
                self._open.logprobs += self._logprobs
            self._end(changes)
        return changes

    def _add_text(self, text: str, changes: list[Change]) -> None:
        if self._may_call:
            text = self._blanks + text
            end = len(text.rstrip())
            text, self._blanks = text[:end], text[end:]
        if text:
            self._grow_text(text, changes)

    def _grow_text(self, text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.call_id:
            self._begin(changes)
        self._grow(changes, text)

    def _begin(self, changes: list[Change], call_id: str = "", name: str = "") -> None:
        self._end(changes)
        self._open = Block(len(self.blocks), call_id, name)
        self.blocks.append(self._open)
        changes.append(Change(Step.BEGIN, self._open))

    def _grow(self, changes: list[Change], piece: str) -> None:
        assert self._open is not None
        if not piece:
            return
        logprobs = [] if self._open.call_id else self._logprobs
        self._logprobs = []
        self._open.pieces.append(piece)
        self._open.logprobs += logprobs
        changes.append(Change(Step.GROW, self._open, piece, logprobs))

    def _end(self, changes: list[Change]) -> None:
        if self._open is not None:
            self._open.ended = True
            changes.append(Change(Step.END, self._open))
            self._open = None
