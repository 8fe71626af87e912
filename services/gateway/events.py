"""What a stream tells its client, and the error that it may end with."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from quartet.shared.messages import ErrorCode, FinishReason, TokenLogprobs, ToolCallDelta

RETRY_AFTER_MS = 1000


class StreamError(Exception):
    """A stream or call ends with this instead of its result; the message names the field."""

    def __init__(self, code: ErrorCode, message: str, *, field: str = "", retry_after_ms: int = 0) -> None:
        if field and not message.startswith(f"{field}:"):
            message = f"{field}: {message}"
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms


def unavailable(message: str) -> StreamError:
    """Worth another try soon."""
    return StreamError(ErrorCode.UNAVAILABLE, message, retry_after_ms=RETRY_AFTER_MS)


class Started(NamedTuple):
    request_id: int
    prompt_token_ids: list[int]
    seed: int


class Chunk(NamedTuple):
    """`tool_calls`: at most one part of each call."""

    choice_index: int
    start: int
    token_ids: array[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    tool_calls: list[ToolCallDelta] = []


class PromptChunk(NamedTuple):
    start: int
    entries: list[TokenLogprobs | None]


class Completed(NamedTuple):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


Event = Started | Chunk | PromptChunk | Completed
