"""The scheduler as a state machine: events in, effects out; no sockets, no event loop, no time of its own."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Final

from quartet.services.scheduler import admission
from quartet.services.scheduler.ledger import Ledger
from quartet.services.scheduler.plan import unpack_u32
from quartet.services.scheduler.request import Owner, Request, RequestGroup, RequestStatus
from quartet.services.scheduler.schedule import StepScheduler
from quartet.services.scheduler.state import MAX_DEATHS, SchedulerState
from quartet.services.scheduler.update import ResultMismatch, apply_result
from quartet.services.scheduler.vocabularies import Vocabularies
from quartet.services.scheduler.watchers import Watchers
from quartet.shared.block_hash import HASH_BYTES
from quartet.shared.log import get_logger
from quartet.shared.messages import (
    Abort,
    ChoicePast,
    EraseHashes,
    ErrorCode,
    Failed,
    Finish,
    FinishReason,
    GetLoads,
    Granted,
    Loads,
    Message,
    ModelInfo,
    NewRequest,
    Outputs,
    PlanRefused,
    PrefixCacheReset,
    PromptLogprobs,
    Release,
    ResetPrefixCache,
    StepFailed,
    StepPlan,
    StepResult,
    StepTimed,
    Takeover,
    Vocabulary,
    Watch,
    WatchedService,
    WatchSteps,
)

if TYPE_CHECKING:
    from quartet.services.scheduler.settings import SchedulerSettings

MAX_PLANS_IN_FLIGHT = 2
MAX_PROMPT_LOGPROBS = 4096

_log = get_logger()


class Destination(enum.Enum):
    EXECUTOR = "executor"


EXECUTOR: Final = Destination.EXECUTOR
# (an owner's key or EXECUTOR, message)
Effect = tuple[Hashable, Message]


class SchedulerCore:
    """Every method but the properties is an event and returns the effects it has, in order.

    `schedule` is an event of its own, so that a shell can take in all that has arrived before a plan
    is made. `clock` gives seconds, monotonic, `wall_clock` those since 1970; `services` tells of this process and
    its executor to those who watch.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        incarnation: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
        services: Callable[[], list[WatchedService]] = list,
    ) -> None:
        self.state = SchedulerState(settings, clock)
        self.ledger = Ledger()
        self.draining = False
        self._settings = settings
        self._incarnation = incarnation
        self._clock = clock
        self._scheduler = StepScheduler(self.state)
        self._arrivals = 0
        self._takeovers = 0  # asked for and not granted yet
        self._owes_erasing = False  # what the next executor offers is not to be believed
        self._vocabularies = Vocabularies()
        self._watchers = Watchers(self.state, incarnation, clock, wall_clock, services)
        self._effects: list[Effect] = []
        # The executor that takes plans, or took them last, and since when none does.
        self._executor_incarnation = 0
        self._no_executor_since: float | None = clock()
        # What was in the plans that were lost with the last executor, should it turn out to have died.
        self._lost_in_flight: dict[Request, int] = {}

    # --- what the shell asks ----------------------------------------------------------------------

    @property
    def granted_epoch(self) -> int | None:
        """The executor's epoch while it takes plans."""
        return self.state.epoch

    @property
    def num_unfinished(self) -> int:
        return self.state.num_unfinished

    @property
    def num_in_flight(self) -> int:
        return len(self.state.in_flight)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, by the clock."""
        grace = self._settings.owner_grace
        times = [o.down_since + grace for o in self.ledger.owners.values() if o.down_since is not None]
        if self._no_executor_since is not None and self.num_unfinished:
            times.append(self._no_executor_since + self._settings.recovery_deadline)
        if (at := self._watchers.next_at) is not None:
            times.append(at)
        return min(times, default=None)

    @property
    def num_owed(self) -> int:
        """Unfinished choices whose owner is there to wait for them."""
        return sum(
            request.status < RequestStatus.FINISHED
            for group in self.ledger.groups.values()
            if group.owner.down_since is None
            for request in group.choices.values()
        )

    # --- owners -----------------------------------------------------------------------------------

    def owner_up(self, key: Hashable) -> list[Effect]:
        self.ledger.owner(key).down_since = None
        return self._take_effects()

    def owner_down(self, key: Hashable) -> list[Effect]:
        """Its requests run on for the grace; another owner may add them and so take them over."""
        self._set_watch(key, Watch(0))
        owner = self.ledger.owners.get(key)
        if owner is not None:
            owner.down_since = self._clock()
            owner.outbox.clear()
            self._forget_owner_without_requests(owner)
        return self._take_effects()

    def tick(self) -> list[Effect]:
        """Drops what belongs to owners that have been gone past the grace, and fails what has waited for an
        executor past the recovery deadline."""
        now = self._clock()
        deadline, since = self._settings.recovery_deadline, self._no_executor_since
        if since is not None and now - since >= deadline:
            for group in list(self.ledger.groups.values()):
                if any(request.status < RequestStatus.FINISHED for request in group.choices.values()):
                    self._fail(group, ErrorCode.UNAVAILABLE, f"no executor was ready for {deadline:g} s")
        for owner in list(self.ledger.owners.values()):
            if owner.down_since is not None and now - owner.down_since >= self._settings.owner_grace:
                for request_id in list(owner.request_ids):
                    self._drop(self.ledger.groups[request_id])
                self._forget_owner_without_requests(owner)
        self._effects += self._watchers.take()
        return self._take_effects()

    def watch(self, key: Hashable, message: Watch) -> list[Effect]:
        """The owner wants to be told what happens, or no more."""
        self._set_watch(key, message)
        self._effects += self._watchers.take()
        return self._take_effects()

    # --- requests ---------------------------------------------------------------------------------

    def new_request(self, key: Hashable, message: NewRequest) -> list[Effect]:
        if not self.ledger.is_outdated(message.request_id, message.attempt):
            owner = self.ledger.owner(key)
            group = self.ledger.groups.get(message.request_id)
            if group is not None and self._is_known(group, message) and not admission.invalid(self.state, message):
                self._add_again(group, owner, message)
            else:
                self._add(group, owner, message)
        return self._take_effects()

    def abort(self, message: Abort) -> list[Effect]:
        group = self.ledger.current(message.request_id, message.attempt)
        if group is not None:
            self._drop(group)
        return self._take_effects()

    def release(self, message: Release) -> list[Effect]:
        group = self.ledger.current(message.request_id, message.attempt)
        if group is not None:
            self._drop(group)
        return self._take_effects()

    def finish(self, message: Finish) -> list[Effect]:
        """A stop string was found: the choice ends after num_output_tokens and is retained."""
        group = self.ledger.current(message.request_id, message.attempt)
        request = group.choices.get(message.index) if group is not None else None
        if request is not None:
            request.truncate(max(0, message.num_output_tokens))
            self.state.finish(request, FinishReason.STOP, None)
        return self._take_effects()

    def get_loads(self, key: Hashable, message: GetLoads) -> list[Effect]:
        state = self.state
        num_requests = sum(len(group.choices) for group in self.ledger.groups.values())
        loads = Loads(
            call_id=message.call_id,
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_preempted=len(state.preempted),
            num_blocks=state.kv.pool.num_blocks,
            num_free_blocks=state.kv.num_free_blocks,
            num_cached_blocks=state.kv.pool.num_cached_blocks,
            num_requests_retained=num_requests - state.num_unfinished,
            max_num_seqs=state.max_num_seqs,
            max_num_batched_tokens=state.max_num_batched_tokens,
            num_preemptions_total=state.totals.preemptions,
            num_steps_total=state.totals.steps,
            num_prompt_tokens_total=state.totals.prompt_tokens,
            num_cached_tokens_total=state.totals.cached_tokens,
            num_output_tokens_total=state.totals.output_tokens,
        )
        self._effects.append((key, loads))
        return self._take_effects()

    def reset_prefix_cache(self, key: Hashable, message: ResetPrefixCache) -> list[Effect]:
        """No prefix computed so far is found any more, by this scheduler or the next."""
        state = self.state
        num_blocks = state.kv.forget_prefixes(state.running)
        if state.epoch is not None:
            self._effects.append((EXECUTOR, EraseHashes()))
        self._owes_erasing = state.epoch is None
        self._effects.append((key, PrefixCacheReset(message.call_id, num_blocks)))
        return self._take_effects()

    def vocabulary(self, message: Vocabulary) -> list[Effect]:
        parts = self._vocabularies.add(message)
        if self.state.epoch is not None:
            self._tell(parts)
        return self._take_effects()

    # --- the executor -----------------------------------------------------------------------------

    def executor_up(self, model: ModelInfo, incarnation: int = 0) -> list[Effect]:
        """An executor is there: it is asked for its batch. Requests that it can never run are failed. Where it
        is the process that was there before (`incarnation`, 0: unknown), it was cut off and has not died."""
        state = self.state
        before = state.model
        if state.epoch is not None:
            state.lose_executor()
        if not incarnation or incarnation != self._executor_incarnation:
            self._count_deaths(self._lost_in_flight, "the executor died")
        self._lost_in_flight = {}
        self._executor_incarnation = incarnation
        state.configure(model)
        for group in list(self.ledger.groups.values()):
            self._refit(group, before, model)
        self._takeovers = 0
        self._take_over()
        return self._take_effects()

    def executor_down(self, *, planned: bool = False) -> list[Effect]:
        """It is gone. `planned`: it was asked to leave, so nothing is to blame."""
        self.state.metrics.executor_losses += self.state.epoch is not None
        if not planned:
            self._lost_in_flight |= self._in_flight()
        self.state.lose_executor()
        self.executor_stands_still(True)
        return self._take_effects()

    def executor_stands_still(self, stalled: bool) -> None:
        """Whether nobody computes at present; the recovery deadline runs meanwhile."""
        if stalled == (self._no_executor_since is None):
            self._no_executor_since = self._clock() if stalled else None

    def granted(self, message: Granted) -> list[Effect]:
        epoch = self.state.epoch
        if not self._takeovers and (epoch is None or message.epoch <= epoch):
            # Nobody asked. Plans of an older epoch would be dropped without a word.
            _log.warning("a grant that was not asked for is ignored", epoch=message.epoch)
            return []
        self._takeovers = max(0, self._takeovers - 1)
        self.state.metrics.takeovers += 1
        if epoch is not None:
            self.state.lose_executor()
        hashes, block_ids = message.block_hashes, list[int]()
        block_hashes = [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
        try:
            block_ids = unpack_u32(message.block_ids)
        except ValueError:
            _log.warning("the executor's block table is cut short", num_bytes=len(message.block_ids))
        if len(block_ids) * HASH_BYTES != len(hashes):
            _log.warning("the executor's block table is malformed", block_ids=len(block_ids), hashes=len(block_hashes))
            block_ids, block_hashes = [], []
        if self._owes_erasing:
            block_ids, block_hashes = [], []
            self._effects.append((EXECUTOR, EraseHashes()))
            self._owes_erasing = False
        self._tell(self._vocabularies.parts())
        self.state.granted(message.epoch, block_ids, block_hashes)
        if self.state.recorder is not None:
            self._effects.append((EXECUTOR, WatchSteps(True)))
        self.executor_stands_still(False)
        return self._take_effects()

    def step_result(self, message: StepResult) -> list[Effect]:
        if message.epoch != self.state.epoch:
            return []
        try:
            update = apply_result(self.state, message)
        except ResultMismatch as error:
            self._ask_again(str(error))
            return self._take_effects()
        for group, reason in update.failed.items():
            if group in update.invalid:
                self._fail(group, ErrorCode.INVALID_ARGUMENT, reason, "structured")
            else:
                self._fail(group, ErrorCode.INTERNAL, reason)
        self._effects.extend((group.owner.key, logprobs) for group, logprobs in update.prompt_logprobs)
        if self.state.recorder is not None:
            self.state.recorder.updated()
        return self._take_effects()

    def step_timed(self, message: StepTimed) -> None:
        """Where the time of the step went whose result comes next."""
        if self.state.recorder is not None:
            self.state.recorder.timed(message)

    def plan_refused(self, message: PlanRefused) -> list[Effect]:
        if message.epoch == self.state.epoch:
            self._ask_again(f"step {message.step_id} was refused: {message.reason}")
        return self._take_effects()

    def step_failed(self, message: StepFailed) -> list[Effect]:
        if message.epoch == self.state.epoch:
            self._count_deaths(self._in_flight(), f"the step failed: {message.message}")
            self._ask_again(f"step {message.step_id} failed: {message.message}")
        return self._take_effects()

    def schedule(self) -> list[Effect]:
        """Makes plans until two are in flight or there is nothing to compute."""
        state = self.state
        if state.epoch is not None:
            plan = self._scheduler.schedule if state.recorder is None else self._plan_noted
            while len(state.in_flight) < MAX_PLANS_IN_FLIGHT and (message := plan()) is not None:
                self._effects.append((EXECUTOR, message))
        if state.recorder is not None:
            self._effects += self._watchers.take()
        return self._take_effects()

    def _plan_noted(self) -> StepPlan | None:
        started = self._clock()
        message = self._scheduler.schedule()
        if message is not None and self.state.recorder is not None:
            self.state.recorder.planned(self.state.in_flight[-1], message, started)
        return message

    def _set_watch(self, key: Hashable, message: Watch) -> None:
        before = self.state.recorder
        self._watchers.watch(key, message)
        after = self.state.recorder
        if (before is None) != (after is None) and self.state.epoch is not None:
            self._effects.append((EXECUTOR, WatchSteps(after is not None)))

    # --- adding -----------------------------------------------------------------------------------

    def _is_known(self, group: RequestGroup, message: NewRequest) -> bool:
        return group.same_question(message) and (
            message.sampling.prompt_logprobs is None or message.prompt_logprobs_start >= group.prompt_logprobs_base
        )

    def _add(self, known: RequestGroup | None, owner: Owner, message: NewRequest) -> None:
        """A request that is new here, or one known under its id that asks for something else now."""
        failed = admission.refusal(self.state, message, draining=self.draining and known is None)
        if known is not None:
            self._drop(known)
        if failed is not None:
            self.state.metrics.requests_failed += 1
            self._effects.append((owner.key, failed))
            return
        self._arrivals += 1
        self.state.metrics.requests_added += 1
        group = RequestGroup(message, owner, self._arrivals, self._clock())
        self.ledger.add(group)
        for past in message.choices:
            if past.index not in group.choices:
                self._add_choice(group, past)

    def _add_again(self, group: RequestGroup, owner: Owner, message: NewRequest) -> None:
        """Sends what the owner lacks; where its past is no prefix of what is known, the past wins."""
        self.state.metrics.requests_added_again += 1
        self.ledger.move(group, owner, message.attempt)
        pasts = {past.index: past for past in message.choices}
        for index in [index for index in group.choices if index not in pasts]:
            self.state.drop(group.choices.pop(index))
        for index, past in pasts.items():
            request = group.choices.get(index)
            if request is None:
                self._add_choice(group, past)
            elif _is_prefix(past, request):
                num_past_tokens = len(past.output_token_ids)
                if request.status is RequestStatus.FINISHED or num_past_tokens < request.num_output_tokens:
                    request.outbox.append(request.output(num_past_tokens))
            else:
                self.state.drop(request)
                self._add_choice(group, past)
        if not group.choices:
            self._drop(group)
        elif group.sampling.prompt_logprobs is not None:
            entries = group.prompt_logprobs[message.prompt_logprobs_start - group.prompt_logprobs_base :]
            # In parts: all of a long prompt's might be more than a frame holds.
            for i in range(0, len(entries), MAX_PROMPT_LOGPROBS):
                part, start = entries[i : i + MAX_PROMPT_LOGPROBS], message.prompt_logprobs_start + i
                self._effects.append((owner.key, PromptLogprobs(group.request_id, group.attempt, start, part)))

    def _add_choice(self, group: RequestGroup, past: ChoicePast) -> None:
        request = Request(group, past)
        group.choices[past.index] = request
        if self.state.model is not None:
            request.limit_to(self.state.model.max_model_len)
        finish = request.finish_condition()
        if finish is None or request.wants_prompt_logprobs:
            if finish is not None:
                request.score_only(finish)
            self.state.enqueue(request, came_back=bool(past.output_token_ids))
        else:
            self.state.finish(request, *finish)
            request.outbox.append(request.output(request.num_past_tokens))

    def _refit(self, group: RequestGroup, before: ModelInfo | None, model: ModelInfo) -> None:
        """Fits an unfinished request to an executor that may be another than the one before."""
        unfinished = [r for r in group.choices.values() if r.status < RequestStatus.FINISHED]
        if not unfinished:
            return
        if before is not None and before.model_fingerprint != model.model_fingerprint:
            self._fail(group, ErrorCode.ABORTED, f"the model changed from {before.name} to {model.name} meanwhile")
            return
        pasts = [ChoicePast(r.index, r.token_ids[r.num_prompt_tokens :]) for r in unfinished]
        failed = admission.never_fits(model, group.ask_again(pasts))
        if failed is not None:
            self._fail(group, failed.code, failed.message, failed.field)
            return
        if before is None or before.block_size != model.block_size:
            group.prompt_block_hashes.clear()
        for request in unfinished:
            if before is None or before.block_size != model.block_size:
                request.block_hashes.clear()
            if request.scoring is None:
                request.limit_to(model.max_model_len)
                if (finish := request.finish_condition()) is not None:
                    self.state.finish(request, *finish)
                    request.outbox.append(request.output(request.num_output_tokens))

    # --- ends -------------------------------------------------------------------------------------

    def _drop(self, group: RequestGroup) -> None:
        for request in group.choices.values():
            self.state.drop(request)
        self.ledger.remove(group)
        if group.owner.down_since is not None:
            self._forget_owner_without_requests(group.owner)

    def _fail(self, group: RequestGroup, code: ErrorCode, message: str, field: str = "") -> None:
        self.state.metrics.requests_failed += 1
        _log.warning("request failed", request_id=group.request_id, code=code.name, reason=message)
        self._effects.append((group.owner.key, Failed(group.request_id, group.attempt, code, message, field)))
        self._drop(group)

    def _forget_owner_without_requests(self, owner: Owner) -> None:
        if not owner.request_ids:
            self.ledger.owners.pop(owner.key, None)

    def _in_flight(self) -> dict[Request, int]:
        """The unfinished requests in plans that have not returned, and how far each was to get."""
        requests = {request for plan in self.state.in_flight for request in plan.requests()}
        return {r: r.num_computed_tokens for r in requests if r.status < RequestStatus.FINISHED}

    def _count_deaths(self, in_flight: dict[Request, int], reason: str) -> None:
        state = self.state
        if len(in_flight) == 1:
            (request,) = in_flight
            if request in state.suspects:
                self._fail(request.group, ErrorCode.INTERNAL, f"{reason}, {MAX_DEATHS + 1} times with this request")
                return
        for request, position in in_flight.items():
            if request.status < RequestStatus.FINISHED:
                state.count_death(request, position)

    def _ask_again(self, reason: str) -> None:
        """The executor's rows are not what they are held to be: start over with it."""
        self.state.metrics.steps_failed += 1
        _log.warning("taking the executor over again", reason=reason)
        self.state.lose_executor()
        self._take_over()

    def _tell(self, parts: Iterable[Vocabulary]) -> None:
        """An executor that can use it of a vocabulary, before any plan that needs it."""
        if self.state.model is not None and self.state.model.structured_output:
            self._effects.extend((EXECUTOR, part) for part in parts)

    def _take_over(self) -> None:
        self._takeovers += 1
        self._effects.append((EXECUTOR, Takeover(self._incarnation)))

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        for owner in self.ledger.owners.values():
            if owner.outbox:
                if owner.down_since is None:
                    effects.append((owner.key, Outputs(owner.outbox.copy())))
                owner.outbox.clear()
        if any(owner.down_since is not None for owner in self.ledger.owners.values()):
            effects = [e for e in effects if not self._is_down(e[0])]
        return effects

    def _is_down(self, key: Hashable) -> bool:
        owner = self.ledger.owners.get(key)
        return owner is not None and owner.down_since is not None


def _is_prefix(past: ChoicePast, request: Request) -> bool:
    """Whether everything from the past on is known and can be sent."""
    num_past_tokens = len(past.output_token_ids)
    start = request.num_prompt_tokens
    return request.token_ids[start : start + num_past_tokens] == past.output_token_ids and (
        request.output_logprobs is None or num_past_tokens >= request.num_past_tokens
    )
