"""API keys on gRPC: metadata `authorization: Bearer KEY` on every method, but to see whether the server lives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from quartet.services.gateway.api_keys import ApiKey, ApiKeys
from quartet.services.gateway.events import StreamError
from quartet.services.gateway.metrics import GatewayMetrics

SERVICE = "inference.v1.InferenceService"

_OPEN = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
_GENERATE, _ATTACH = f"/{SERVICE}/Generate", f"/{SERVICE}/Attach"


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses with UNAUTHENTICATED, methods that are not there as well; of health, the service "" is open to all.
    Bounds each key's streams, and accounts a request without a tenant to its key. Counts what it refuses."""

    def __init__(self, keys: ApiKeys, metrics: GatewayMetrics) -> None:
        self._keys = keys
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if not self._keys.required:
            return await continuation(handler_call_details)
        given = next((v for k, v in handler_call_details.invocation_metadata if k == "authorization"), None)
        key = self._keys.find(given if isinstance(given, str) else None)
        method = handler_call_details.method
        if key is not None:
            handler = await continuation(handler_call_details)
            bounded = method in (_GENERATE, _ATTACH) and handler is not None
            return self._bounded(handler, key, method) if bounded else handler
        if method in _OPEN:
            return _only_liveness(await continuation(handler_call_details))
        known = method.startswith(f"/{SERVICE}/") and await continuation(handler_call_details) is not None

        async def deny(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            if known:
                self._count(method, grpc.StatusCode.UNAUTHENTICATED)
            await _refuse(context)
            yield b""

        return grpc.stream_stream_rpc_method_handler(deny)

    def _bounded(self, handler: Any, key: ApiKey, method: str) -> Any:
        def refused(count: int) -> None:
            self._count(method, grpc.StatusCode.RESOURCE_EXHAUSTED)
            if method == _GENERATE:  # what Attach follows has been counted
                self._metrics.rejected(count)

        async def bounded(request: Any, context: Any) -> Any:
            if not getattr(request, "tenant", "-"):
                request.tenant = key.name
            try:
                with self._keys.running(key, 1, refused):
                    return await handler.unary_stream(request, context)
            except StreamError as error:
                metadata = (("retry-after-ms", str(error.retry_after_ms)),)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message, metadata)

        return grpc.unary_stream_rpc_method_handler(bounded, handler.request_deserializer, handler.response_serializer)

    def _count(self, method: str, code: grpc.StatusCode) -> None:
        self._metrics.grpc_calls[method.rpartition("/")[2], code.name] += 1


async def _refuse(context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "an API key that is known is needed: metadata authorization: Bearer KEY"
    )


def _only_liveness(handler: Any) -> Any:
    if handler.response_streaming:

        async def watch(request: Any, context: Any) -> Any:
            if request.service:
                await _refuse(context)
            return await handler.unary_stream(request, context)

        return grpc.unary_stream_rpc_method_handler(watch, handler.request_deserializer, handler.response_serializer)

    async def check(request: Any, context: Any) -> Any:
        if request.service:
            await _refuse(context)
        return await handler.unary_unary(request, context)

    return grpc.unary_unary_rpc_method_handler(check, handler.request_deserializer, handler.response_serializer)
