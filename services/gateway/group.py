"""Several streams of one client request: they start together and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from quartet.services.gateway.events import Event, StreamError
from quartet.services.gateway.stream import Stream
from quartet.services.gateway.stream_table import StreamTable
from quartet.services.gateway.subscription import Subscription


class Group:
    """One client's place in all of them. `close` ends those that are not over."""

    def __init__(self, table: StreamTable) -> None:
        self._table = table
        self._subscriptions: list[Subscription] = []
        self._unfinished = 0
        self._woken: dict[int, None] = {}
        self._wakeup = asyncio.Event()
        self.failed: int | None = None

    def open(self, makes: Sequence[Callable[[int], Stream]]) -> None:
        """Opens a stream for each of `makes`, all or none. Raises StreamError, or what `makes` raise."""
        self._table.admit(len(makes))
        try:
            for i, make in enumerate(makes):
                self._subscriptions.append(self._table.open(make, self._waker(i)))
        except BaseException:
            self.close()
            raise
        self._unfinished = len(makes)
        self._woken.update(dict.fromkeys(range(len(makes))))

    async def next(self) -> list[tuple[int, Event]]:
        """What is new, each with the number of its stream; empty when all is told. The error of one stream,
        whose number is then `failed`, is that of the group. Raises StreamError."""
        events: list[tuple[int, Event]] = []
        while self._unfinished and not events:
            if not self._woken:
                self._wakeup.clear()
                await self._wakeup.wait()
            woken, self._woken = self._woken, {}
            for i in woken:
                subscription = self._subscriptions[i]
                if subscription.done:
                    continue
                try:
                    for event in subscription.pull():
                        events.append((i, event))  # noqa: PERF401
                except StreamError:
                    self.failed = i
                    raise
                if subscription.done:
                    self._unfinished -= 1
                elif subscription.failed:
                    self._woken[i] = None
        return events

    def close(self) -> None:
        for subscription in self._subscriptions:
            subscription.close()

    def _waker(self, i: int) -> Callable[[], None]:
        def wake() -> None:
            self._woken[i] = None
            self._wakeup.set()

        return wake
