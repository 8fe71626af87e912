"""The record of one choice's output.

Nothing is queued for a client. A choice keeps its ids and its text once, with the borders between
deltas, and a client is a place in that record: a slow one gets several deltas as one chunk, one that
attaches again starts from an older border, and a resubmit tells the whole as a past.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from quartet.services.gateway.events import Chunk, StreamError
from quartet.shared.messages import ChoicePast, Delta, ErrorCode, FinishReason, TokenLogprobs, ToolCallDelta
from quartet.shared.received import are_logprobs, are_token_ids
from quartet.shared.sampling_params import MAX_TOKEN_ID
from quartet.shared.tool_calls import after_call_bytes, joined, num_call_bytes

MAX_CHUNK_TOKENS = 1024
TOKEN_BYTES = 16
LOGPROB_BYTES = 48
CALL_BYTES = 200
# Far more text than any stream has, and far from what a message can carry.
MAX_TEXT_BYTES = 1 << 53


class Gap(Exception):
    """A delta starts behind what is known: something in between was lost. Or it says what cannot be."""


class Position(NamedTuple):
    """What a client has of a choice: the next_index of its last chunk, and whether that was the last."""

    next_index: int = 0
    finished: bool = False


class Choice:
    """The record of one choice. Border i lies after token `border_tokens[i]`, after `border_bytes[i]` bytes
    of `text` and after `border_calls[i]` of `tool_calls`; border 0 is where the record begins."""

    def __init__(
        self,
        index: int,
        past: list[int] | tuple[int, ...] = (),
        sent_bytes: int | None = 0,
        *,
        sent_call_bytes: int | None = 0,
        finished_at: int = -1,
    ) -> None:
        self.index = index
        self.token_ids = array("I", past)
        self.finished_elsewhere = finished_at >= 0
        self.offset = max(0, finished_at)
        self.text = bytearray()
        self.base_bytes = sent_bytes
        self.border_tokens = array("I", [self.num_output_tokens])
        self.border_bytes = array("Q", [0])
        self.tool_calls: list[ToolCallDelta] = []
        self.num_call_bytes = sent_call_bytes
        self.border_calls = array("I", [0])
        self.logprobs: list[TokenLogprobs] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_output_tokens(self) -> int:
        return self.offset + len(self.token_ids)

    @property
    def base(self) -> int:
        """The first output token of the record; earlier ones are known as ids only."""
        return self.border_tokens[0]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.finished_elsewhere

    @property
    def past(self) -> ChoicePast:
        sent = None if self.base_bytes is None else self.base_bytes + len(self.text)
        return ChoicePast(self.index, self.token_ids.tolist(), sent, self.num_call_bytes)

    def add(self, delta: Delta) -> int:
        """Takes in what is new in the delta; returns its size in bytes, -1 when nothing was new.

        Raises Gap when something before it is missing.
        """
        known = len(self.token_ids) - delta.start
        text = delta.text.encode()
        text_start = delta.num_text_bytes - len(text)
        base_bytes = text_start if self.base_bytes is None else self.base_bytes
        known_bytes = base_bytes + len(self.text) - text_start
        calls_start = delta.num_call_bytes - num_call_bytes(delta.tool_calls)
        known_call_bytes = (calls_start if self.num_call_bytes is None else self.num_call_bytes) - calls_start
        if known < 0 or known_bytes < 0 or known_call_bytes < 0 or not _can_be(delta, text_start, calls_start):
            raise Gap
        self.base_bytes = base_bytes
        tool_calls = after_call_bytes(delta.tool_calls, known_call_bytes) if known_call_bytes else delta.tool_calls
        self.num_call_bytes = calls_start + max(known_call_bytes, delta.num_call_bytes - calls_start)
        token_ids = delta.token_ids[known:] if known else delta.token_ids
        if known_bytes:
            text = text[known_bytes:]
        if not token_ids and not text and not tool_calls and delta.finish_reason is None:
            return -1
        self.token_ids.extend(token_ids)
        self.text += text
        self.tool_calls += tool_calls
        size = len(text) + TOKEN_BYTES * len(token_ids) + _size_of_calls(tool_calls)
        if delta.logprobs is not None:
            entries = delta.logprobs[known:]
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += entries
            size += sum(LOGPROB_BYTES * (1 + len(entry.top)) for entry in entries)
        if delta.finish_reason is not None:
            self.finish(delta.finish_reason, delta.stop_reason)
        elif token_ids:
            # Text alone makes no border: a client could not name it by its next_index.
            self._border()
        return size

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        self._border()

    def find_border(self, position: Position) -> int:
        """The border that a client stands at. Raises StreamError when there is none such."""
        if position.finished and self.finished:
            return len(self.border_tokens) - 1
        border = bisect_left(self.border_tokens, position.next_index)
        if border == len(self.border_tokens) or self.border_tokens[border] != position.next_index:
            known = f"known from {self.base} to {self.num_output_tokens}"
            raise StreamError(
                ErrorCode.INVALID_ARGUMENT,
                f"next_index {position.next_index} of choice {self.index} is no border between chunks ({known})",
                field="positions",
            )
        return border

    def chunk(self, border: int) -> tuple[Chunk, int]:
        """What follows a border, and the border after it."""
        tokens, first_byte = self.border_tokens[border], self.border_bytes[border]
        last = len(self.border_tokens) - 1
        end = last
        if self.border_tokens[last] - tokens > MAX_CHUNK_TOKENS:
            end = max(border + 1, bisect_right(self.border_tokens, tokens + MAX_CHUNK_TOKENS) - 1)
        ended = end == last and self.finished
        base, until = self.base, self.border_tokens[end]
        chunk = Chunk(
            self.index,
            tokens,
            self.token_ids[tokens - self.offset : until - self.offset],
            self.text[first_byte : self.border_bytes[end]].decode("utf-8", "ignore"),
            None if self.logprobs is None else self.logprobs[tokens - base : until - base],
            self.finish_reason if ended else None,
            self.stop_reason if ended else None,
            joined(self.tool_calls[self.border_calls[border] : self.border_calls[end]]),
        )
        return chunk, end

    def size(self) -> int:
        logprobs = sum(LOGPROB_BYTES * (1 + len(entry.top)) for entry in self.logprobs or ())
        return len(self.text) + TOKEN_BYTES * len(self.token_ids) + logprobs + _size_of_calls(self.tool_calls)

    def _border(self) -> None:
        self.border_tokens.append(self.num_output_tokens)
        self.border_bytes.append(len(self.text))
        self.border_calls.append(len(self.tool_calls))


def _size_of_calls(parts: list[ToolCallDelta]) -> int:
    return sum(CALL_BYTES + len(part.arguments) for part in parts)


def _can_be(delta: Delta, text_start: int, calls_start: int) -> bool:
    return (
        delta.start >= 0
        and 0 <= text_start <= MAX_TEXT_BYTES
        and 0 <= calls_start <= MAX_TEXT_BYTES
        and all(0 <= part.index <= MAX_TOKEN_ID for part in delta.tool_calls)
        and are_token_ids(delta.token_ids)
        and 0 <= delta.num_cached_tokens <= MAX_TOKEN_ID
        and (not isinstance(delta.stop_reason, int) or 0 <= delta.stop_reason <= MAX_TOKEN_ID)
        and (delta.logprobs is None or are_logprobs(delta.logprobs))
    )
