"""One request's stream: what was asked, what has come of it, and how far its client has it.

Nothing is queued for a client. A choice keeps its ids and its text once, with the borders between
deltas, and a subscription is a place in that record: a slow client gets several deltas as one chunk,
a client that attaches again starts from an older border, and a resubmit tells the whole as a past.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from quartet.shared.messages import (
    ChoicePast,
    Delta,
    ErrorCode,
    FinishReason,
    Prompt,
    PromptLogprobs,
    Submit,
    TokenLogprobs,
    TokensPrompt,
)
from quartet.shared.sampling_params import SamplingParams, TextParams

if TYPE_CHECKING:
    from quartet.services.gateway.stream_table import Tokenizer

MAX_CHUNK_TOKENS = 1024
MAX_PROMPT_LOGPROBS = 1024
TOKEN_BYTES = 16
LOGPROB_BYTES = 48


class StreamError(Exception):
    """A stream or call ends with this instead of its result; the message names the field."""

    def __init__(self, code: ErrorCode, message: str, *, field: str = "", retry_after_ms: int = 0) -> None:
        if field and not message.startswith(field):
            message = f"{field}: {message}"
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms


class Gap(Exception):
    """A delta starts behind what is known: something in between was lost."""


class Started(NamedTuple):
    request_id: int
    prompt_token_ids: list[int]
    seed: int


class Chunk(NamedTuple):
    choice_index: int
    start: int
    token_ids: array[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class PromptChunk(NamedTuple):
    start: int
    entries: list[TokenLogprobs | None]


class Completed(NamedTuple):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


Event = Started | Chunk | PromptChunk | Completed


class Position(NamedTuple):
    """What a client has of a choice: the next_index of its last chunk, and whether that was the last."""

    next_index: int = 0
    finished: bool = False


class Choice:
    """The record of one choice. Border i lies after token `border_tokens[i]` and after
    `border_bytes[i]` bytes of `text`; border 0 is where the record begins."""

    def __init__(
        self, index: int, past: list[int] | tuple[int, ...] = (), sent_bytes: int | None = 0, *, finished_at: int = -1
    ) -> None:
        self.index = index
        self.token_ids = array("I", past)
        self.finished_elsewhere = finished_at >= 0
        self.offset = max(0, finished_at)
        self.text = bytearray()
        self.base_bytes = sent_bytes
        self.border_tokens = array("I", [self.num_output_tokens])
        self.border_bytes = array("Q", [0])
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
        return ChoicePast(self.index, self.token_ids.tolist(), sent)

    def add(self, delta: Delta) -> int:
        """Takes in what is new in the delta; returns its size in bytes, -1 when nothing was new.

        Raises Gap when something before it is missing.
        """
        known = len(self.token_ids) - delta.start
        text = delta.text.encode()
        text_start = delta.num_text_bytes - len(text)
        if self.base_bytes is None:
            self.base_bytes = text_start
        known_bytes = self.base_bytes + len(self.text) - text_start
        if known < 0 or known_bytes < 0:
            raise Gap
        token_ids = delta.token_ids[known:] if known else delta.token_ids
        if known_bytes:
            text = text[known_bytes:]
        if not token_ids and not text and delta.finish_reason is None:
            return -1
        self.token_ids.extend(token_ids)
        self.text += text
        size = len(text) + TOKEN_BYTES * len(token_ids)
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
        )
        return chunk, end

    def size(self) -> int:
        logprobs = sum(LOGPROB_BYTES * (1 + len(entry.top)) for entry in self.logprobs or ())
        return len(self.text) + TOKEN_BYTES * len(self.token_ids) + logprobs

    def _border(self) -> None:
        self.border_tokens.append(self.num_output_tokens)
        self.border_bytes.append(len(self.text))


class Stream:
    """One request of the ledger, in resubmittable form. Owned by the stream table."""

    def __init__(
        self,
        request_id: int,
        prompt: Prompt,
        sampling: SamplingParams,
        text: TextParams,
        choices: list[Choice],
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        detach_grace: float = 0.0,
        prompt_logprobs_start: int = 0,
    ) -> None:
        self.request_id = request_id
        self.attempt = 0
        self.prompt = prompt
        self.sampling = sampling
        self.text = text
        self.choices = {choice.index: choice for choice in choices}
        self.unfinished = sum(not choice.finished for choice in choices)
        self.priority = priority
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.detach_grace = detach_grace
        self.prompt_logprobs_base = prompt_logprobs_start
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.num_cached_tokens: int | None = None
        self.accepted = False
        # Ids mean something only to the model and the tokenizer that made them.
        self.fingerprints: tuple[str, str] | None = None
        self.tokenizer: Tokenizer | None = None
        self.waiting_since: float | None = None
        self.refused_by: set[Tokenizer] = set()
        self.gaps = 0
        self.subscription: Subscription | None = None
        self.detached_at: float | None = None
        self.finished_at: float | None = None
        self.error: StreamError | None = None

    @property
    def prompt_token_ids(self) -> list[int] | None:
        return self.prompt.token_ids if isinstance(self.prompt, TokensPrompt) else None

    @property
    def over(self) -> bool:
        return self.finished_at is not None or self.error is not None

    def submit(self, attempt: int) -> Submit:
        self.attempt = attempt
        return Submit(
            self.request_id,
            attempt,
            self.prompt,
            self.sampling,
            self.text,
            [choice.past for choice in self.choices.values() if not choice.finished],
            self.priority,
            self.cache_salt,
            self.tenant,
            self.prompt_logprobs_base + len(self.prompt_logprobs),
        )

    def accept(self, prompt_token_ids: list[int], fingerprints: tuple[str, str]) -> None:
        """From now on the prompt is these ids: a template may tell the time."""
        self.accepted = True
        self.fingerprints = fingerprints
        self.prompt = TokensPrompt(prompt_token_ids)

    def add_prompt_logprobs(self, message: PromptLogprobs) -> None:
        """Raises Gap when entries before these are missing."""
        known = self.prompt_logprobs_base + len(self.prompt_logprobs) - message.start
        if known < 0:
            raise Gap
        self.prompt_logprobs += message.entries[known:]

    def size(self) -> int:
        prompt = TOKEN_BYTES * len(self.prompt_token_ids or ())
        logprobs = sum(LOGPROB_BYTES * (1 + len(entry.top)) for entry in self.prompt_logprobs if entry is not None)
        return 512 + prompt + logprobs + sum(choice.size() for choice in self.choices.values())


class Subscription:
    """A client's place in a stream. `wake` is called when `pull` may have something new.

    `stream` is None while it is not known yet where the stream lives.
    """

    def __init__(self, wake: Callable[[], None], on_close: Callable[[Subscription], None]) -> None:
        self.wake = wake
        self.stream: Stream | None = None
        self.done = False
        self.unread = 0
        self.error: StreamError | None = None
        self._on_close = on_close
        self._started = False
        self._borders: dict[int, int] = {}
        self._told: set[int] = set()
        self._prompt_logprobs = 0

    def start(self, stream: Stream, positions: dict[int, Position], prompt_logprobs_start: int) -> None:
        """Raises StreamError when a position is none that a client can have reached."""
        for index in positions:
            if index not in stream.choices:
                raise StreamError(ErrorCode.INVALID_ARGUMENT, f"there is no choice {index}", field="positions")
        first = max(0, prompt_logprobs_start - stream.prompt_logprobs_base)
        if stream.sampling.prompt_logprobs is not None and prompt_logprobs_start < stream.prompt_logprobs_base:
            raise StreamError(
                ErrorCode.INVALID_ARGUMENT,
                f"must be at least {stream.prompt_logprobs_base}, got {prompt_logprobs_start}",
                field="prompt_logprobs_start",
            )
        self._borders = {
            index: choice.find_border(positions.get(index, Position(choice.base if choice.finished_elsewhere else 0)))
            for index, choice in stream.choices.items()
        }
        self._told = {
            index
            for index, choice in stream.choices.items()
            if choice.finished_elsewhere or (choice.finished and positions.get(index, Position()).finished)
        }
        self._prompt_logprobs = first
        self.stream = stream

    def start_fresh(self, stream: Stream) -> None:
        """Follows a stream that has just been opened from its record's beginning."""
        self._borders = dict.fromkeys(stream.choices, 0)
        self._told = {index for index, choice in stream.choices.items() if choice.finished}
        self.stream = stream

    def pull(self) -> list[Event]:
        """What is new; empty when nothing is. Raises StreamError when the stream has ended with one
        and all that came before it has been pulled. `done` is set with the last event."""
        stream, events = self.stream, list[Event]()
        if stream is not None and stream.accepted and not self.done:
            self._pull(stream, events)
        self.unread = 0
        error = self.error or (stream.error if stream is not None else None)
        if error is not None and not events and not self.done:
            self.done = True
            raise error
        return events

    def close(self) -> None:
        """The client is gone, or has all."""
        self._on_close(self)

    def fail(self, error: StreamError) -> None:
        """Ends this subscription alone; the stream goes on without it."""
        self.stream, self.error = None, error
        self.wake()

    def _pull(self, stream: Stream, events: list[Event]) -> None:
        prompt_token_ids = stream.prompt_token_ids or []
        if not self._started:
            self._started = True
            events.append(Started(stream.request_id, prompt_token_ids, stream.sampling.seed))
        while self._prompt_logprobs < len(stream.prompt_logprobs):
            first = self._prompt_logprobs
            entries = stream.prompt_logprobs[first : first + MAX_PROMPT_LOGPROBS]
            self._prompt_logprobs += len(entries)
            events.append(PromptChunk(stream.prompt_logprobs_base + first, entries))
        for index, choice in stream.choices.items():
            border = self._borders[index]
            while border + 1 < len(choice.border_tokens):
                chunk, border = choice.chunk(border)
                events.append(chunk)
                if chunk.finish_reason is not None:
                    self._told.add(index)
            self._borders[index] = border
            if choice.finished and index not in self._told:
                # The client has every token, but has not said that it knows the end.
                self._told.add(index)
                events.append(choice.chunk(border)[0])
        if stream.finished_at is not None and self.error is None:
            self.done = True
            total = sum(choice.num_output_tokens for choice in stream.choices.values())
            events.append(Completed(len(prompt_token_ids), total, stream.num_cached_tokens or 0))
