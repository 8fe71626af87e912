"""The API key in each call's metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio


class _Details(grpc.ClientCallDetails):
    """What gRPC's own details are, with the key added."""

    def __init__(self, details: Any, metadata: list[tuple[str, str]]) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = metadata
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = getattr(details, "compression", None)


class _Interceptor(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def __init__(self, api_key: str) -> None:
        self._entry = ("authorization", f"Bearer {api_key}")

    def intercept_unary_unary(self, call: Callable[..., Any], details: Any, request: Any) -> Any:
        return call(_Details(details, [*(details.metadata or ()), self._entry]), request)

    intercept_unary_stream = intercept_unary_unary


class _AsyncUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, api_key: str) -> None:
        self._value = f"Bearer {api_key}"

    async def intercept_unary_unary(self, call: Callable[..., Any], details: Any, request: Any) -> Any:
        return await call(_with_key(details, self._value), request)


class _AsyncStream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, api_key: str) -> None:
        self._value = f"Bearer {api_key}"

    async def intercept_unary_stream(self, call: Callable[..., Any], details: Any, request: Any) -> Any:
        return await call(_with_key(details, self._value), request)


def _with_key(details: Any, value: str) -> Any:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), ("authorization", value))
    return details._replace(metadata=metadata)


def with_api_key(channel: Any, api_key: str) -> Any:
    """A channel whose calls carry the key, where there is one."""
    return grpc.intercept_channel(channel, _Interceptor(api_key)) if api_key else channel


def async_interceptors(api_key: str) -> list[Any]:
    return [_AsyncUnary(api_key), _AsyncStream(api_key)] if api_key else []
