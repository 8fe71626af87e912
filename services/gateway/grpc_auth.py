"""API keys on gRPC: metadata `authorization: Bearer KEY` on every method, but to see whether the server lives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from quartet.services.gateway.api_keys import ApiKey, ApiKeys
from quartet.services.gateway.events import StreamError

_OPEN = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
_COUNTED = ("/inference.v1.InferenceService/Generate", "/inference.v1.InferenceService/Attach")


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses with UNAUTHENTICATED, methods that are not there as well; of health, the service "" is open to all.
    Bounds each key's streams, and accounts a request without a tenant to its key."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

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
            return self._counted(handler, key) if method in _COUNTED and handler is not None else handler
        if method in _OPEN:
            return _only_liveness(await continuation(handler_call_details))
        return grpc.stream_stream_rpc_method_handler(_deny)

    def _counted(self, handler: Any, key: ApiKey) -> Any:
        async def counted(request: Any, context: Any) -> Any:
            if not getattr(request, "tenant", "-"):
                request.tenant = key.name
            try:
                with self._keys.running(key):
                    return await handler.unary_stream(request, context)
            except StreamError as error:
                metadata = (("retry-after-ms", str(error.retry_after_ms)),)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message, metadata)

        return grpc.unary_stream_rpc_method_handler(counted, handler.request_deserializer, handler.response_serializer)


async def _deny(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    await _refuse(context)
    yield b""


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
