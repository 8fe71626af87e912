"""A link's handler that notes what it is told, in whatever thread."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

from quartet.shared.link import Status

WITHIN = 20.0


class Recorder:
    """`seen`: the kinds of all events so far, "up", "down" or "message"."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.seen: list[str] = []

    def on_up(self, peer: Any) -> None:
        self._note("up", peer)

    def on_down(self, peer: Any, reason: str) -> None:
        self._note("down", peer)

    def on_message(self, peer: Any, message: Any) -> None:
        self._note("message", message)

    def on_status(self, peer: Any) -> None: ...

    async def next(self) -> tuple[str, Any]:
        """The next event's kind and its peer or message."""
        async with asyncio.timeout(WITHIN):
            while True:
                try:
                    return self.events.get_nowait()
                except queue.Empty:
                    await asyncio.sleep(0.005)

    async def expect(self, kind: str) -> Any:
        """The next event of that kind; those before it are dropped."""
        while True:
            got, value = await self.next()
            if got == kind:
                return value

    def _note(self, kind: str, value: Any) -> None:
        self.seen.append(kind)
        self.events.put((kind, value))


def ready() -> Status:
    return Status(0, 0, True)
