"""Peers behind HTTP: a server process, and the load on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.client_load import Load, drive_load
from bench.peers.environment import UnavailableError
from bench.peers.peer import process
from quartet.services.cli.bench.http_door import Body, HttpDoor, MakeReader, Reader, session
from quartet.services.cli.bench.record import Prompt, Record


class HttpServer:
    """`path` is where streams of server-sent events are asked for."""

    def __init__(
        self, server: subprocess.Popen[bytes], url: str, path: str, body: Body, make_reader: MakeReader
    ) -> None:
        self.pid = server.pid
        self.ready_seconds = 0.0
        self._server, self._url, self._path = server, url, path
        self._body, self._make_reader = body, make_reader

    def wait_ready(self, started: float, seconds: float, log: Path) -> None:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=1):
                break
            if self._server.poll() is not None:
                lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
                raise UnavailableError(f"it ended with {self._server.returncode} at its start: {lines[-1][:300]}")
            if time.perf_counter() - started > seconds:
                raise UnavailableError(f"it was not ready within {seconds:.0f} s of its start (see {log})")
            time.sleep(0.02)
        self.ready_seconds = time.perf_counter() - started

    def run(self, load: Load) -> dict[str, Any]:
        return asyncio.run(self._run(load))

    async def _run(self, load: Load) -> dict[str, Any]:
        async with session() as connections:
            door = HttpDoor(connections, self._url + self._path, self._body, self._make_reader)

            async def send(prompt: Prompt, output_tokens: int, keep_answer: bool = False) -> Record:
                record = await door.send(prompt, output_tokens, keep_answer)
                if not record.error and record.output_tokens != output_tokens:
                    record.fail("length", f"{record.output_tokens} tokens instead of {output_tokens}")
                return record

            return await drive_load(load, send)


class _Progress(msgspec.Struct):
    tokens_predicted: int = 0


_progress = msgspec.json.Decoder(_Progress)


class ProgressReader:
    """Of llama.cpp's /completion, whose events say how many tokens there are so far."""

    def __init__(self, record: Record, keep_answer: bool) -> None:
        self._record = record

    def take(self, event: bytes) -> bool:
        before = self._record.output_tokens
        self._record.output_tokens = max(before, _progress.decode(event).tokens_predicted)
        return self._record.output_tokens > before

    def end(self, done: bool) -> None:
        """It ends without a word."""


@contextlib.contextmanager
def http_server(
    command: Sequence[str | Path],
    log: Path,
    url: str,
    path: str,
    body: Body,
    make_reader: MakeReader = Reader,
    ready_within: float = 300,
    **environment: str,
) -> Iterator[HttpServer]:
    started = time.perf_counter()
    with process(command, log, {**os.environ, **environment}) as popen:
        server = HttpServer(popen, url, path, body, make_reader)
        server.wait_ready(started, ready_within, log)
        yield server
