"""uvicorn's HTTP/1.1 connection, with limits that it lacks."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from quartet.services.gateway.http.connections import Connections
from quartet.services.gateway.http.errors import ApiError

MAX_HEADER_BYTES = 64 << 10
_LATER = (("retry-after", "1"),)
_UPGRADE = re.compile(rb"(\r\n)upgrade([ \t]*:)", re.IGNORECASE)


class Connection(HttpToolsProtocol):
    """A request's head has `header_timeout` seconds from its first byte and MAX_HEADER_BYTES. One request at a time:
    what a client sends before it has its answer is not read as a further request, and the connection closes after
    that answer. So reading never stops, and a client that leaves is noticed at once."""

    header_timeout = 10.0
    all_connections: Connections

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._deaf = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.all_connections.add(self):
            self._await_head()
        else:
            self._refuse(
                ApiError(503, "there are too many connections (the gateway's max_connections)", headers=_LATER)
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        self.all_connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._await_head()
            data = _without_upgrade(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(431, f"the request's head has more than {MAX_HEADER_BYTES} bytes"))

    def on_headers_complete(self) -> None:
        self._head_arrived()
        self._in_head = False
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            self._deaf = True
            return
        self.all_connections.busy(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._deaf:
            super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def on_response_complete(self) -> None:
        # Not before the loop has handed the answer on.
        self.loop.call_soon(self._is_idle)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is no HTTP/1.1 request"))

    def _is_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.all_connections.idle(self)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.header_timeout, self._head_is_late)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(ApiError(408, f"the request's head did not arrive within {self.header_timeout:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """Ends the connection; once a response has been begun, or can be, there is no place for another one."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or (cycle.more_body and not cycle.response_started):
            if cycle is not None:
                cycle.disconnected = True
            body = error.body()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
            head += b"".join(b"%s: %s\r\n" % (name.encode(), value.encode()) for name, value in error.headers)
            self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """There is nothing to upgrade to, and the parser would not read the body of a request that wishes it (Java's
    client asks for h2c with each first request)."""
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    if _UPGRADE.search(head) is None:
        return data
    return _UPGRADE.sub(rb"\1x-upgrade\2", head) + data[len(head) :]


def connection_type(header_timeout: float, connections: Connections) -> type[Connection]:
    return type("Connection", (Connection,), {"header_timeout": header_timeout, "all_connections": connections})
