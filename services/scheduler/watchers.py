"""Who watches, and when they are told: the recorder is there exactly while somebody is."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from quartet.services.scheduler.recorder import Recorder
from quartet.services.scheduler.state import SchedulerState
from quartet.shared.messages import Watch, WatchedService, WatchEvents

MIN_INTERVAL_MS, MAX_INTERVAL_MS = 20, 60_000


class Watchers:
    """All are told the same: whoever comes makes the account start over for each."""

    def __init__(
        self,
        state: SchedulerState,
        incarnation: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        services: Callable[[], list[WatchedService]],
    ) -> None:
        self._state = state
        self._incarnation = incarnation
        self._clock = clock
        self._wall_clock = wall_clock
        self._services = services
        self._intervals: dict[Hashable, float] = {}
        self._next_at = 0.0

    def watch(self, key: Hashable, message: Watch) -> None:
        if message.interval_ms <= 0:
            self.leave(key)
            return
        self._intervals[key] = min(MAX_INTERVAL_MS, max(MIN_INTERVAL_MS, message.interval_ms)) / 1000
        self._next_at = self._clock()
        recorder = self._state.recorder
        if recorder is not None:
            recorder.start_over()
            return
        wall = self._wall_clock() - self._clock()
        self._state.recorder = Recorder(self._state, self._incarnation, self._clock, wall, self._services)

    def leave(self, key: Hashable) -> None:
        """It watches no more, if it did."""
        self._intervals.pop(key, None)
        if not self._intervals and self._state.recorder is not None:
            self._state.recorder = None
            self._state.kv.pool.changed = None

    @property
    def next_at(self) -> float | None:
        """By the clock, when `take` has something; None while nothing is to be told."""
        recorder = self._state.recorder
        return self._next_at if recorder is not None and recorder.has_news else None

    def take(self) -> list[tuple[Hashable, WatchEvents]]:
        """What is to be told now, to whom."""
        recorder = self._state.recorder
        if recorder is None or self._clock() < self._next_at or not recorder.has_news:
            return []
        self._next_at = self._clock() + min(self._intervals.values())
        events = recorder.take()
        return [(key, events) for key in self._intervals]
