"""The public gRPC API over the stream table."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from quartet.services.gateway import convert
from quartet.services.gateway.ask import ask
from quartet.services.gateway.bind import BindError, look_up
from quartet.services.gateway.credentials import Credentials
from quartet.services.gateway.events import StreamError
from quartet.services.gateway.grpc_auth import SERVICE, ApiKeyInterceptor
from quartet.services.gateway.metrics import GatewayMetrics
from quartet.services.gateway.settings import GatewaySettings
from quartet.services.gateway.stream_table import StreamTable
from quartet.services.gateway.subscription import Subscription
from quartet.shared.log import get_logger
from quartet.shared.messages import (
    Decode,
    Decoded,
    Encode,
    Encoded,
    GetLoads,
    Loads,
    Message,
    PrefixCacheReset,
    ResetPrefixCache,
)
from quartet.shared.pb import inference_pb2 as pb
from quartet.shared.pb import inference_pb2_grpc as pb_grpc
from quartet.shared.sampling_params import InvalidField
from quartet.shared.trace_context import checked, client_trace

RETRY_AFTER = "retry-after-ms"

_STATUS = {code.value[0]: code for code in grpc.StatusCode}
_log = get_logger()

A = TypeVar("A", Loads, Encoded, Decoded, PrefixCacheReset)


class Context(Protocol):
    """What is used of grpc.aio.ServicerContext."""

    async def write(self, message: ProtoMessage) -> None: ...

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, str], ...] = ()
    ) -> NoReturn: ...


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Maps each call to the stream table; an error becomes a status that names the field."""

    def __init__(self, table: StreamTable, settings: GatewaySettings, version: str) -> None:
        self._table = table
        self._settings = settings
        self._version = version
        self._limits = settings.request_limits
        self._started_at = time.monotonic()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        wakeup = asyncio.Event()
        try:
            subscription = self._table.open(
                lambda request_id: convert.stream_from(
                    request, request_id, self._limits, self._settings.max_detach_grace
                ),
                wakeup.set,
            )
        except (InvalidField, StreamError) as error:
            await _abort(context, error)
        await _follow(subscription, wakeup, context, request.client_request_id)

    async def Attach(self, request: pb.AttachRequest, context: Context) -> None:
        wakeup = asyncio.Event()
        try:
            subscription = self._table.attach(
                convert.request_id_from(request.request_id),
                convert.positions_from(request),
                request.prompt_logprobs_start,
                convert.detach_grace(request, self._settings.max_detach_grace),
                wakeup.set,
            )
        except (InvalidField, StreamError) as error:
            await _abort(context, error)
        await _follow(subscription, wakeup, context)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        try:
            self._table.abort(convert.request_id_from(request.request_id))
        except InvalidField as error:
            await _abort(context, error)
        return pb.AbortResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        try:
            prompt = convert.tokenize_prompt(request)
            tools = convert.tools_from(request, self._limits)
            encoded = await self._call(Encoded, lambda call_id: Encode(call_id, prompt, tools))
        except (InvalidField, StreamError) as error:
            await _abort(context, error)
        return pb.TokenizeResponse(token_ids=encoded.token_ids, tokens=encoded.tokens)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        try:
            token_ids = convert.checked_token_ids("token_ids", request.token_ids)
            skip = request.skip_special_tokens
            decoded = await self._call(Decoded, lambda call_id: Decode(call_id, token_ids, skip))
        except (InvalidField, StreamError) as error:
            await _abort(context, error)
        return pb.DetokenizeResponse(text=decoded.text)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        try:
            return convert.model_info_from(*self._table.model())
        except StreamError as error:
            await _abort(context, error)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        tokenizers = [
            pb.TokenizerState(
                name=tokenizer.peer.name,
                version=tokenizer.peer.version,
                ready=tokenizer.peer.ready,
                draining=tokenizer.peer.draining,
                stalled=tokenizer.peer.stalled,
                num_open_streams=len(tokenizer.streams),
            )
            for tokenizer in self._table.tokenizers.values()
        ]
        return pb.GetServerInfoResponse(
            version=self._version,
            uptime_seconds=time.monotonic() - self._started_at,
            draining=self._table.draining,
            num_open_streams=self._table.num_open_streams,
            num_retained_streams=self._table.num_retained_streams,
            tokenizers=tokenizers,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        try:
            return convert.loads_from(await self._call(Loads, GetLoads))
        except StreamError as error:
            await _abort(context, error)

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        try:
            reset = await self._call(PrefixCacheReset, ResetPrefixCache)
        except StreamError as error:
            await _abort(context, error)
        return pb.ResetPrefixCacheResponse(num_blocks=reset.num_blocks)

    async def _call(self, kind: type[A], make: Callable[[int], Message]) -> A:
        return await ask(self._table.calls, kind, make, self._settings.call_timeout)


async def _follow(
    subscription: Subscription, wakeup: asyncio.Event, context: Context, client_request_id: str = ""
) -> None:
    try:
        while not subscription.done:
            wakeup.clear()
            events = subscription.pull()
            for event in events:
                await context.write(convert.response_from(event, client_request_id))
            if not events:
                await wakeup.wait()
    except StreamError as error:
        await _abort(context, error)
    finally:
        # Also when the client has cancelled or its deadline has passed: then this task is cancelled.
        subscription.close()


async def _abort(context: Context, error: InvalidField | StreamError) -> NoReturn:
    if isinstance(error, InvalidField):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    metadata = ((RETRY_AFTER, str(error.retry_after_ms)),) if error.retry_after_ms else ()
    await context.abort(_STATUS[int(error.code)], convert.status_message(error), metadata)


def _code_name(context: Any) -> str:
    code = context.code()
    found = code if isinstance(code, grpc.StatusCode) else _STATUS.get(int(code or 0), grpc.StatusCode.UNKNOWN)
    return str(found.name)


class _ErrorLog(grpc.aio.ServerInterceptor):
    """An unexpected exception is an INTERNAL status for the client and a traceback for the operator, and bytes that are
    no message are an INVALID_ARGUMENT. Counts calls by how they end, and notes the client's trace."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(f"/{SERVICE}/"):
            return handler
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary

        method = handler_call_details.method.rpartition("/")[2]
        metadata = handler_call_details.invocation_metadata or ()
        traceparent = checked(next((value for name, value in metadata if name == "traceparent"), ""))

        def parsed(data: bytes) -> ProtoMessage | None:
            try:
                message: ProtoMessage = handler.request_deserializer(data)
                return message
            except DecodeError:
                return None

        async def guarded(request: ProtoMessage | None, context: Context) -> Any:
            client_trace.set(traceparent)
            code = grpc.StatusCode.CANCELLED.name
            try:
                if request is None:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"these bytes are no {method}Request")
                answer = await inner(request, context)
                code = grpc.StatusCode.OK.name
                return answer
            except grpc.aio.AbortError:
                code = _code_name(context)
                raise
            except Exception:
                code = grpc.StatusCode.INTERNAL.name
                _log.exception("call failed", method=handler_call_details.method)
                await context.abort(grpc.StatusCode.INTERNAL, "internal error; the gateway's log tells more")
            finally:
                self._metrics.grpc_calls[method, code] += 1

        kind = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return kind(guarded, parsed, handler.response_serializer)


class GrpcFace:
    """The gRPC server with health and reflection. `start` binds before anything else is done."""

    def __init__(
        self, table: StreamTable, settings: GatewaySettings, version: str, credentials: Credentials | None = None
    ) -> None:
        self._table = table
        self._settings = settings
        self._credentials = credentials or Credentials(settings)
        self._servicer = InferenceServicer(table, settings, version)
        self._health = health_aio.HealthServicer()
        self._ready: bool | None = None
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def bind(self) -> None:
        """Takes the address. Raises BindError when another server has it, or it is none."""
        address = self._settings.grpc_address
        _refuse_live_socket(address)
        server = grpc.aio.server(
            interceptors=[
                ApiKeyInterceptor(self._credentials.keys, self._table.metrics),
                _ErrorLog(self._table.metrics),
            ],
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", self._settings.max_receive_message_bytes),
                ("grpc.max_send_message_length", self._settings.max_send_message_bytes),
                # A client that vanished without closing its connection is found by these pings.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.server_handshake_timeout_ms", int(self._settings.tls_handshake_timeout * 1000)),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ],
        )
        pb_grpc.add_InferenceServiceServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
        try:
            self.port = self._add_port(server, address)
        except RuntimeError as error:
            raise BindError(f"grpc_address: cannot bind {address}: {_why_not(address)}") from error
        self._server = server

    def _add_port(self, server: grpc.aio.Server, address: str) -> int:
        credentials = self._credentials.grpc_credentials()
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))

    async def start(self) -> None:
        assert self._server is not None
        await self.update_health()
        await self._server.start()

    async def update_health(self) -> None:
        """Tells whether requests can be answered now."""
        ready = self._table.ready
        if ready != self._ready:
            self._ready = ready
            status = health_pb2.HealthCheckResponse
            await self._health.set(SERVICE, status.SERVING if ready else status.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        if self._server is not None:
            await self._server.stop(grace)


def _why_not(address: str) -> str:
    """gRPC does not say why it cannot bind; the system does when asked again."""
    try:
        for family, kind, protocol, _, target in look_up(address):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "it is no address for a server"


def _refuse_live_socket(address: str) -> None:
    """gRPC replaces an existing unix socket, also one that a live server listens on."""
    if not address.startswith("unix:"):
        return
    path = address.removeprefix("unix:").removeprefix("//")
    if os.path.exists(path):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except OSError:
                return
        raise BindError(f"grpc_address: another server is listening on {address}")
