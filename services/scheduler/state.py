"""Everything the scheduler knows of requests in motion, and the only ways a request changes state."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from quartet.services.scheduler.free_block_queue import KVCacheBlock
from quartet.services.scheduler.kv_cache_manager import KVCacheManager
from quartet.services.scheduler.metrics import SchedulerMetrics
from quartet.services.scheduler.plan import PlanInFlight
from quartet.services.scheduler.policies import Policy
from quartet.services.scheduler.policies.load import load_policy
from quartet.services.scheduler.queue import RequestQueue
from quartet.services.scheduler.request import Request, RequestStatus
from quartet.services.scheduler.rows import Rows
from quartet.shared.log import get_logger
from quartet.shared.messages import FinishReason, ModelInfo, RequestEvent

if TYPE_CHECKING:
    from quartet.services.scheduler.recorder import Recorder
    from quartet.services.scheduler.settings import SchedulerSettings
    from quartet.shared.tracing import Attributes, Tracer

# A request that has died so often without passing where it died before runs alone until it does.
MAX_DEATHS = 2

_log = get_logger()


class Totals:
    """Counters that only rise."""

    def __init__(self) -> None:
        self.preemptions = 0
        self.steps = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0


class SchedulerState:
    """A waiting or preempted request holds no blocks and no row; a running one holds both.

    Raises SettingsError when the settings name a policy that cannot be used.

    running      all with a row; `prefilling` are those of them with known tokens still to schedule
    died         unfinished requests that have not passed yet where they last died with an executor
    suspects     those of them that have died MAX_DEATHS times
    last_plan, last_returned   sequence numbers of plans, rising through all epochs
    recorder     notes what happens while somebody watches
    """

    def __init__(self, settings: SchedulerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.metrics = SchedulerMetrics(clock)
        self.tracer: Tracer | None = None
        self.policy = load_policy(settings.policy, settings.policy_options)
        self.policy_counts_tokens = type(self.policy).served is not Policy.served
        self.waiting = RequestQueue(self.policy)
        self.preempted = RequestQueue(self.policy)
        self.running: dict[Request, None] = {}
        self.prefilling: dict[Request, None] = {}
        self.died: dict[Request, None] = {}
        self.suspects: dict[Request, None] = {}
        self.in_flight: collections.deque[PlanInFlight] = collections.deque()
        self.last_plan = -1
        self.last_returned = -1
        self.epoch: int | None = None
        self.next_step_id = 0
        self.totals = Totals()
        self.model: ModelInfo | None = None
        self.max_num_seqs = settings.max_num_seqs
        self.max_num_batched_tokens = settings.max_num_batched_tokens
        self.kv = KVCacheManager(0, 1, settings.enable_prefix_caching)
        self.rows = Rows(0)
        self.recorder: Recorder | None = None

    def configure(self, model: ModelInfo) -> None:
        """Fits everything to an executor. Nothing may be running."""
        assert not self.running and not self.in_flight
        settings = self.settings
        self.model = model
        self.max_num_batched_tokens = min(
            settings.max_num_batched_tokens or model.max_num_batched_tokens, model.max_num_batched_tokens
        )
        # Each row that decodes is to get its token in every step.
        self.max_num_seqs = min(
            settings.max_num_seqs or model.max_num_seqs, model.max_num_seqs, self.max_num_batched_tokens
        )
        self.kv = KVCacheManager(model.num_blocks, model.block_size, settings.enable_prefix_caching)
        self.rows = Rows(self.max_num_seqs)
        if self.recorder is not None:
            self.recorder.start_over()

    @property
    def num_unfinished(self) -> int:
        return len(self.running) + len(self.preempted) + len(self.waiting)

    def enqueue(self, request: Request, *, came_back: bool) -> None:
        """`came_back`: it has been running already, here or at another scheduler, and goes first."""
        if self.recorder is not None:
            was_running = request.status is RequestStatus.RUNNING
            self.recorder.happened(request, RequestEvent.PREEMPTED if was_running else RequestEvent.QUEUED)
        self.metrics.queued(request)
        request.status = RequestStatus.PREEMPTED if came_back else RequestStatus.WAITING
        self.policy.waits(request)
        (self.preempted if came_back else self.waiting).add(request)

    def admit(self, request: Request, computed_blocks: list[KVCacheBlock]) -> None:
        """Gives a queued request a row and the blocks it hits."""
        self._dequeue(request)
        request.status = RequestStatus.RUNNING
        self.rows.enter(request)
        self.kv.take_computed_blocks(request, computed_blocks)
        self.running[request] = None
        self.prefilling[request] = None
        if self.recorder is not None:
            self.recorder.admitted(request)
        self.metrics.admitted(request, first=not request.was_scheduled)
        if self.tracer is not None:
            self._trace_queue(request, self.tracer)
        if not request.was_scheduled:
            request.was_scheduled = True
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self.totals.prompt_tokens += request.num_prompt_tokens
            self.totals.cached_tokens += request.num_cached_tokens
            self.policy.admitted(request)
            if request.num_past_tokens:
                num_recomputed_tokens = len(request.token_ids) - request.num_computed_tokens
                _log.debug("resumed", request_id=request.request_id, num_recomputed_tokens=num_recomputed_tokens)

    def end_prefill(self, request: Request) -> None:
        """All its known tokens are scheduled; what is sampled of them may be computed next."""
        del self.prefilling[request]
        if request.num_computed_tokens < request.last_position:
            self.set_next_edge(request)
            self.rows.start_decoding(request)

    def set_next_edge(self, request: Request) -> None:
        request.next_edge = min(len(request.blocks) * self.kv.block_size, request.last_position)

    def preempt(self, request: Request) -> None:
        """Takes its row and blocks; it will be computed again. Tokens in flight still count."""
        self.metrics.stopped(request)
        self._stop(request)
        request.num_preemptions += 1
        self.totals.preemptions += 1
        self.enqueue(request, came_back=True)

    def finish(self, request: Request, finish_reason: FinishReason, stop_reason: int | None) -> None:
        """Ends it for good; its ids are retained."""
        if self.recorder is not None and request.status < RequestStatus.FINISHED:
            self.recorder.happened(request, RequestEvent.FINISHED)
        if request.status < RequestStatus.FINISHED:
            self.metrics.finished(request)
        self._leave(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = finish_reason
        request.stop_reason = stop_reason

    def drop(self, request: Request) -> None:
        """Ends it without a trace."""
        if self.recorder is not None and request.status < RequestStatus.FINISHED:
            self.recorder.happened(request, RequestEvent.DROPPED)
        self._leave(request)
        request.status = RequestStatus.DROPPED

    def lose_executor(self) -> None:
        """Rows, plans in flight and what is in KV memory are gone; all that ran comes back first."""
        self.in_flight.clear()
        self.last_returned = self.last_plan
        self.epoch = None
        self.rows = Rows(self.max_num_seqs)
        self.kv.pool.reset()
        for request in self.running:
            self.metrics.stopped(request)
            self.kv.forget(request)
            request.req_index = -1
            self.enqueue(request, came_back=True)
        self.running.clear()
        self.prefilling.clear()
        if self.recorder is not None:
            self.recorder.lost_steps()
            self.recorder.start_over()

    def granted(self, epoch: int, block_ids: list[int], block_hashes: list[bytes]) -> None:
        """An executor takes plans from step 0 on, and has these blocks in KV memory."""
        self.epoch = epoch
        self.next_step_id = 0
        if self.settings.enable_prefix_caching:
            self.kv.pool.adopt(block_ids, block_hashes)
        if self.recorder is not None:
            self.recorder.start_over()

    def count_death(self, request: Request, position: int) -> None:
        """It was in a plan that died with its executor, which would have computed it up to `position`."""
        request.num_deaths += 1
        request.death_position = position
        self.died[request] = None
        if request.num_deaths >= MAX_DEATHS:
            self.suspects[request] = None

    def acquit(self, request: Request) -> None:
        """It has passed the place where it died: it was not to blame."""
        request.num_deaths = 0
        del self.died[request]
        self.suspects.pop(request, None)

    def _trace_queue(self, request: Request, tracer: Tracer) -> None:
        now = self.metrics.clock()
        attributes: Attributes = {
            "gen_ai.request.id": f"{request.request_id:016x}",
            "gen_ai.latency.time_in_queue": now - request.queued_at,
            "quartet.choice": request.index,
            "quartet.attempt": request.attempt,
            "quartet.num_cached_tokens": request.num_computed_tokens,
            "quartet.num_preemptions": request.num_preemptions,
        }
        tracer.record("queue", request.group.trace_context, request.queued_at, now, attributes)

    def _leave(self, request: Request) -> None:
        self.died.pop(request, None)
        self.suspects.pop(request, None)
        if request.status is RequestStatus.RUNNING:
            self._stop(request)
        elif request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            self._dequeue(request)

    def _stop(self, request: Request) -> None:
        del self.running[request]
        self.prefilling.pop(request, None)
        self.rows.leave(request)
        self.kv.free(request)

    def _dequeue(self, request: Request) -> None:
        (self.waiting if request.status is RequestStatus.WAITING else self.preempted).remove(request)
        self.policy.waits_no_more(request)
