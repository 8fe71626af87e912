"""Peers behind HTTP: a server process, and the load on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.client_load import Load, Measured, drive
from bench.peers.environment import UnavailableError
from bench.peers.peer import process

Request = Callable[[list[int], int], dict[str, Any]]
"""The body for a prompt and a number of output tokens."""
Counter = Callable[[bytes, int], int]
"""From an event's JSON and the tokens counted before it in the stream: those counted with it."""


class HttpServer:
    """`path` is where streams of server-sent events are asked for."""

    def __init__(self, server: subprocess.Popen[bytes], url: str, path: str, request: Request, count: Counter) -> None:
        self.pid = server.pid
        self.ready_seconds = 0.0
        self._server, self._url, self._path = server, url, path
        self._request, self._count = request, count

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
        import aiohttp  # in the extra `bench`

        # llama.cpp closes kept connections without a word.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(self._url, connector=connector, timeout=aiohttp.ClientTimeout()) as session:

            async def send(token_ids: list[int], output_tokens: int) -> Measured:
                measured = Measured(time.perf_counter())
                try:
                    async with session.post(self._path, json=self._request(token_ids, output_tokens)) as response:
                        if response.status != 200:
                            measured.error = f"{response.status}: {(await response.text())[:300]}"
                            return measured
                        await self._receive(response.content.iter_any(), measured)
                except aiohttp.ClientError as error:
                    measured.error = repr(error)
                if not measured.error and measured.num_tokens != output_tokens:
                    measured.error = f"{measured.num_tokens} tokens instead of {output_tokens}"
                return measured

            return await drive(load, send)

    async def _receive(self, pieces: Any, measured: Measured) -> None:
        events, total = Events(), 0
        async for piece in pieces:
            now, before = time.perf_counter(), total
            for data in events.feed(piece):
                total = self._count(data, total)
            if total > before:
                measured.times.append(now)
                measured.counts.append(total - before)


class Events:
    """The data of server-sent events, from pieces of the stream that are cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield data


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []


class _Progress(msgspec.Struct):
    tokens_predicted: int = 0


_completion = msgspec.json.Decoder(_Completion)
_progress = msgspec.json.Decoder(_Progress)


def count_token_ids(data: bytes, before: int) -> int:
    """Of /v1/completions with `return_token_ids`: an event may hold several tokens, or one that has no text yet."""
    return before + sum(len(choice.token_ids or ()) for choice in _completion.decode(data).choices)


def count_predicted(data: bytes, before: int) -> int:
    """Of llama.cpp's /completion, whose events say how many tokens there are so far."""
    return max(before, _progress.decode(data).tokens_predicted)


@contextlib.contextmanager
def http_server(
    command: Sequence[str | Path],
    log: Path,
    url: str,
    path: str,
    request: Request,
    count: Counter,
    ready_within: float = 300,
    **environment: str,
) -> Iterator[HttpServer]:
    started = time.perf_counter()
    with process(command, log, {**os.environ, **environment}) as popen:
        server = HttpServer(popen, url, path, request, count)
        server.wait_ready(started, ready_within, log)
        yield server
