"""A server with OpenAI's API that answers as it is told to, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any], web.Request], Awaitable[web.StreamResponse]]


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str, **fields: Any) -> bytes:
    """A chunk of a completion."""
    return event(choices=[{"index": 0, "text": text, "finish_reason": None, **fields}])


def chat_piece(**delta: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": None}])


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    found = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return event(choices=[], usage=found)


DONE = b"data: [DONE]\n\n"


def says(*parts: bytes) -> Answer:
    """Every answer is these bytes of a stream."""

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response

    return answer


def refuses(status: int, body: str) -> Answer:
    async def answer(_: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body)

    return answer


class Scripted:
    """`bodies` are the requests so far; `answer` may be changed at any time."""

    def __init__(self, answer: Answer, key: str = "") -> None:
        self.answer = answer
        self.key = key
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    def _refused(self, request: web.Request) -> web.Response | None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "the API key is wrong"}}, status=401)
        return None

    async def models(self, request: web.Request) -> web.StreamResponse:
        found = {"data": [{"id": "scripted", "object": "model", "max_model_len": 512}]}
        return self._refused(request) or web.json_response(found)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if refused := self._refused(request):
            return refused
        self.bodies.append(await request.json())
        return await self.answer(self.bodies[-1], request)


@contextlib.contextmanager
def scripted_server(answer: Answer, key: str = "") -> Iterator[Scripted]:
    server = Scripted(answer, key)
    started, loop = threading.Event(), asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_post("/v1/completions", server.generate)
        app.router.add_post("/v1/chat/completions", server.generate)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = "http://{}:{}".format(*runner.addresses[0])
        started.set()
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
