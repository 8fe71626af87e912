"""Chunks as server-sent events, written from pieces that are encoded once for each response."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from quartet.services.gateway.http.errors import ApiError
from quartet.services.gateway.http.responses import Usage

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class ChunkWriter:
    """`head` holds what all chunks begin with. A choice's text goes between `opening` and `closing`."""

    def __init__(
        self, head: dict[str, Any], num_choices: int, opening: bytes, closing: bytes, include_usage: bool
    ) -> None:
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._openings = [b'%s{"index":%d,%s' % (self._head, i, opening) for i in range(num_choices)]
        self._closing = closing
        self._include_usage = include_usage
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._plain = closing + b',"logprobs":null,"finish_reason":null' + self._end

    def text(self, index: int, text: str) -> bytes:
        """What almost every token is."""
        return self._openings[index] + _encode(text) + self._plain

    def full(
        self,
        index: int,
        text: str,
        *,
        logprobs: msgspec.Struct | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        token_ids: array[int] | list[int] | None = None,
        delta: msgspec.Struct | None = None,
        extra: dict[str, Any] | None = None,
        beside: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk with anything in it. `delta` stands in the place of the text, opening and closing included; `extra`
        is of the choice, `beside` of the chunk."""
        parts = [self._openings[index], _encode(text), self._closing]
        if delta is not None:
            parts = [b'%s{"index":%d,"delta":' % (self._head, index), _encode(delta)]
        parts += [b',"logprobs":', _encode(logprobs), b',"finish_reason":', _encode(finish_reason)]
        if finish_reason is not None:
            parts += [b',"stop_reason":', _encode(stop_reason)]
        if token_ids is not None:
            parts += [b',"token_ids":', _encode(list(token_ids))]
        if extra:
            parts += [b",", _encode(extra)[1:-1]]
        if beside:
            usage = {"usage": None} if self._include_usage else {}
            parts += [b"}],", _encode(usage | beside)[1:], b"\n\n"]
        else:
            parts.append(self._end)
        return b"".join(parts)

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"


def error_event(error: ApiError) -> bytes:
    """The last thing in a stream that fails after its head has been sent; no [DONE] follows."""
    return b"data: " + error.body() + b"\n\n"
