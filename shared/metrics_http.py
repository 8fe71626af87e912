"""The HTTP server of /metrics: it waits without polling, and closes at once."""

from __future__ import annotations

import os
import selectors
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

# Of a connection that has gone between being seen and being accepted.
ACCEPT_SECONDS = 0.01


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


class MetricsHTTPServer(socketserver.ThreadingMixIn, WSGIServer):
    """Serves in a thread from the start until `close`; each request has a thread of its own."""

    daemon_threads = True
    # Two services of one host do not share a port.
    allow_reuse_port = False

    def __init__(self, host: str, port: int, family: socket.AddressFamily, app: Callable[..., Any]) -> None:
        self.address_family = family
        super().__init__((host, port), _SilentHandler)
        self.set_app(app)
        self.socket.settimeout(ACCEPT_SECONDS)
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="metrics-http", daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of the host's full name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def close(self) -> None:
        """Frees the port. Call once."""
        os.write(self._wake, b"\0")
        self._thread.join()
        self.server_close()
        os.close(self._woken)
        os.close(self._wake)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while all(key.fd != self._woken for key, _ in selector.select()):
                self._handle_request_noblock()  # type: ignore[attr-defined]
