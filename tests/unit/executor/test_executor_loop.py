from typing import Any

import pytest

from quartet.services.executor.loop import AnsweredStep, ExecutorLoop
from quartet.services.executor.plan_columns import PlanError
from quartet.shared.messages import (
    EraseHashes,
    Granted,
    PlanRefused,
    Release,
    StepFailed,
    StepPlan,
    StepResult,
    Takeover,
    Vocabulary,
)


class FakeRunner:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.raises: Exception | None = None

    def reset(self) -> None:
        self.calls.append("reset")

    def offers(self) -> tuple[bytes, bytes]:
        return b"\1\0\0\0", b"h" * 32

    def add_vocabulary(self, part: Vocabulary) -> None:
        self.calls.append(f"vocabulary {part.fingerprint}")

    def erase_hashes(self) -> None:
        self.calls.append("erase")

    def launch(self, plan: StepPlan) -> AnsweredStep:
        self.calls.append(f"step {plan.step_id}")
        if self.raises is not None:
            raise self.raises
        return AnsweredStep(StepResult(plan.epoch, plan.step_id, b""))


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def loop(runner: FakeRunner) -> ExecutorLoop:
    return ExecutorLoop(runner, first_epoch=100)


def test_a_takeover_drops_the_rows_and_offers_the_blocks(loop: ExecutorLoop, runner: FakeRunner, plans: Any) -> None:
    assert loop.handle(Takeover(7)) == Granted(100, b"\1\0\0\0", b"h" * 32)
    assert loop.handle(plans.plan(0, epoch=100)) == StepResult(100, 0, b"")
    assert loop.handle(plans.plan(1, epoch=100)) == StepResult(100, 1, b"")
    granted = loop.handle(Takeover(8))
    assert isinstance(granted, Granted) and granted.epoch == 101
    assert runner.calls == ["reset", "step 0", "step 1", "reset"]
    assert loop.num_steps == 2


def test_plans_of_an_older_epoch_are_dropped_in_silence(loop: ExecutorLoop, runner: FakeRunner, plans: Any) -> None:
    loop.handle(Takeover(7))
    loop.handle(plans.plan(0, epoch=100))
    loop.handle(Takeover(8))
    assert loop.handle(plans.plan(1, epoch=100)) is None
    assert loop.num_plans_dropped == 1
    assert loop.handle(plans.plan(0, epoch=101)) == StepResult(101, 0, b"")


@pytest.mark.parametrize("step_id", [0, 2])
def test_a_gap_or_a_repeat_applies_nothing_until_a_takeover(
    loop: ExecutorLoop, runner: FakeRunner, plans: Any, step_id: int
) -> None:
    loop.handle(Takeover(7))
    loop.handle(plans.plan(0, epoch=100))
    refused = loop.handle(plans.plan(step_id, epoch=100))
    assert isinstance(refused, PlanRefused) and (refused.epoch, refused.step_id) == (100, step_id)
    # The right one comes too late: the sender cannot know what of its later plans was applied.
    assert loop.handle(plans.plan(1, epoch=100)) is None
    assert runner.calls == ["reset", "step 0"]
    loop.handle(Takeover(7))
    assert loop.handle(plans.plan(0, epoch=101)) == StepResult(101, 0, b"")


def test_a_plan_before_any_takeover_is_refused(loop: ExecutorLoop, runner: FakeRunner, plans: Any) -> None:
    assert isinstance(loop.handle(plans.plan(0, epoch=500)), PlanRefused)
    assert loop.handle(plans.plan(0, epoch=3)) is None
    assert runner.calls == []


@pytest.mark.parametrize(
    ("raised", "answer"),
    [(PlanError("row 3 is not in use"), PlanRefused), (RuntimeError("out of memory"), StepFailed)],
)
def test_after_a_failure_only_a_takeover_leads_on(
    loop: ExecutorLoop, runner: FakeRunner, plans: Any, raised: Exception, answer: type
) -> None:
    loop.handle(Takeover(7))
    runner.raises = raised
    failure = loop.handle(plans.plan(0, epoch=100))
    assert isinstance(failure, answer) and failure.step_id == 0
    assert str(raised) in (failure.reason if isinstance(failure, PlanRefused) else failure.message)
    runner.raises = None
    assert loop.handle(plans.plan(1, epoch=100)) is None
    assert loop.handle(plans.plan(0, epoch=100)) is None
    assert runner.calls == ["reset", "step 0"]
    assert isinstance(loop.handle(Takeover(7)), Granted)
    assert loop.handle(plans.plan(0, epoch=101)) == StepResult(101, 0, b"")
    assert loop.num_steps == 1


def test_other_messages_are_dropped(loop: ExecutorLoop) -> None:
    assert loop.handle(Release(1, 1)) is None


class LateStep:
    """A PendingStep that is ready when it is told to be."""

    def __init__(self, answer: StepResult | Exception) -> None:
        self.answer = answer
        self.is_ready = False

    def wait(self) -> None: ...

    def result(self) -> StepResult:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class LateRunner(FakeRunner):
    def launch(self, plan: StepPlan) -> LateStep:
        return LateStep(self.raises or super().launch(plan).result())


@pytest.fixture
def late_loop(plans: Any) -> ExecutorLoop:
    loop = ExecutorLoop(LateRunner(), first_epoch=100)
    loop.handle(Takeover(7))
    assert [loop.handle(plans.plan(i, epoch=100)) for i in range(2)] == [None, None]
    return loop


def test_steps_in_flight_are_answered_in_order(late_loop: ExecutorLoop, plans: Any) -> None:
    assert [plan.step_id for plan, _ in late_loop.in_flight] == [0, 1]
    refused = late_loop.handle(plans.plan(7, epoch=100))
    assert isinstance(refused, PlanRefused)
    assert late_loop.num_steps == 0
    assert [late_loop.finish() for _ in range(2)] == [StepResult(100, 0, b""), StepResult(100, 1, b"")]
    assert not late_loop.in_flight and late_loop.num_steps == 2


def test_a_refusal_waits_for_the_steps_before_it(late_loop: ExecutorLoop, plans: Any) -> None:
    def refuse(plan: StepPlan) -> Any:
        raise PlanError("row 9 is not in use")

    late_loop._runner.launch = refuse  # type: ignore[method-assign]
    assert late_loop.handle(plans.plan(2, epoch=100)) is None
    assert [type(late_loop.finish()) for _ in range(3)] == [StepResult, StepResult, PlanRefused]
    assert late_loop.num_steps == 2


def test_a_step_that_fails_takes_later_ones_with_it(late_loop: ExecutorLoop, plans: Any) -> None:
    late_loop.in_flight[0][1].answer = RuntimeError("an illegal memory access")  # type: ignore[attr-defined]
    failed = late_loop.finish()
    assert isinstance(failed, StepFailed) and failed.step_id == 0
    assert not late_loop.in_flight
    assert late_loop.handle(plans.plan(2, epoch=100)) is None
    assert isinstance(late_loop.handle(Takeover(7)), Granted)


def test_a_takeover_drops_steps_in_flight(late_loop: ExecutorLoop) -> None:
    assert isinstance(late_loop.handle(Takeover(8)), Granted)
    assert not late_loop.in_flight


def test_a_vocabulary_and_the_erasing_of_hashes_need_no_epoch_and_no_answer(
    loop: ExecutorLoop, runner: FakeRunner
) -> None:
    assert loop.handle(Vocabulary("v", 1, 0, [b"a"])) is None
    assert loop.handle(EraseHashes()) is None
    assert runner.calls == ["vocabulary v", "erase"] and not loop.in_flight
