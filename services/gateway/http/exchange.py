"""One request and its response, on ASGI's three callables."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from quartet.services.gateway.api_keys import ApiKey
from quartet.services.gateway.http.decoding import decode
from quartet.services.gateway.http.error_forms import error_form, is_anthropic
from quartet.services.gateway.http.errors import ApiError, ClientLeft
from quartet.shared.transport import TIMER_SLACK

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
# What of a refused body is still read, so that the client gets to read the answer instead of a reset connection.
MAX_DISCARDED = 64 * 2**20
DISCARD_SECONDS = 5.0

T = TypeVar("T")


class Exchange:
    """`started`: the response's head has been sent, so an error can no longer be a status. `fields`: what this
    endpoint calls fields that the services behind call otherwise. `anthropic`: whose API is spoken, Anthropic's or
    OpenAI's; `error_form`: how that tells errors. `keep_alive_interval`: seconds of silence after which a stream says
    that it lives; 0: never."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, keep_alive_interval: float = 0.0) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.started = False
        self.fields: dict[str, str] = {}
        self.anthropic = is_anthropic(scope["path"], self.header(b"anthropic-version") is not None)
        self.error_form = error_form(self.anthropic)
        self._keep_alive_interval = keep_alive_interval
        self._keep_alive_timer: asyncio.TimerHandle | None = None
        self._keep_alive_writing: asyncio.Task[None] | None = None
        self._last_write = 0.0

    @property
    def key(self) -> ApiKey:
        key: ApiKey = self.scope["state"]["api_key"]
        return key

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.scope["headers"] if key == name), None)

    async def read_json(self, decoder: msgspec.json.Decoder[T], max_bytes: int, timeout: float) -> T:
        """The body. Raises ApiError, ClientLeft."""
        content_type = (self.header(b"content-type") or JSON).split(b";")[0].strip().lower()
        if content_type != JSON and not content_type.endswith(b"+json"):
            raise ApiError(415, "content-type must be application/json")
        if self.header(b"content-encoding") not in (None, b"identity"):
            raise ApiError(415, "content-encoding: bodies are read as they are only")
        try:
            async with asyncio.timeout(timeout):
                body = await self._read(max_bytes)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {timeout:g} s", headers=_CLOSE) from None
        return decode(decoder, body)

    async def respond(
        self, status: int, body: bytes, headers: tuple[tuple[str, str], ...] = (), content_type: bytes = JSON
    ) -> None:
        """The whole response."""
        self.started = True
        head = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        head += [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body})

    async def start_events(self) -> None:
        """The head of a stream of server-sent events."""
        self.started = True
        headers = [
            (b"content-type", EVENTS),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if self._keep_alive_interval:
            self._wrote()
            self._keep_alive_in(self._keep_alive_interval)

    async def write(self, data: bytes, more: bool = True) -> None:
        if not more:
            self._end_keep_alive()
        self._wrote()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    @contextlib.asynccontextmanager
    async def while_client_is_there(self) -> AsyncIterator[None]:
        """Cancels what is within when the client leaves, and raises ClientLeft then. To be entered after the body
        has been read."""
        task = asyncio.current_task()
        assert task is not None
        left = False

        async def watch() -> None:
            nonlocal left
            while (await self._receive())["type"] != "http.disconnect":
                pass
            left = True
            task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if left and task.uncancel() == 0:
                raise ClientLeft from None
            raise
        finally:
            watcher.cancel()
            self._end_keep_alive()

    def _wrote(self) -> None:
        self._last_write = asyncio.get_running_loop().time()

    def _keep_alive_in(self, seconds: float) -> None:
        self._keep_alive_timer = asyncio.get_running_loop().call_later(seconds, self._keep_alive)

    def _keep_alive(self) -> None:
        """A proxy cuts connections on which nothing comes for long, such as while a service is away. What is said
        waits, once, where the client does not read."""
        elapsed = asyncio.get_running_loop().time() - self._last_write
        if elapsed + TIMER_SLACK < self._keep_alive_interval:
            self._keep_alive_in(self._keep_alive_interval - elapsed)
            return
        if self._keep_alive_writing is None or self._keep_alive_writing.done():
            message = {"type": "http.response.body", "body": self.error_form.keep_alive, "more_body": True}
            self._keep_alive_writing = asyncio.ensure_future(self._send(message))
        self._wrote()
        self._keep_alive_in(self._keep_alive_interval)

    def _end_keep_alive(self) -> None:
        if self._keep_alive_timer is not None:
            self._keep_alive_timer.cancel()
        if self._keep_alive_writing is not None:
            self._keep_alive_writing.cancel()

    async def _read(self, max_bytes: int) -> bytes:
        announced = self.header(b"content-length")
        too_large = announced is not None and announced.isdigit() and int(announced) > max_bytes
        if too_large and self.header(b"expect") is not None:
            raise _too_large(max_bytes)  # the client waits for a word before it sends
        chunks: list[bytes] = []
        size, more = 0, True
        deadline = None
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            size += len(message["body"])
            more = message["more_body"]
            if size > max_bytes or too_large:
                too_large = True
                chunks.clear()
                now = asyncio.get_running_loop().time()
                deadline = deadline or now + DISCARD_SECONDS
                if size > MAX_DISCARDED or now > deadline:
                    break
            else:
                chunks.append(message["body"])
        if too_large:
            raise _too_large(max_bytes)
        return b"".join(chunks)


_CLOSE = (("connection", "close"),)


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body has more than {max_bytes} bytes (the gateway's max_body_bytes)"
    return ApiError(413, message, code="request_too_large", headers=_CLOSE)
