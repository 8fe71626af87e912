"""Where a step's time goes is told with it, also where another is launched before its end."""

from __future__ import annotations

from quartet.services.executor.step_times import StepTimes
from quartet.services.executor.step_timing import StepTiming
from quartet.shared.messages import StepPlan, StepSpan, StepTimed


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def plan(step_id: int) -> StepPlan:
    return StepPlan(3, step_id, b"", [], b"", b"", b"\1", b"", b"")


def timed() -> tuple[Clock, StepTimes, StepTiming]:
    clock = Clock()
    times = StepTimes(clock=clock)
    timing = StepTiming(times, lambda: 1000.0 + clock.now)
    timing.enable(True)
    return clock, times, timing


def spend(clock: Clock, times: StepTimes, *parts: tuple[str, int]) -> None:
    for phase, ms in parts:
        clock.now += ms / 1000
        times.spent(phase)  # type: ignore[arg-type]


def test_a_step_that_is_computed_at_once() -> None:
    clock, times, timing = timed()
    spend(clock, times, ("idle", 500))
    timing.begin(plan(0))
    spend(clock, times, ("host", 1), ("host", 2), ("forward", 10), ("logits", 3))
    timing.pause()
    clock.now += 0.004
    assert timing.end(3, 0) == StepTimed(
        3,
        0,
        1100.5,
        [
            StepSpan("host", 0, 3000),
            StepSpan("forward", 3000, 10000),
            StepSpan("logits", 13000, 3000),
            StepSpan("host", 16000, 4000),
        ],
    )
    assert times.spans is None and timing.end(3, 0) is None


def test_each_of_two_in_flight_gets_its_own() -> None:
    clock, times, timing = timed()
    timing.begin(plan(0))
    spend(clock, times, ("forward", 10))
    timing.pause()
    spend(clock, times, ("idle", 5))
    timing.begin(plan(1))
    spend(clock, times, ("forward", 20))
    timing.pause()
    timing.resume(plan(0))
    spend(clock, times, ("sampling", 2))
    timing.pause()
    first, second = timing.end(3, 0), timing.end(3, 1)
    assert first is not None and second is not None
    assert first.spans == [StepSpan("forward", 0, 10000), StepSpan("sampling", 35000, 2000)]
    assert second.spans == [StepSpan("forward", 0, 20000)] and second.started_at == 1100.015


def test_nothing_is_noted_while_nobody_asks() -> None:
    clock, times, timing = timed()
    timing.begin(plan(0))
    timing.enable(False)
    spend(clock, times, ("forward", 10))
    timing.begin(plan(1))
    spend(clock, times, ("forward", 10))
    assert times.spans is None and timing.end(3, 0) is None and timing.end(3, 1) is None
    assert times.totals()["seconds"]["forward"] == 0.02
