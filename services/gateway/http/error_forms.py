"""In which API's form an error is told: that of the path which was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quartet.services.gateway.http.errors import ApiError
from quartet.services.gateway.http.messages_api import errors as messages_errors
from quartet.services.gateway.http.sse import error_event

MESSAGES = "/v1/messages"
MODELS = "/v1/models"


class ErrorForm(NamedTuple):
    """`event` is the last one of a stream that fails after its head has been sent; `keep_alive` is what clients pass
    over in a stream."""

    body: Callable[[ApiError], bytes]
    event: Callable[[ApiError], bytes]
    keep_alive: bytes


_OPENAI = ErrorForm(ApiError.body, error_event, b": keep-alive\n\n")
_ANTHROPIC = ErrorForm(
    messages_errors.error_body, messages_errors.error_event, b'event: ping\ndata: {"type": "ping"}\n\n'
)


def is_anthropic(path: str, version: bool) -> bool:
    """`version`: the request has an anthropic-version, which tells where both APIs have the path."""
    if path == MODELS or path.startswith(f"{MODELS}/"):
        return version
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def error_form(anthropic: bool) -> ErrorForm:
    return _ANTHROPIC if anthropic else _OPENAI
