"""What happens, noted for those who watch. There is none while nobody does."""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from quartet.services.scheduler.free_block_queue import KVCacheBlock
from quartet.services.scheduler.plan import PlanInFlight, pack_u16, pack_u32, unpack_u32
from quartet.services.scheduler.request import Request, RequestStatus
from quartet.shared.messages import (
    RequestEvent,
    RequestState,
    StepPlan,
    StepTimed,
    WatchedChunk,
    WatchedEvent,
    WatchedRequest,
    WatchedService,
    WatchedStep,
    WatchEvents,
)

if TYPE_CHECKING:
    from quartet.services.scheduler.state import SchedulerState

# Of one WatchEvents; blocks that are too many come with the next ones.
MAX_BLOCKS = 16384
MAX_STEPS = 1024
MAX_STEP_CHUNKS = 64
MAX_EVENTS = 4096
# Told at once: requests that wait only while there are fewer than MAX_QUEUED of all.
MAX_REQUESTS = 512
MAX_QUEUED = 256
# Nameless; the first of its prefix.
NO_HASH = bytes(8)
FIRST = b"\xff" * 8

_STATES = {
    RequestStatus.WAITING: RequestState.WAITING,
    RequestStatus.PREEMPTED: RequestState.PREEMPTED,
    RequestStatus.RUNNING: RequestState.RUNNING,
}


class _Told:
    """What has been told of a request: its numbers, and how much of which table."""

    __slots__ = ("blocks", "num_blocks", "numbers")

    def __init__(self) -> None:
        self.numbers: tuple[int, ...] = ()
        self.blocks: list[KVCacheBlock] | None = None
        self.num_blocks = 0


class Recorder:
    """Notes which blocks have changed and what has become of steps; requests are compared with what was told of
    them. `clock` is monotonic, in seconds; `wall` is what to add to it for the wall clock.

    `changed_blocks` is the pool's to fill.
    """

    def __init__(
        self,
        state: SchedulerState,
        incarnation: int,
        clock: Callable[[], float],
        wall: float,
        services: Callable[[], list[WatchedService]],
    ) -> None:
        self.changed_blocks: set[int] = set()
        self._state = state
        self._incarnation = incarnation
        self._clock = clock
        self._wall = wall
        self._services = services
        self._told_services: list[WatchedService] = []
        self._hits: dict[bytes, int] = {}
        self._open_steps: dict[int, WatchedStep] = {}
        self._timed: StepTimed | None = None
        self._returned: WatchedStep | None = None
        self._steps: list[WatchedStep] = []
        self._num_steps_dropped = 0
        self._events: list[WatchedEvent] = []
        self.start_over()

    def start_over(self) -> None:
        """The next events begin with a full account: of a pool that is another one now, or for one who is new."""
        self._seq = 0
        self._told: dict[Request, _Told] = {}
        self._told_services = []
        pool = self._state.kv.pool
        pool.changed = self.changed_blocks
        self.changed_blocks.clear()
        self.changed_blocks.update(
            block.block_id for block in pool.blocks if block.ref_cnt or block.block_hash is not None
        )
        self._dirty = True

    @property
    def has_news(self) -> bool:
        return self._dirty or bool(self.changed_blocks) or self._services() != self._told_services

    # --- what the scheduler says --------------------------------------------------------------------

    def happened(self, request: Request, what: RequestEvent) -> None:
        self._dirty = True
        if len(self._events) < MAX_EVENTS:
            self._events.append(WatchedEvent(self._now(), request.request_id, request.index, what))
        if what is RequestEvent.QUEUED and len(self._told) < MAX_QUEUED:
            # So it is told of, however soon it ends.
            self._told[request] = _Told()

    def admitted(self, request: Request) -> None:
        """It has its row, and the blocks that it hits."""
        self.happened(request, RequestEvent.ADMITTED)
        for block in request.blocks:
            if block.block_hash is not None:
                self._hits[block.block_hash] = self._hits.get(block.block_hash, 0) + 1

    def planned(self, plan: PlanInFlight, message: StepPlan, started: float) -> None:
        """`started`: by the clock, when this plan was begun."""
        self._dirty = True
        state, now = self._state, self._clock()
        counts = unpack_u32(message.prefill_counts)
        self._open_steps[plan.sequence] = WatchedStep(
            epoch=message.epoch,
            step_id=plan.step_id,
            scheduled_at=self._wall + now,
            returned_at=0.0,
            schedule_us=_microseconds(now - started),
            update_us=0,
            num_prefill_tokens=sum(counts),
            num_decode_tokens=len(plan.decodes),
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_preempted=len(state.preempted),
            chunks=[
                WatchedChunk(prefill.request.request_id, prefill.request.index, count)
                for prefill, count in zip(plan.prefills[:MAX_STEP_CHUNKS], counts, strict=False)
            ],
        )

    def timed(self, message: StepTimed) -> None:
        """Goes before the step's result."""
        self._timed = message

    def returned(self, plan: PlanInFlight) -> None:
        """Its result has come, and is being taken in."""
        self._dirty = True
        step = self._open_steps.pop(plan.sequence, None)
        timed, self._timed = self._timed, None
        if step is None:
            return
        step.returned_at = self._now()
        if timed is not None and (timed.epoch, timed.step_id) == (step.epoch, step.step_id):
            step.started_at, step.spans = timed.started_at, timed.spans
        self._returned = step
        for prefill in plan.prefills:
            if prefill.samples and prefill.request.status is RequestStatus.RUNNING:
                self.happened(prefill.request, RequestEvent.FIRST_TOKEN)

    def updated(self) -> None:
        """All that the result brought is taken in."""
        step, self._returned = self._returned, None
        if step is not None:
            step.update_us = _microseconds(self._now() - step.returned_at)
            self._add_step(step)

    def lost_steps(self) -> None:
        """The plans in flight come to nothing."""
        for step in self._open_steps.values():
            step.lost, step.returned_at = True, self._now()
            self._add_step(step)
        self._open_steps.clear()

    # --- what is told -------------------------------------------------------------------------------

    def take(self) -> WatchEvents:
        """All since the last time, or a full account."""
        state = self._state
        kv, totals = state.kv, state.totals
        blocks = self._take_blocks()
        requests = self._take_requests()
        steps, self._steps = self._steps, []
        num_steps_dropped, self._num_steps_dropped = self._num_steps_dropped, 0
        events, self._events = self._events, []
        self._told_services = self._services()
        seq, self._seq = self._seq, self._seq + 1
        self._dirty = False
        return WatchEvents(
            incarnation=self._incarnation,
            seq=seq,
            at=self._now(),
            num_blocks=kv.pool.num_blocks,
            block_size=kv.block_size,
            num_free_blocks=kv.num_free_blocks,
            num_cached_blocks=kv.pool.num_cached_blocks,
            max_num_batched_tokens=state.max_num_batched_tokens,
            max_num_seqs=state.max_num_seqs,
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_preempted=len(state.preempted),
            num_steps_total=totals.steps,
            num_preemptions_total=totals.preemptions,
            num_prompt_tokens_total=totals.prompt_tokens,
            num_cached_tokens_total=totals.cached_tokens,
            num_output_tokens_total=totals.output_tokens,
            block_ids=pack_u32([block.block_id for block in blocks]),
            block_refs=pack_u16([min(block.ref_cnt, 0xFFFF) for block in blocks]),
            block_hashes=b"".join(_short(block.block_hash) for block in blocks),
            block_parents=b"".join(_parent(block) for block in blocks),
            block_hits=pack_u32([self._hits.get(block.block_hash or b"", 0) for block in blocks]),
            steps=steps,
            num_steps_dropped=num_steps_dropped,
            requests=requests,
            num_requests_more=state.num_unfinished - len(self._told),
            request_events=events,
            services=self._told_services,
        )

    def _take_blocks(self) -> list[KVCacheBlock]:
        pool, changed = self._state.kv.pool, self.changed_blocks
        if len(changed) <= MAX_BLOCKS:
            block_ids = sorted(changed)
            changed.clear()
        else:
            block_ids = sorted(itertools.islice(changed, MAX_BLOCKS))
            changed.difference_update(block_ids)
        if len(self._hits) > 2 * pool.num_cached_blocks + 1024:
            self._hits = {h: n for h, n in self._hits.items() if pool.get_cached_block(h) is not None}
        return [pool.blocks[block_id] for block_id in block_ids]

    def _take_requests(self) -> list[WatchedRequest]:
        state, told = self._state, self._told
        for request in itertools.islice(state.running, MAX_REQUESTS):
            if request not in told and len(told) < MAX_REQUESTS:
                told[request] = _Told()
        # One that has been told stays so until its end, wherever in the queue it is.
        for request in itertools.islice(itertools.chain(state.preempted, state.waiting), 2 * MAX_QUEUED):
            if request not in told and len(told) < MAX_QUEUED:
                told[request] = _Told()
        changed: list[WatchedRequest] = []
        for request in list(told):
            message = _news(request, told[request], self._wall)
            if message is not None:
                changed.append(message)
                if request.status >= RequestStatus.FINISHED:
                    del told[request]
        return changed

    def _add_step(self, step: WatchedStep) -> None:
        if len(self._steps) == MAX_STEPS:
            del self._steps[0]
            self._num_steps_dropped += 1
        self._steps.append(step)
        self._dirty = True

    def _now(self) -> float:
        return self._wall + self._clock()


