"""What takes this process's time, noted for gateways that trace. There is none while nobody does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from quartet.shared.messages import WatchedSpan, WatchedSpans

# Seconds between two accounts.
INTERVAL = 0.1
# Of one account; the oldest are dropped.
MAX_SPANS = 4096


class SpanLog:
    """`clock` is monotonic, in seconds; `wall` is what to add to it for the wall clock. What is noted is given to
    `tell` an interval later, by `later(seconds, call)`."""

    def __init__(
        self,
        clock: Callable[[], float],
        wall: float,
        tell: Callable[[WatchedSpans], None],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._tell = tell
        self._later = later
        self._spans: deque[WatchedSpan] = deque(maxlen=MAX_SPANS)

    def add(self, name: str, began: float, num_tokens: int, request_id: int | None = None) -> None:
        """What has just ended; `began` is by the clock."""
        if not self._spans:
            self._later(INTERVAL, self._flush)
        duration_us = round(1e6 * (self._clock() - began))
        self._spans.append(WatchedSpan(name, self._wall + began, duration_us, num_tokens, request_id))

    def _flush(self) -> None:
        spans = list(self._spans)
        self._spans.clear()
        self._tell(WatchedSpans(spans))
