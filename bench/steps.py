"""Where a step of the executor goes: its reports, asked for with SIGUSR1 and read from the log."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT = 30.0


@dataclasses.dataclass(frozen=True)
class Totals:
    """What the executor has done so far, or did between two reports: see services/executor/step_times.py.

    `seconds` are of its main thread by phase, `forward` of the decoder's layers by part.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_sampled: int = 0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    forward: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, line: Mapping[str, Any]) -> Totals:
        return cls(**{field.name: line[field.name] for field in dataclasses.fields(cls)})

    def __add__(self, other: Totals) -> Totals:
        return self._combined(other, 1)

    def __sub__(self, other: Totals) -> Totals:
        return self._combined(other, -1)

    def _combined(self, other: Totals, sign: int) -> Totals:
        def mapped(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
            return {name: a.get(name, 0.0) + sign * b.get(name, 0.0) for name in {**a, **b}}

        return Totals(
            self.num_steps + sign * other.num_steps,
            self.num_tokens + sign * other.num_tokens,
            self.num_sampled + sign * other.num_sampled,
            mapped(self.seconds, other.seconds),
            mapped(self.forward, other.forward),
        )

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())

    def breakdown(self) -> dict[str, float]:
        """Of the mean step: milliseconds, and the share of each phase; `forward` in its parts where it has them.

        `outside` is all but the layers and the head, `idle` (waiting for a plan) included.
        """
        if not self.num_steps or not self.wall:
            return {}
        shares = {name: seconds / self.wall for name, seconds in self.seconds.items()}
        layers = shares.pop("forward")
        parts = {name: self.forward[name] / self.wall for name in ("products", "attention") if name in self.forward}
        inside = {"forward": layers, **parts, "logits": shares.pop("logits")}
        figures = {**inside, **shares, "outside": 1 - layers - inside["logits"]}
        return {
            "mean_ms": round(1e3 * self.wall / self.num_steps, 3),
            "mean_tokens": round(self.num_tokens / self.num_steps, 1),
            **{name: round(share, 4) for name, share in figures.items()},
        }


class StepReports:
    """The reports of the executor `pid`, whose service logs JSON lines to `log`."""

    def __init__(self, pid: int, log: Path) -> None:
        self._pid = pid
        self._log = log
        self._offset = log.stat().st_size
        self._unread = 0

    def ask(self) -> None:
        """Asks for a report, without waiting. The executor answers after the step that it is in."""
        os.kill(self._pid, signal.SIGUSR1)
        self._unread += 1

    def read(self) -> list[Totals]:
        """Waits for the reports that were asked for. Raises TimeoutError."""
        deadline = time.monotonic() + TIMEOUT
        found: list[Totals] = []
        with self._log.open("rb") as log:
            log.seek(self._offset)
            rest = b""
            while len(found) < self._unread:
                rest += log.readline()
                if rest.endswith(b"\n"):
                    found += _reports(rest)
                    rest = b""
                elif time.monotonic() > deadline:
                    raise TimeoutError(f"the executor has not reported within {TIMEOUT:g} s")
                else:
                    time.sleep(0.002)
            self._offset = log.tell()
        self._unread = 0
        return found

    def now(self) -> Totals:
        self.ask()
        return self.read()[-1]


def _reports(line: bytes) -> list[Totals]:
    try:
        entry = json.loads(line)
    except ValueError:
        return []
    return [Totals.parse(entry)] if entry.get("service") == "executor" and entry.get("event") == "steps" else []
