"""Times to first token and between tokens, as clients see them, over a sliding window."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

WINDOW = 30.0
# Buckets grow by this: what is told is within 2.5 % of what was measured.
GROWTH = math.log(1.05)
# The first bucket ends here.
LEAST_MS = 0.01


class Histogram:
    """Of milliseconds, in slots of a second."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, dict[int, int]]] = deque()

    def add(self, now: float, ms: float, count: int = 1) -> None:
        second = int(now)
        if not self._slots or self._slots[-1][0] != second:
            self._slots.append((second, {}))
            self._drop(now)
        buckets = self._slots[-1][1]
        bucket = math.ceil(math.log(ms / LEAST_MS) / GROWTH) if ms > LEAST_MS else 0
        buckets[bucket] = buckets.get(bucket, 0) + count

    def percentiles(self, now: float) -> dict[str, Any]:
        self._drop(now)
        total: dict[int, int] = {}
        for _, buckets in self._slots:
            for bucket, count in buckets.items():
                total[bucket] = total.get(bucket, 0) + count
        count = sum(total.values())
        found: dict[str, Any] = {"count": count}
        ordered = sorted(total.items())
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            found[name] = _at(ordered, max(1, math.ceil(share * count))) if count else None
        return found

    def _drop(self, now: float) -> None:
        while self._slots and self._slots[0][0] < now - WINDOW:
            self._slots.popleft()


def _at(ordered: list[tuple[int, int]], rank: int) -> float:
    """The middle of the bucket with the rank-th smallest."""
    bucket = next(bucket for (bucket, _), reached in zip(ordered, _running(ordered), strict=True) if reached >= rank)
    return round(LEAST_MS * math.exp(GROWTH * (bucket - 0.5)), 3)


def _running(ordered: list[tuple[int, int]]) -> Iterator[int]:
    return itertools.accumulate(count for _, count in ordered)


class Latencies:
    """`clock` gives seconds, monotonic. Streams that were open before are known from their next tokens on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._opened: dict[int, float] = {}
        self._last: dict[int, dict[int, float]] = {}
        self._ttft = Histogram()
        self._itl = Histogram()
        self._told: dict[str, Any] | None = None
        self._told_at = 0.0

    def opened(self, request_id: int) -> None:
        self._opened[request_id] = self._clock()

    def came(self, request_id: int, index: int, num_tokens: int) -> None:
        """So many tokens of a choice, at once."""
        now = self._clock()
        since = self._opened.pop(request_id, None)
        last = self._last.setdefault(request_id, {})
        if since is not None:
            self._ttft.add(now, 1000 * (now - since))
        if index in last:
            self._itl.add(now, 1000 * (now - last[index]) / num_tokens, num_tokens)
        last[index] = now

    def ended(self, request_id: int) -> None:
        self._opened.pop(request_id, None)
        self._last.pop(request_id, None)

    def percentiles(self) -> dict[str, Any]:
        """Made anew once a second at most."""
        now = self._clock()
        if self._told is None or now - self._told_at >= 1.0:
            self._told_at = now
            ttft, itl = self._ttft.percentiles(now), self._itl.percentiles(now)
            self._told = {"window_s": WINDOW, "ttft": ttft, "itl": itl}
        return self._told
