"""What the executor answers to each message: takeover, plans in order, failures. No sockets, no threads."""

from __future__ import annotations

from typing import Protocol

from quartet.services.executor.plan_columns import PlanError
from quartet.shared.log import get_logger
from quartet.shared.messages import Granted, Message, PlanRefused, StepFailed, StepPlan, StepResult, Takeover

_log = get_logger()


class Runner(Protocol):
    """See ModelRunner."""

    def reset(self) -> None: ...

    def offers(self) -> tuple[bytes, bytes]: ...

    def execute(self, plan: StepPlan) -> StepResult: ...


class ExecutorLoop:
    """Grants epochs and runs the plans of the current one, numbered without gaps from 0.

    After a refused plan or a failed step nothing runs until the next takeover.
    """

    def __init__(self, runner: Runner, first_epoch: int) -> None:
        """`first_epoch` must exceed every epoch that an earlier process of this executor has granted."""
        self._runner = runner
        self._epoch = first_epoch - 1
        self._next_step_id = 0
        self._accepts_plans = False
        self.num_steps = 0
        self.num_plans_dropped = 0

    def handle(self, message: Message) -> Message | None:
        """The answer to send back, if any."""
        match message:
            case Takeover():
                return self._takeover(message)
            case StepPlan():
                return self._plan(message)
        _log.warning("unexpected message dropped", message=type(message).__name__)
        return None

    def _takeover(self, message: Takeover) -> Granted:
        self._runner.reset()
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
        try:
            result = self._runner.execute(plan)
        except PlanError as error:
            return self._refuse(plan, str(error))
        except Exception as error:
            _log.exception("step failed", epoch=plan.epoch, step_id=plan.step_id)
            self._accepts_plans = False
            return StepFailed(plan.epoch, plan.step_id, f"{type(error).__name__}: {error}")
        self._next_step_id += 1
        self.num_steps += 1
        return result

    def _refuse(self, plan: StepPlan, reason: str) -> PlanRefused:
        _log.error("plan refused", epoch=plan.epoch, step_id=plan.step_id, reason=reason)
        self._accepts_plans = False
        return PlanRefused(plan.epoch, plan.step_id, reason)