def _news(request: Request, told: _Told, wall: float) -> WatchedRequest | None:
    """What is to be told of a request, and is told now; None when nothing is."""
    status, blocks = request.status, request.blocks
    numbers = (
        status,
        request.num_computed_tokens,
        len(request.token_ids),
        request.num_cached_tokens,
        request.num_preemptions,
    )
    same_table = blocks is told.blocks
    num_told = told.num_blocks if same_table else 0
    if numbers == told.numbers and same_table and len(blocks) == num_told:
        return None
    told.numbers, told.blocks, told.num_blocks = numbers, blocks, len(blocks)
    group = request.group
    return WatchedRequest(
        request_id=request.request_id,
        index=request.index,
        state=_state(request),
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_output_tokens,
        num_preemptions=request.num_preemptions,
        table_start=num_told,
        table=_table(blocks[num_told:]),
        priority=group.priority,
        tenant=group.tenant,
        arrived_at=wall + group.arrived_at,
    )


def _state(request: Request) -> RequestState:
    # One that has finished may have been released since.
    if request.finish_reason is not None:
        return RequestState.FINISHED
    return _STATES.get(request.status, RequestState.DROPPED)


def _table(blocks: Iterable[KVCacheBlock]) -> bytes:
    return pack_u32(array.array("I", [block.block_id for block in blocks]))


def _short(block_hash: bytes | None) -> bytes:
    return NO_HASH if block_hash is None else block_hash[:8]


def _parent(block: KVCacheBlock) -> bytes:
    if block.block_hash is None or block.parent_hash is None:
        return NO_HASH
    return block.parent_hash[:8] or FIRST


def _microseconds(seconds: float) -> int:
    return max(0, round(1e6 * seconds))
