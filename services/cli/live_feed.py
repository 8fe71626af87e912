"""The gateway's /live, read with what Python has itself: for `quartet top` and `quartet trace`."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode, urlsplit

from quartet.services.cli.connection import TLS
from quartet.shared.address import DEFAULT_HTTP_ADDRESS

# The server says something every 5 s.
SILENCE = 20.0
MAX_ERROR_BYTES = 1 << 16


class FeedError(Exception):
    """One line: why there is nothing to see."""


def add_feed_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default=os.environ.get("QUARTET_URL") or f"http://{DEFAULT_HTTP_ADDRESS}",
        help="the gateway's HTTP address; https:// is with TLS (default: %(default)s; env: QUARTET_URL)",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("QUARTET_API_KEY", ""),
        help="where the gateway wants one; the command line is for all on this machine to see, so rather "
        "env: QUARTET_API_KEY",
    )
    for flag, text in TLS:
        env = "QUARTET_" + flag.strip("-").replace("-", "_").upper()
        parser.add_argument(
            flag, default=os.environ.get(env, ""), metavar="FILE", help=f"PEM file: {text}; env: {env})"
        )


class Feed:
    """Events as (name, data), the first a snapshot, for `seconds` or without end. Iterating raises FeedError when
    there are none, or no more."""

    def __init__(
        self, options: argparse.Namespace, interval_ms: int, level: str = "live", seconds: float | None = None
    ) -> None:
        self._url = options.url if "//" in options.url else f"http://{options.url}"
        self._query = urlencode({"interval_ms": interval_ms, "level": level})
        self._headers = {"accept": "text/event-stream"}
        if options.api_key:
            self._headers["authorization"] = f"Bearer {options.api_key}"
        self._files = (options.tls_ca, options.tls_cert, options.tls_key)
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self._end = None if seconds is None else time.monotonic() + seconds

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            yield from self._events(self._open())
            if self._is_over():
                return
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, TimeoutError) and self._is_over():
                return
            reason = "it is silent" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            raise FeedError(f"{self._url}: {reason}") from None
        finally:
            self.close()
        raise FeedError(f"{self._url}: the server has ended the stream")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _events(self, response: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
        name = ""
        while not self._is_over() and (line := response.readline()):
            if line.startswith(b"event: "):
                name = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                yield name, json.loads(line[6:])
            self._set_patience()

    def _is_over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def _set_patience(self) -> None:
        if self._end is not None and self._socket is not None:
            self._socket.settimeout(max(0.001, min(SILENCE, self._end - time.monotonic())))

    def _open(self) -> http.client.HTTPResponse:
        url = urlsplit(self._url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise FeedError(f"--url must be http://HOST:PORT or https://HOST:PORT, got {self._url}")
        connection: http.client.HTTPConnection
        if url.scheme == "https":
            ca, cert, key = self._files
            context = ssl.create_default_context(cafile=ca or None)
            if cert:
                context.load_cert_chain(cert, key or None)
            connection = http.client.HTTPSConnection(url.hostname, url.port, timeout=SILENCE, context=context)
        else:
            connection = http.client.HTTPConnection(url.hostname, url.port, timeout=SILENCE)
        self._connection = connection
        connection.request("GET", f"{url.path.rstrip('/')}/live?{self._query}", headers=self._headers)
        self._socket = connection.sock
        response = connection.getresponse()
        if response.status != 200:
            raise FeedError(f"{self._url}: {response.status}: {_reason(response)}")
        self._set_patience()
        return response


def _reason(response: http.client.HTTPResponse) -> str:
    try:
        message = json.loads(response.read(MAX_ERROR_BYTES))["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return response.reason
    return str(message)
