"""How far a client has a stream."""

from __future__ import annotations

from collections.abc import Callable

from quartet.services.gateway.choice import Position
from quartet.services.gateway.events import Completed, Event, PromptChunk, Started, StreamError
from quartet.services.gateway.stream import Stream
from quartet.shared.messages import ErrorCode

MAX_PROMPT_LOGPROBS = 1024


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

    @property
    def failed(self) -> bool:
        """`pull` raises, now or when what came before has been pulled."""
        return self.error is not None or (self.stream is not None and self.stream.error is not None)

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
        if stream.finished:
            self.done = True
            total = sum(choice.num_output_tokens for choice in stream.choices.values())
            events.append(Completed(len(prompt_token_ids), total, stream.num_cached_tokens or 0))
