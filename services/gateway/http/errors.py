"""Errors as OpenAI's API tells them: a status and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from quartet.services.gateway.events import StreamError
from quartet.shared.messages import ErrorCode
from quartet.shared.sampling_params import InvalidField

INVALID_REQUEST = "invalid_request_error"

T = TypeVar("T")

_STATUS = {
    ErrorCode.CANCELLED: 499,
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.ALREADY_EXISTS: 409,
    ErrorCode.RESOURCE_EXHAUSTED: 429,
    ErrorCode.FAILED_PRECONDITION: 400,
    ErrorCode.ABORTED: 409,
    ErrorCode.UNIMPLEMENTED: 400,
    ErrorCode.INTERNAL: 500,
    ErrorCode.UNAVAILABLE: 503,
}
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
# What the services behind call the fields that this API names otherwise.
_PUBLIC_FIELDS = {"prompt_token_ids": "prompt", "template_kwargs": "chat_template_kwargs", "token_ids": "tokens"}


class ErrorDetail(msgspec.Struct):
    """`param` names the field that is wrong, `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class ApiError(Exception):
    """What a client is told instead of an answer. `headers` are lower-case names and values."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        kind = _TYPES.get(status, INVALID_REQUEST if status < 500 else "server_error")
        self.detail = ErrorDetail(message, kind, param, code)

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.detail))


class ClientLeft(Exception):
    """Nobody is there to answer."""


def invalid(param: str, message: str) -> ApiError:
    """400 about a field."""
    return ApiError(400, f"{param}: {message}", param=param)


def required(param: str, value: T | None) -> T:
    """400 where there is none."""
    if value is None:
        raise missing(param)
    return value


def missing(param: str) -> ApiError:
    return ApiError(400, f"{param}: is required", param=param, code="missing_required_parameter")


def api_error(error: Exception, fields: dict[str, str] | None = None) -> ApiError:
    """How `error` is told. `fields` gives further public names to the fields of the services behind."""
    names = _PUBLIC_FIELDS | (fields or {})
    match error:
        case ApiError():
            return error
        case InvalidField():
            return _about_field(400, str(error), error.field, names)
        case StreamError():
            headers: tuple[tuple[str, str], ...] = ()
            if error.retry_after_ms:
                headers = (("retry-after", str(math.ceil(error.retry_after_ms / 1000))),)
            return _about_field(_STATUS.get(error.code, 500), error.message, error.field, names, headers)
        case _:
            return ApiError(500, "internal error; the gateway's log tells more")


def _about_field(
    status: int, message: str, field: str, names: dict[str, str], headers: tuple[tuple[str, str], ...] = ()
) -> ApiError:
    public = names.get(field, field)
    if public != field and message.startswith(f"{field}:"):
        message = public + message.removeprefix(field)
    return ApiError(status, message, param=public or None, headers=headers)
