"""Errors as Anthropic's API tells them: a status and {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

from typing import Literal

import msgspec

from quartet.services.gateway.http.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesErrorDetail(msgspec.Struct):
    """The message begins with the name of the field that is wrong, where there is one."""

    type: str
    message: str


class MessagesError(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: MessagesErrorDetail


def error_body(error: ApiError) -> bytes:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return msgspec.json.encode(MessagesError(error=MessagesErrorDetail(kind, error.detail.message)))


def error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
