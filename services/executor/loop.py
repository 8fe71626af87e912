"""What the executor answers to each message: takeover, plans in order, failures. No sockets, no threads."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from quartet.services.executor.plan_columns import PlanError
from quartet.services.executor.row_spans import RowSpans
from quartet.shared.log import get_logger
from quartet.shared.messages import (
    EraseHashes,
    Granted,
    Message,
    PlanRefused,
    StepFailed,
    StepPlan,
    StepResult,
    Takeover,
    Vocabulary,
)

_log = get_logger()


class PendingStep(Protocol):
    """A step that has been launched."""

    @property
    def is_ready(self) -> bool:
        """Whether result() would not wait."""

    def wait(self) -> None:
        """Until it is ready. May be called in any thread; never raises what result() would."""

    def result(self) -> Message:
        """Its answer; to be called once, in the order of the steps."""


class Runner(Protocol):
    """See ModelRunner."""

    def reset(self) -> None: ...

    def offers(self) -> tuple[bytes, bytes]: ...

    def launch(self, plan: StepPlan) -> PendingStep: ...

    def add_vocabulary(self, part: Vocabulary) -> None: ...

    def erase_hashes(self) -> None: ...


@dataclass(slots=True)
class AnsweredStep:
    """A PendingStep that has its answer, which still comes after those of earlier ones."""

    answer: Message
    is_ready: bool = True

    def wait(self) -> None:
        pass

    def result(self) -> Message:
        return self.answer


class ExecutorLoop:
    """Grants epochs and runs the plans of the current one, numbered without gaps from 0.

    A plan may be launched while earlier ones are still computed: `in_flight` holds those whose answer is due,
    oldest first. After a refused plan or a failed step nothing runs until the next
    takeover.
    """

    def __init__(self, runner: Runner, first_epoch: int, spans: RowSpans | None = None) -> None:
        """`first_epoch` must exceed every epoch that an earlier process of this executor has granted. `spans` of
        the rows of traced requests."""
        self._runner = runner
        self._epoch = first_epoch - 1
        self._next_step_id = 0
        self._accepts_plans = False
        self.in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self.num_steps = 0
        self.spans = spans
        self.num_plans_dropped = 0
        self.num_refused = 0
        self.num_failed = 0
        self.num_takeovers = 0

    def handle(self, message: Message) -> Message | None:
        """The answer to send back now, if any. A step whose answer is not here yet is in `in_flight`."""
        match message:
            case Takeover():
                return self._takeover(message)
            case StepPlan():
                return self._plan(message)
            case Vocabulary():
                self._runner.add_vocabulary(message)
            case EraseHashes():
                self._runner.erase_hashes()
            case _:
                _log.warning("unexpected message dropped", message=type(message).__name__)
        return None

    def _takeover(self, message: Takeover) -> Granted:
        self.in_flight.clear()
        self._runner.reset()
        self.num_takeovers += 1
        if self.spans is not None:
            self.spans.end_all()
        self._epoch += 1
        self._next_step_id = 0
        self._accepts_plans = True
        granted = Granted(self._epoch, *self._runner.offers())
        _log.info(
            "taken over",
            epoch=self._epoch,
            scheduler=f"{message.incarnation:016x}",
            num_blocks_offered=len(granted.block_ids) // 4,
        )
        return granted

    def _plan(self, plan: StepPlan) -> Message | None:
        if plan.epoch < self._epoch or (plan.epoch == self._epoch and not self._accepts_plans):
            # Its sender has been told already, or has been replaced.
            self.num_plans_dropped += 1
            return None
        if plan.epoch > self._epoch:
            return self._refuse(plan, f"epoch {plan.epoch} was never granted: take over first")
        if plan.step_id != self._next_step_id:
            return self._refuse(plan, f"step {plan.step_id} came where step {self._next_step_id} was due")
        if self.spans is not None:
            self.spans.planned(plan)
        try:
            step = self._runner.launch(plan)
        except PlanError as error:
            return self._in_order(plan, AnsweredStep(self._refuse(plan, str(error))))
        except Exception as error:
            return self._in_order(plan, AnsweredStep(self._fail(plan, error)))
        self._next_step_id += 1
        return self._in_order(plan, step)

    def finish(self) -> Message:
        """The answer of the oldest step in flight; waits where it is not ready."""
        plan, step = self.in_flight.popleft()
        try:
            result = step.result()
        except Exception as error:
            self.in_flight.clear()
            return self._fail(plan, error)
        self.num_steps += isinstance(result, StepResult)
        if self.spans is not None:
            self.spans.returned(plan)
        return result

    def _in_order(self, plan: StepPlan, step: PendingStep) -> Message | None:
        """Its answer, where there is nothing to wait for."""
        self.in_flight.append((plan, step))
        return self.finish() if len(self.in_flight) == 1 and step.is_ready else None

    def _fail(self, plan: StepPlan, error: Exception) -> StepFailed:
        self.num_failed += 1
        _log.error("step failed", epoch=plan.epoch, step_id=plan.step_id, exc_info=error)
        self._accepts_plans = False
        return StepFailed(plan.epoch, plan.step_id, f"{type(error).__name__}: {error}")

    def _refuse(self, plan: StepPlan, reason: str) -> PlanRefused:
        self.num_refused += 1
        _log.error("plan refused", epoch=plan.epoch, step_id=plan.step_id, reason=reason)
        self._accepts_plans = False
        return PlanRefused(plan.epoch, plan.step_id, reason)
