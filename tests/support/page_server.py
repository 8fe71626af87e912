"""The page over a real HTTP face in a thread, a fake tokenizer behind it, and a /live that tests speak for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest import mock

from support.gateway_fakes import AnsweringPeer, until
from support.http_fakes import Served, http_gateway

from quartet.services.gateway.http import face

T = TypeVar("T")


class ScriptedLive:
    """Stands before the application: what tests say goes to each viewer. `first` is what a new one gets."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.first: list[tuple[str, dict[str, Any]]] = []
        self.viewers: set[asyncio.Queue[bytes | None]] = set()
        self.num_viewers_ever = 0
        self.refuses = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/live":
            await self._app(scope, receive, send)
            return
        status = 503 if self.refuses else 200
        kind = b"application/json" if self.refuses else b"text/event-stream"
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        if self.refuses:
            await send({"type": "http.response.body", "body": b'{"error": {"message": "it restarts"}}'})
            return
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for event, data in self.first:
            queue.put_nowait(event_bytes(event, data))
        self.viewers.add(queue)
        self.num_viewers_ever += 1
        gone = asyncio.create_task(self._until_left(receive, queue))
        try:
            while (part := await queue.get()) is not None:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.viewers.discard(queue)
            gone.cancel()

    async def _until_left(self, receive: Any, queue: asyncio.Queue[bytes | None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        queue.put_nowait(None)

    def say(self, event: str, data: dict[str, Any]) -> None:
        for queue in self.viewers:
            queue.put_nowait(event_bytes(event, data))

    def drop(self) -> None:
        """Ends all viewers' responses."""
        for queue in self.viewers:
            queue.put_nowait(None)


def event_bytes(event: str, data: dict[str, Any]) -> bytes:
    return f"event: {event}\ndata: {json.dumps(data)}\n\n".encode()


class PageServer:
    """What a test's thread has in its hand. Everything of the loop's is reached through `do`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, served: Served, live: ScriptedLive) -> None:
        self._loop = loop
        self.url = f"http://{served.address}/"
        self.table = served.table
        self.peer = served.peer
        self.live = live

    def do(self, action: Callable[..., T], *args: Any) -> T:
        """Runs `action` in the server's loop."""

        async def run() -> T:
            return action(*args)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10.0)

    def say(self, event: str, data: dict[str, Any]) -> None:
        self.do(self.live.say, event, data)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Until it holds in the server's loop; fails when it does not."""
        asyncio.run_coroutine_threadsafe(until(condition, 20.0), self._loop).result(25.0)


@contextlib.contextmanager
def page_server(peer_type: type = AnsweringPeer, **options: Any) -> Iterator[PageServer]:
    ready: threading.Event = threading.Event()
    holder: list[Any] = []

    async def serve() -> None:
        stop = asyncio.Event()
        async with http_gateway(peer_type=peer_type, **options) as served:
            live = lives[0]
            holder.extend((asyncio.get_running_loop(), served, live, stop))
            ready.set()
            await stop.wait()
            live.drop()

    def scripted_app(*args: Any) -> ScriptedLive:
        lives.append(ScriptedLive(make_app(*args)))
        return lives[0]

    lives: list[ScriptedLive] = []
    make_app = face.make_app
    with mock.patch.object(face, "make_app", scripted_app):
        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        assert ready.wait(20.0)
    loop, served, live, stop = holder
    try:
        yield PageServer(loop, served, live)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20.0)
