"""What the next step computes: one token budget over running requests, then over those that wait."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Any

from quartet.services.scheduler.free_block_queue import KVCacheBlock
from quartet.services.scheduler.plan import PlanBuilder, PlanInFlight
from quartet.services.scheduler.request import Request, RequestStatus
from quartet.services.scheduler.state import SchedulerState
from quartet.shared.messages import StepPlan

# How far down the queue the reserved share looks for short prompts.
SHORT_PROMPT_WINDOW = 256


class Admission(enum.Enum):
    ADMITTED = 1
    HELD = 2  # not yet, but those behind it may go on
    BLOCKED = 3  # no place: nobody passes it


class StepScheduler:
    """Order of one step: blocks for the decodes (all that preempts happens here), every decode's one
    token, then prefills in policy order, with a share kept for short ones."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._blocked = False

    def schedule(self) -> StepPlan | None:
        """The next plan, already counted as computed; None when there is nothing to do."""
        state = self._state
        plan = PlanBuilder()
        if state.suspects:
            self._schedule_alone(plan)
        else:
            self._schedule_batch(plan)
        # A plan of removals alone is sent only where queued requests wait for the rows.
        starved = state.rows.num_free == 0 and state.rows.num_left > 0 and (state.preempted or state.waiting)
        if plan.empty and not starved:
            return None
        state.last_plan += 1
        in_flight = PlanInFlight(state.last_plan, state.next_step_id)
        state.next_step_id += 1
        assert state.epoch is not None
        message = plan.build(state.epoch, in_flight, state.rows)
        for prefill in in_flight.prefills:
            prefill.request.last_plan = in_flight.sequence
        state.in_flight.append(in_flight)
        state.totals.steps += 1
        state.metrics.iteration_tokens.observe(in_flight.num_tokens)
        return message

    def _schedule_batch(self, plan: PlanBuilder) -> None:
        state = self._state
        self._extend_decodes(plan, state.rows.decodes())
        self._unblock_first_prefill(plan)
        self._decode(plan, state.rows.decodes(), state.rows.decode_bits())

        budget = self._prefill_budget(len(plan.decodes))
        if budget and (state.prefilling or state.preempted or state.waiting):
            self._blocked = not state.rows.num_free
            reserve = min(budget - 1, math.ceil(budget * state.settings.short_prompt_share))
            left = self._prefill_in_order(plan, budget - reserve)
            if left == 0 and reserve:
                left = self._prefill_shortest(plan, reserve)
                self._prefill_in_order(plan, left)
            elif reserve:
                self._prefill_in_order(plan, left + reserve)

    def _schedule_alone(self, plan: PlanBuilder) -> None:
        """A suspect is the only one in every plan in flight, so that a death has one cause."""
        state = self._state
        request = next((r for r in state.suspects if r.status is RequestStatus.RUNNING), None)
        if request is None:
            if state.in_flight or not state.rows.num_free:
                return
            request = min(state.suspects, key=self._rank)
            hits = state.kv.get_computed_blocks(request)
            while state.kv.num_blocks_needed(request, hits) > state.kv.num_free_blocks:
                self._preempt(plan, self._last_running())
                hits = state.kv.get_computed_blocks(request)
            self._admit(plan, request, hits)
        if request in state.prefilling:
            if self._make_room(plan, request, request.num_computed_tokens):
                self._prefill(plan, request, state.max_num_batched_tokens)
        elif request in state.rows.decodes():
            self._extend_decodes(plan, [request])
            if request in state.rows.decodes():
                row = request.req_index
                self._decode(plan, [request], bytes(row >> 3) + bytes([1 << (row & 7)]))

    # --- decodes ----------------------------------------------------------------------------------

    def _extend_decodes(self, plan: PlanBuilder, decodes: list[Request]) -> None:
        """Gives a block to each decode at a block's edge, and lets those at their end go."""
        state = self._state
        for request in [r for r in decodes if r.num_computed_tokens == r.next_edge]:
            if request.status is not RequestStatus.RUNNING:
                continue
            position = request.num_computed_tokens
            if position == request.last_position:
                state.rows.stop_decoding(request)
            elif self._make_room(plan, request, position):
                plan.append_blocks(request, state.kv.allocate_slots(request, position + 1))
                state.set_next_edge(request)

    def _decode(self, plan: PlanBuilder, decodes: list[Request], decode_bits: bytes) -> None:
        plan.decodes = decodes
        plan.decode_bits = decode_bits
        sequence = self._state.last_plan + 1
        for request in decodes:
            request.num_computed_tokens += 1
            request.last_plan = sequence

    # --- preemption -------------------------------------------------------------------------------

    def _make_room(self, plan: PlanBuilder, request: Request, position: int) -> bool:
        """Preempts the last of the running until `position` can have a slot; False when that took
        the request itself."""
        state = self._state
        if position < len(request.blocks) * state.kv.block_size:
            return True
        while not state.kv.num_free_blocks:
            # A suspect that runs alone goes before all others.
            victim = self._last_running(spared=request if state.suspects else None)
            self._preempt(plan, victim)
            if victim is request:
                return False
        return True

    def _unblock_first_prefill(self, plan: PlanBuilder) -> None:
        """Half-done prefills do not wait for each other: the first takes the blocks of later ones. When
        it is the last of the running itself, it waits for the decodes before it."""
        state = self._state
        if state.kv.num_free_blocks or not state.prefilling:
            return
        order = sorted(state.running, key=self._rank)
        request = next(r for r in order if r in state.prefilling)
        if request.num_computed_tokens == len(request.blocks) * state.kv.block_size:
            while not state.kv.num_free_blocks and order[-1] is not request:
                self._preempt(plan, order.pop())

    def _last_running(self, spared: Request | None = None) -> Request:
        return max((r for r in self._state.running if r is not spared), key=self._rank)

    def _rank(self, request: Request) -> tuple[Any, ...]:
        """The policy's order among those that have a place, and the last of them is preempted. One whose
        margin is the whole pool came back when nothing else ran, and goes before all who joined it
        since: so under any policy each is preempted at most log2(num_blocks) times, rounded up."""
        policy = self._state.policy
        takes_all = 1 << request.num_preemptions >= self._state.kv.pool.num_blocks
        group = request.group
        return not takes_all, policy.rank(policy.flow(request)), policy.key(request), group.arrival, request.index

    def _preempt(self, plan: PlanBuilder, victim: Request) -> None:
        plan.forget_row(victim.req_index)
        self._state.preempt(victim)

    # --- prefills ---------------------------------------------------------------------------------

    def _prefill_budget(self, num_decodes: int) -> int:
        """Tokens for prefills in a step. While requests decode it is less than the rest of the budget, since each of
        them waits for the whole step; but a quarter of the budget where there is room, or many would starve prompts."""
        budget = self._state.max_num_batched_tokens
        if not num_decodes:
            return budget
        capped = max(int(budget * self._state.settings.mixed_step_share), 1)
        return min(budget - num_decodes, max(capped - num_decodes, min(capped, budget // 4), 1))

    def _prefill_in_order(self, plan: PlanBuilder, budget: int) -> int:
        """Spends the budget in policy order, running before preempted before waiting; gives the rest."""
        state = self._state
        for request in sorted(state.prefilling, key=self._rank):
            if not budget:
                return 0
            budget -= self._prefill(plan, request, budget)
        for queue in (state.preempted, state.waiting):
            if budget and queue and not self._blocked:
                budget = self._prefill_queued(plan, queue.in_turn(), budget)
        return budget

    def _prefill_shortest(self, plan: PlanBuilder, budget: int) -> int:
        """Spends the budget on those with the least left to prefill. Those behind in the queue get in,
        but none passes a preempted request."""
        state = self._state
        queued: Iterable[Request] = ()
        if not self._blocked:
            queued = state.preempted or state.waiting.first(SHORT_PROMPT_WINDOW)
        for request in sorted([*state.prefilling, *queued], key=_num_left):
            if not budget:
                break
            if request.status is RequestStatus.RUNNING:
                budget -= self._prefill(plan, request, budget)
            elif not self._blocked:
                budget = self._prefill_queued(plan, [request], budget)
        return budget

    def _prefill_queued(self, plan: PlanBuilder, queued: Iterable[Request], budget: int) -> int:
        for request in queued:
            if not budget:
                break
            admission, hits = self._admission(request)
            if admission is Admission.BLOCKED:
                self._blocked = True
                break
            if admission is Admission.ADMITTED:
                self._admit(plan, request, hits)
                budget -= self._prefill(plan, request, budget)
        return budget

    def _prefill(self, plan: PlanBuilder, request: Request, budget: int) -> int:
        """Schedules up to `budget` more known tokens, as far as blocks are free; gives their number."""
        state = self._state
        num_left = _num_left(request)
        count = min(budget, num_left)
        plan.append_blocks(request, state.kv.allocate_slots(request, request.num_computed_tokens + count))
        count = min(count, len(request.blocks) * state.kv.block_size - request.num_computed_tokens)
        if count:
            plan.compute(request, count)
            request.num_computed_tokens += count
            if count == num_left:
                state.end_prefill(request)
        return count

    # --- admission --------------------------------------------------------------------------------

    def _admit(self, plan: PlanBuilder, request: Request, hits: list[KVCacheBlock]) -> None:
        self._state.admit(request, hits)
        plan.enter(request)

    def _admission(self, request: Request) -> tuple[Admission, list[KVCacheBlock]]:
        state = self._state
        if not state.rows.num_free:
            return Admission.BLOCKED, []
        # A preempted one comes back with all its tokens, those in flight included.
        if request.last_plan > state.last_returned:
            return Admission.BLOCKED, []
        if self._waits_for_sibling(request):
            return Admission.HELD, []
        hits = state.kv.get_computed_blocks(request)
        return (Admission.ADMITTED if self._fits(request, hits) else Admission.BLOCKED), hits

    def _waits_for_sibling(self, request: Request) -> bool:
        """Whether another choice is computing prompt blocks that this one could share."""
        kv = self._state.kv
        group = request.group
        shares = kv.enable_prefix_caching and group.read_prefix_cache and group.write_prefix_cache
        if len(group.choices) == 1 or not shares or request.wants_prompt_logprobs:
            return False
        num_shared = (request.num_prompt_tokens - 1) // kv.block_size
        return any(
            sibling.status is RequestStatus.RUNNING and sibling.names_blocks and sibling.num_hashed_blocks < num_shared
            for sibling in group.choices.values()
        )

    def _fits(self, request: Request, hits: list[KVCacheBlock]) -> bool:
        """Whether its known tokens and what running prefills still need have blocks, with a margin so
        that it is not preempted at once. The margin doubles with each preemption, which bounds their
        number. With nothing running it fits: what never could was refused."""
        state, kv = self._state, self._state.kv
        if not state.running:
            return True
        spare = kv.num_free_blocks - kv.num_blocks_needed(request, hits)
        spare -= sum(kv.blocks_for(len(r.token_ids)) - len(r.blocks) for r in state.prefilling)
        return spare >= (1 + len(state.running) // 4) << request.num_preemptions


def _num_left(request: Request) -> int:
    return len(request.token_ids) - request.num_computed_tokens
