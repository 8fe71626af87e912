"""How a run goes, on stderr: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from typing import Any

import rich.progress
from rich.console import Console

from quartet.services.cli.bench.drive import Run
from quartet.services.cli.bench.options import Point

EVERY = 0.25
PLAIN_EVERY = 10.0


class Progress:
    """Looks at the run now and then: what it costs does not grow with the load."""

    def __init__(self, run: Run, point: Point, quiet: bool = False) -> None:
        self._run = run
        self._point = point
        self._quiet = quiet
        self._started = time.monotonic()
        self._console = Console(stderr=True)
        self._bar: Any = None
        if self._console.is_terminal and not quiet:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.TextColumn("{task.fields[state]}"),
                rich.progress.TimeElapsedColumn(),
                console=self._console,
                auto_refresh=False,
                transient=True,
            )
            self._task = self._bar.add_task(str(point), total=1.0, state="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    async def show(self) -> None:
        """Until it is cancelled."""
        while not self._quiet:
            await asyncio.sleep(EVERY if self._bar is not None else PLAIN_EVERY)
            if self._bar is not None:
                self._bar.update(self._task, completed=self._share(), state=self.state(), refresh=True)
            else:
                print(f"{self._point}: {self.state()}", file=sys.stderr, flush=True)

    def state(self) -> str:
        """Such as "12/64 done, 32 running, 1 failed, 812 tokens/s"; tokens of requests that have ended."""
        records = self._run.records
        failed = sum(bool(record.error) for record in records)
        of = "" if self._point.num_requests is None else f"/{self._point.num_requests}"
        tokens = sum(record.output_tokens for record in records)
        rate = tokens / max(time.monotonic() - self._started, 1e-9)
        bad = f", {failed} failed" if failed else ""
        return f"{len(records)}{of} done, {self._run.running} running{bad}, {rate:.0f} tokens/s"

    def _share(self) -> float:
        by_time = (time.monotonic() - self._started) / self._point.duration
        by_count = 0.0 if self._point.num_requests is None else len(self._run.records) / self._point.num_requests
        return min(1.0, max(by_count, 0.0 if math.isinf(self._point.duration) else by_time))
