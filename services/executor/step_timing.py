"""Where the time of each step in flight goes, for a scheduler that asks."""

from __future__ import annotations

import time
from collections.abc import Callable

from quartet.services.executor.step_times import Phase, StepTimes
from quartet.shared.messages import StepPlan, StepSpan, StepTimed


class StepTiming:
    """Splits what StepTimes notes between steps: what is spent from `begin` or `resume` on, up to `pause` or `end`,
    is the named one's. Does nothing until it is enabled. `wall_clock` gives seconds since 1970."""

    def __init__(self, times: StepTimes, wall_clock: Callable[[], float] = time.time) -> None:
        self._times = times
        self._wall_clock = wall_clock
        self._enabled = False
        # By (epoch, step_id): the wall clock and the clock at its beginning, and its spans by the clock.
        self._steps: dict[tuple[int, int], tuple[float, float, list[tuple[Phase, float, float]]]] = {}

    def enable(self, enabled: bool) -> None:
        self._enabled = enabled
        self._steps.clear()
        self._times.spans = None

    def begin(self, plan: StepPlan) -> None:
        if self._enabled:
            spans: list[tuple[Phase, float, float]] = []
            self._steps[plan.epoch, plan.step_id] = self._wall_clock(), self._times.clock(), spans
            self._times.spans = spans

    def pause(self) -> None:
        self._times.spans = None

    def resume(self, plan: StepPlan) -> None:
        step = self._steps.get((plan.epoch, plan.step_id))
        if step is not None:
            self._times.spent("host")
            self._times.spans = step[2]

    def end(self, epoch: int, step_id: int) -> StepTimed | None:
        """What goes before the step's result, if anything; the time since the last note is taken for the host's."""
        step = self._steps.pop((epoch, step_id), None)
        if step is None:
            return None
        wall, began, spans = step
        self._times.spans = spans
        self._times.spent("host")
        self._times.spans = None
        return StepTimed(epoch, step_id, wall, _joined(spans, began))


def _joined(spans: list[tuple[Phase, float, float]], began: float) -> list[StepSpan]:
    """In microseconds from the beginning on; neighbours of one phase are one."""
    found: list[StepSpan] = []
    for phase, start, end in spans:
        start_us, end_us = round(1e6 * (start - began)), round(1e6 * (end - began))
        last = found[-1] if found else None
        if last is not None and last.phase == phase and last.start_us + last.duration_us >= start_us - 1:
            last.duration_us = end_us - last.start_us
        elif end_us > start_us:
            found.append(StepSpan(phase, max(0, start_us), end_us - max(0, start_us)))
    return found
