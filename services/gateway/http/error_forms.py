"""In which API's form an error is told: that of the path which was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quartet.services.gateway.http.errors import ApiError
from quartet.services.gateway.http.messages_api import errors as messages_errors
from quartet.services.gateway.http.sse import error_event

MESSAGES = "/v1/messages"


class ErrorForm(NamedTuple):
    """`event` is the last one of a stream that fails after its head has been sent."""

    body: Callable[[ApiError], bytes]
    event: Callable[[ApiError], bytes]


_OPENAI = ErrorForm(ApiError.body, error_event)
_ANTHROPIC = ErrorForm(messages_errors.error_body, messages_errors.error_event)


def is_anthropic(path: str) -> bool:
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def error_form(path: str) -> ErrorForm:
    return _ANTHROPIC if is_anthropic(path) else _OPENAI
