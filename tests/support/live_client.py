"""A viewer of a real gateway: reads /live in a thread of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from support.http import connect, request_bytes
from support.live_view import LiveView


class LiveClient:
    """`until` waits for what the view shows; `closed` is set when the stream has ended."""

    def __init__(self, address: str, query: str = "?interval_ms=50") -> None:
        self.view = LiveView()
        self.num_events = 0
        self.error: BaseException | None = None
        self.closed = False
        self._news = threading.Condition()
        self._socket = connect(address)
        self._socket.sendall(request_bytes("GET", f"/live{query}"))
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def until(self, condition: Callable[[LiveView], Any], timeout: float = 60.0) -> Any:
        with self._news:
            found = self._news.wait_for(lambda: self.error or self.closed or condition(self.view), timeout)
            if self.error:
                raise self.error
            assert found and not self.closed, f"never so: {self.view.state}"
            return condition(self.view)

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()

    def __enter__(self) -> LiveClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()

    def _read(self) -> None:
        data, head = b"", True
        try:
            while part := self._socket.recv(1 << 16):
                data += part
                if head and b"\r\n\r\n" in data:
                    start, _, data = data.partition(b"\r\n\r\n")
                    assert start.startswith(b"HTTP/1.1 200") and b"text/event-stream" in start, start
                    head = False
                if not head:
                    data = self._take(data)
        except OSError:
            pass
        except BaseException as error:
            self.error = error
        with self._news:
            self.closed = True
            self._news.notify_all()

    def _take(self, data: bytes) -> bytes:
        """Whole chunks of the transfer coding; each holds whole events."""
        while b"\r\n" in data:
            size, _, rest = data.partition(b"\r\n")
            count = int(size, 16)
            if len(rest) < count + 2 or not count:
                break
            with self._news:
                for event in rest[:count].split(b"\n\n")[:-1]:
                    self.view.take(event)
                    self.num_events += 1
                self._news.notify_all()
            data = rest[count + 2 :]
        return data
