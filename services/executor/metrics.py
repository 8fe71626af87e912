"""What the executor tells Prometheus: it counts all of it for its log anyway."""

from __future__ import annotations

from quartet.services.executor.loop import ExecutorLoop
from quartet.services.executor.step_times import StepTimes
from quartet.shared.messages import ModelInfo
from quartet.shared.metrics import Families


def tell(loop: ExecutorLoop, times: StepTimes, model: ModelInfo, families: Families) -> None:
    for phase, seconds in list(times.seconds.items()):
        about = "Where the time of the thread that runs steps goes; all phases make up the wall clock."
        families.counter("executor_phase_seconds", about, seconds, phase=phase)
    for part, seconds in times.forward_seconds().items():
        families.counter("executor_forward_seconds", "Parts of phase forward.", seconds, part=part)
    for name, about, value in (
        ("executor_steps", "Steps run.", times.num_steps),
        ("executor_tokens", "Tokens computed, prefills and decodes.", times.num_tokens),
        ("executor_sampled_tokens", "Tokens sampled.", times.num_sampled),
        ("executor_plans_dropped", "Stale plans dropped: of an epoch that is over.", loop.num_plans_dropped),
        ("executor_plans_refused", "Plans refused: out of turn, or in contradiction to the rows.", loop.num_refused),
        ("executor_steps_failed", "Steps that raised.", loop.num_failed),
        ("executor_epochs", "Takeovers granted.", loop.num_takeovers),
    ):
        families.counter(name, about, value)
    families.gauge("executor_steps_in_flight", "Steps launched and not answered.", len(loop.in_flight))
    families.gauge(
        "executor_info",
        "1; labels tell what it runs on.",
        1,
        device=model.device,
        dtype=model.dtype,
        model_fingerprint=model.model_fingerprint[:16],
    )
