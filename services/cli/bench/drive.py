"""Sends a mix's conversations as they arrive, and keeps what came of each request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import random
import resource
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from quartet.services.cli.bench.mixes import Conversation
from quartet.services.cli.bench.record import Prompt, Record

# Of a server that is gone: a closed loop would otherwise go on failing as fast as it can.
GONE = ("connection refused", "connection broken", "UNAVAILABLE")
GIVE_UP_AFTER = 100

Send = Callable[[Prompt, int, bool], Awaitable[Record]]
"""Sends a prompt for that many tokens and waits for the end. With True its answer is kept for the next turn."""


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """Conversations begin at `rate` a second, as a Poisson process (infinite: at once), and at most `concurrency` of
    them run (0: any number). None begins after `duration` seconds, nor a turn of one that runs."""

    rate: float = math.inf
    concurrency: int = 0
    duration: float = math.inf
    seed: str = "0"

    def times(self) -> Iterator[float]:
        """Seconds from the start until each conversation begins, for a finite rate."""
        rng = random.Random(f"arrivals {self.seed}")
        due = 0.0
        while True:
            due += rng.expovariate(self.rate)
            yield due


@dataclasses.dataclass
class Run:
    """`records` are in the order of their ends; `running` is how many have none yet. `gave_up`: the server was gone."""

    records: list[Record] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    running: int = 0
    cancelled: int = 0
    gave_up: bool = False
    max_lag: float = 0.0
    cpu_seconds: float = 0.0

    def client(self) -> dict[str, float]:
        """What the client itself used: a core that it fills bounds the figures, and so does sending late."""
        tokens = sum(record.output_tokens for record in self.records)
        return {
            "cpu_seconds": round(self.cpu_seconds, 3),
            "cpu_share": round(self.cpu_seconds / max(self.seconds, 1e-9), 4),
            "cpu_us_per_token": round(1e6 * self.cpu_seconds / max(tokens, 1), 1),
            "max_dispatch_lag_ms": round(1e3 * self.max_lag, 2),
            "max_rss_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        }


async def drive(
    conversations: Iterable[Conversation],
    send: Send,
    arrivals: Arrivals = Arrivals(),
    stop: asyncio.Event | None = None,
    run: Run | None = None,
) -> Run:
    """Returns when all have ended, or soon after `stop`, with what there is; what runs then is cancelled.

    `run` can be looked at meanwhile. An exception of `send` ends everything.
    """
    run = Run() if run is None else run
    stop = asyncio.Event() if stop is None else stop
    used, started = time.process_time(), time.perf_counter()
    work = asyncio.ensure_future(_Driver(send, arrivals, run, started, stop).run(conversations))
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        run.seconds = time.perf_counter() - started
        if not work.done():
            run.cancelled = run.running
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
        run.cpu_seconds = time.process_time() - used
    if not work.cancelled():
        work.result()
    return run


class _Driver:
    def __init__(self, send: Send, arrivals: Arrivals, run: Run, started: float, stop: asyncio.Event) -> None:
        self._send = send
        self._arrivals = arrivals
        self._run = run
        self._deadline = started + arrivals.duration
        self._started = started
        self._stop = stop
        self._gone_in_a_row = 0

    async def run(self, conversations: Iterable[Conversation]) -> None:
        arrivals = self._arrivals
        places = asyncio.Semaphore(arrivals.concurrency or 2**31)
        times = arrivals.times()
        async with asyncio.TaskGroup() as tasks:
            for conversation in conversations:
                due = 0.0
                if math.isfinite(arrivals.rate):
                    due = self._started + next(times)
                    if due > self._deadline:
                        break
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    # What waits for a place is late by the load's own rule, not by this process's fault.
                    if not arrivals.concurrency:
                        self._run.max_lag = max(self._run.max_lag, time.perf_counter() - due)
                await places.acquire()
                if time.perf_counter() >= self._deadline:
                    break
                task = tasks.create_task(self._converse(conversation, due))
                task.add_done_callback(lambda _: places.release())

    async def _converse(self, conversation: Conversation, due: float) -> None:
        prompt: Any = conversation.opening
        for number, turn in enumerate(conversation.turns):
            if number and turn.think_seconds:
                await asyncio.sleep(turn.think_seconds)
            if number and time.perf_counter() >= self._deadline:
                return
            prompt = prompt + turn.said
            is_last = number + 1 == len(conversation.turns)
            self._run.running += 1
            try:
                record = await self._send(prompt, turn.output_tokens, not is_last)
                record.due = 0.0 if number else due
                self._run.records.append(record)
            finally:
                self._run.running -= 1
            self._gone_in_a_row = self._gone_in_a_row + 1 if record.error in GONE else 0
            if self._gone_in_a_row >= GIVE_UP_AFTER:
                self._run.gave_up = True
                self._stop.set()
            if record.error:
                return
            if not is_last:
                prompt = prompt + conversation.answered(record)
                record.answer_ids, record.answer_text = [], ""
