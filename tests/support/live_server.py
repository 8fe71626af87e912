"""A gateway's /live of which tests say all: for clients of it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LiveServer:
    """Sends the events, then is silent until it is closed. With `keys`, who has none of them is a 401."""

    def __init__(self, events: list[tuple[str, dict[str, Any]]], key: str = "", ends: bool = False) -> None:
        self.paths: list[str] = []
        self._over = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.paths.append(self.path)
                if key and self.headers.get("authorization") != f"Bearer {key}":
                    body = json.dumps({"error": {"message": "an API key is needed"}}).encode()
                    self.send_response(401)
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for name, data in events:
                    text = f"event: {name}\ndata: {json.dumps(data)}\n\n: keep-alive\n\n".encode()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
                self.wfile.flush()
                if not ends:
                    server._over.wait(30)
                self.wfile.write(b"0\r\n\r\n")
                self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> LiveServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
