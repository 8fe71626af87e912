from quartet.services.executor.step_times import PHASES, StepTimes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_moment_goes_to_one_phase() -> None:
    clock = Clock()
    times = StepTimes(clock=clock)
    for phase, seconds in (("idle", 1.0), ("host", 0.25), ("forward", 4.0), ("logits", 0.5), ("idle", 2.0)):
        clock.now += seconds
        times.spent(phase)
    times.count(num_tokens=40, num_sampled=3)
    times.count(num_tokens=3, num_sampled=3)
    assert times.totals() == {
        "num_steps": 2,
        "num_tokens": 43,
        "num_sampled": 6,
        "seconds": {"idle": 3.0, "host": 0.25, "forward": 4.0, "logits": 0.5, "sampling": 0.0},
        "forward": {},
    }


def test_clear_forgets_what_went_before_and_what_the_decoder_counted() -> None:
    clock, parts = Clock(), {"attention": 7.0, "products": 2.0}
    times = StepTimes(lambda: dict(parts), clock)
    clock.now += 5.0
    times.spent("forward")
    times.count(1, 1)
    parts["attention"] += 1.0
    clock.now += 5.0
    times.clear()
    clock.now += 0.5
    times.spent("forward")
    parts["attention"] += 0.125
    assert times.totals() == {
        "num_steps": 0,
        "num_tokens": 0,
        "num_sampled": 0,
        "seconds": dict.fromkeys(PHASES, 0.0) | {"forward": 0.5},
        "forward": {"attention": 0.125, "products": 0.0},
    }
