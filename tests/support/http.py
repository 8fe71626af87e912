"""Plain HTTP/1.1 on sockets: for tests of what reaches the wire, and for servers in other processes."""

from __future__ import annotations

import json
import socket
from typing import Any, NamedTuple


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Fails on what JSON does not know, which Python's decoder would take (NaN)."""
        return json.loads(self.body, parse_constant=_refuse)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, checked for OpenAI's form."""
        assert self.status >= 400, self
        assert self.headers["content-type"] == "application/json", self.headers
        (name, detail), *more = self.json().items()
        assert name == "error" and not more and set(detail) == {"message", "type", "param", "code"}, self.body
        assert detail["message"] and detail["type"], detail
        return detail

    def events(self) -> list[dict[str, Any]]:
        """A stream's chunks; fails when it did not end as it should."""
        assert self.status == 200 and self.headers["content-type"].startswith("text/event-stream"), self
        lines = self.body.split(b"\n\n")
        assert lines[-2:] == [b"data: [DONE]", b""], self.body[-200:]
        assert all(line.startswith(b"data: ") for line in lines[:-1])
        return [json.loads(line[6:], parse_constant=_refuse) for line in lines[:-2]]


def request_bytes(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    """`body`: bytes as they are, anything else as JSON."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    fields = {"host": "test", "connection": "close"}
    if body is not None:
        fields |= {"content-type": "application/json", "content-length": str(len(data))}
    fields |= headers or {}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items() if v is not None)
    return head.encode() + b"\r\n" + data


def parse_reply(data: bytes, head_only: bool = False) -> Reply:
    """A whole response, up to the connection's end. `head_only`: its head is all there is, as where it answers HEAD."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked" and not head_only:
        body = _unchunk(body)
    elif "content-length" in headers and not head_only:
        assert len(body) == int(headers["content-length"]), (headers, len(body))
    return Reply(int(first.split()[1]), headers, body)


def call(
    address: str,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    timeout: float = 60.0,
) -> Reply:
    with connect(address, timeout) as connection:
        connection.sendall(request_bytes(method, path, body, headers))
        return parse_reply(read_all(connection))


def post(address: str, path: str, body: Any, **options: Any) -> Reply:
    return call(address, "POST", path, body, **options)


def connect(address: str, timeout: float = 60.0) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def _unchunk(data: bytes) -> bytes:
    parts = []
    while True:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        if count == 0:
            assert data == b"\r\n", data
            return b"".join(parts)
        parts.append(data[:count])
        assert data[count : count + 2] == b"\r\n"
        data = data[count + 2 :]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
