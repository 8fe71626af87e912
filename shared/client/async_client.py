"""The client for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from quartet.shared.address import DEFAULT_ADDRESS
from quartet.shared.client.api_key import async_interceptors
from quartet.shared.client.channel import (
    CHANNEL_OPTIONS,
    HEALTH_CHECK,
    HEALTH_REQUEST,
    HEALTH_SERVING,
    POLL_READY,
    RECONNECT_TIMEOUT,
)
from quartet.shared.client.request import build_request, build_tokenize_request
from quartet.shared.client.state import Chunk, GenerationState, State, cut, error_of
from quartet.shared.client.tls import Target
from quartet.shared.pb import inference_pb2 as pb
from quartet.shared.pb.inference_pb2_grpc import InferenceServiceStub


class AsyncGeneration(GenerationState, AsyncIterator[Chunk]):
    """As Generation, for `async for`."""

    def __init__(self, client: AsyncClient, state: State) -> None:
        super().__init__(state)
        self._chunks = self._run(client)

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        await self._chunks.aclose()

    async def text(self) -> str:
        return "".join([chunk.text async for chunk in self if chunk.index == 0])

    async def _run(self, client: AsyncClient) -> AsyncGenerator[Chunk, None]:
        state = self._state
        while True:
            call = state.call(client.stub)
            try:
                async for response in call:
                    client.connected = True
                    chunk = state.receive(response)
                    if chunk is not None:
                        yield chunk
                if state.usage is None:
                    raise cut()
                return
            except grpc.RpcError as error:
                delay = state.after(error, client.connected)
            finally:
                call.cancel()
            await asyncio.sleep(delay)


class AsyncClient:
    """As Client, for asyncio. To be made inside the running loop."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        reconnect_timeout: float = RECONNECT_TIMEOUT,
        api_key: str = "",
        tls_ca: str = "",
        tls_cert: str = "",
        tls_key: str = "",
    ) -> None:
        self._reconnect_timeout = reconnect_timeout
        target = Target(address, tls_ca, tls_cert, tls_key)
        self._channel = target.async_channel(CHANNEL_OPTIONS, async_interceptors(api_key))
        self.stub = InferenceServiceStub(self._channel)
        self.connected = False

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        token_ids: Iterable[int] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncGeneration:
        """As Client.generate, for `async for`."""
        request = build_request(prompt, messages, token_ids, **options)
        return AsyncGeneration(self, State(request, self._reconnect_timeout, timeout))

    async def abort(self, request_id: str) -> None:
        await self._unary(self.stub.Abort, pb.AbortRequest(request_id=request_id))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        request = build_tokenize_request(text, messages, add_special_tokens)
        return list((await self._unary(self.stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._unary(self.stub.Detokenize, request)).text)

    async def model_info(self) -> pb.GetModelInfoResponse:
        info: pb.GetModelInfoResponse = await self._unary(self.stub.GetModelInfo, pb.GetModelInfoRequest())
        return info

    async def server_info(self) -> pb.GetServerInfoResponse:
        info: pb.GetServerInfoResponse = await self._unary(self.stub.GetServerInfo, pb.GetServerInfoRequest())
        return info

    async def loads(self) -> pb.GetLoadsResponse:
        info: pb.GetLoadsResponse = await self._unary(self.stub.GetLoads, pb.GetLoadsRequest())
        return info

    async def wait_ready(self, timeout: float) -> None:
        """As Client.wait_ready."""
        deadline = time.monotonic() + timeout
        check = self._channel.unary_unary(HEALTH_CHECK)
        while True:
            try:
                answer: bytes = await check(HEALTH_REQUEST, timeout=max(0.01, min(1.0, deadline - time.monotonic())))
                problem = "the server is not ready"
            except grpc.RpcError as error:
                answer, problem = b"", str(error_of(error))
            if answer.startswith(HEALTH_SERVING):
                return
            if time.monotonic() + POLL_READY > deadline:
                raise TimeoutError(f"not ready after {timeout:g} s: {problem}")
            await asyncio.sleep(POLL_READY)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _unary(self, call: Any, request: Any) -> Any:
        try:
            return await call(request)
        except grpc.RpcError as error:
            raise error_of(error) from error
