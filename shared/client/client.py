"""The client for threads."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import grpc

from quartet.shared.address import DEFAULT_ADDRESS
from quartet.shared.client.api_key import with_api_key
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


class Generation(GenerationState, Iterator[Chunk]):
    """The chunks of a request, as they come. Leaving it (or `close`) ends the request."""

    def __init__(self, client: Client, state: State) -> None:
        super().__init__(state)
        self._chunks = self._run(client)

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def close(self) -> None:
        self._chunks.close()

    def text(self) -> str:
        """The rest of the first choice's text."""
        return "".join(chunk.text for chunk in self if chunk.index == 0)

    def _run(self, client: Client) -> Generator[Chunk, None, None]:
        state = self._state
        while True:
            call = state.call(client.stub)
            try:
                for response in call:
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
            time.sleep(delay)


class Client:
    """A connection to a gateway; may be used by several threads. `address` is host:port, unix:path, or
    grpcs://host:port for TLS, whose PEM files are `tls_ca`, `tls_cert` and `tls_key` (see Target)."""

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
        self._channel = Target(address, tls_ca, tls_cert, tls_key).channel(CHANNEL_OPTIONS)
        self._calls = with_api_key(self._channel, api_key)
        self.stub = InferenceServiceStub(self._calls)
        self.connected = False

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        token_ids: Iterable[int] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Generation:
        """Starts when first iterated. `options` are fields of GenerateRequest, ChatPrompt and SamplingParams
        by their names. Raises ValueError for what cannot be said, InferenceError for what the server refuses."""
        request = build_request(prompt, messages, token_ids, **options)
        return Generation(self, State(request, self._reconnect_timeout, timeout))

    def abort(self, request_id: str) -> None:
        self._unary(self.stub.Abort, pb.AbortRequest(request_id=request_id))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        request = build_tokenize_request(text, messages, add_special_tokens)
        return list(self._unary(self.stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str(self._unary(self.stub.Detokenize, request).text)

    def model_info(self) -> pb.GetModelInfoResponse:
        info: pb.GetModelInfoResponse = self._unary(self.stub.GetModelInfo, pb.GetModelInfoRequest())
        return info

    def server_info(self) -> pb.GetServerInfoResponse:
        info: pb.GetServerInfoResponse = self._unary(self.stub.GetServerInfo, pb.GetServerInfoRequest())
        return info

    def loads(self) -> pb.GetLoadsResponse:
        info: pb.GetLoadsResponse = self._unary(self.stub.GetLoads, pb.GetLoadsRequest())
        return info

    def wait_ready(self, timeout: float) -> None:
        """Returns when requests can be answered. Raises TimeoutError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        check = self._calls.unary_unary(HEALTH_CHECK)
        while True:
            try:
                answer: bytes = check(HEALTH_REQUEST, timeout=max(0.01, min(1.0, deadline - time.monotonic())))
                problem = "the server is not ready"
            except grpc.RpcError as error:
                answer, problem = b"", str(error_of(error))
            if answer.startswith(HEALTH_SERVING):
                return
            if time.monotonic() + POLL_READY > deadline:
                raise TimeoutError(f"not ready after {timeout:g} s: {problem}")
            time.sleep(POLL_READY)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unary(self, call: Any, request: Any) -> Any:
        try:
            return call(request)
        except grpc.RpcError as error:
            raise error_of(error) from error
