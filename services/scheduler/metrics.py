"""What the scheduler counts for Prometheus beside its `Totals`, and how it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quartet.shared.metrics import (
    ITERATION_BUCKETS,
    ITL_BUCKETS,
    LATENCY_BUCKETS,
    TOKENS_BUCKETS,
    Families,
    Histogram,
)

if TYPE_CHECKING:
    from quartet.services.scheduler.plan import PlanInFlight, Prefill
    from quartet.services.scheduler.request import Request
    from quartet.services.scheduler.state import SchedulerState


class SchedulerMetrics:
    """A few calls a step and a few a request, none a token. `clock` gives seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.iteration_tokens = Histogram(ITERATION_BUCKETS)
        self.inter_token_latency = Histogram(ITL_BUCKETS)
        self.queue_time = Histogram(LATENCY_BUCKETS)
        self.prefill_time = Histogram(LATENCY_BUCKETS)
        self.decode_time = Histogram(LATENCY_BUCKETS)
        self.inference_time = Histogram(LATENCY_BUCKETS)
        self.prefill_kv_computed = Histogram(TOKENS_BUCKETS)
        self.recomputed_tokens = 0
        self.takeovers = 0
        self.executor_losses = 0
        self.steps_failed = 0
        self.requests_added = 0
        self.requests_added_again = 0
        self.requests_failed = 0
        self._returned_at = 0.0

    # --- events -----------------------------------------------------------------------------------

    def queued(self, request: Request) -> None:
        request.queued_at = self.clock()

    def admitted(self, request: Request, *, first: bool) -> None:
        """It has a row, and the blocks it hits."""
        if first:
            request.admitted_at = self.clock()
            if request.num_past_tokens:
                # At a scheduler before. Its last token was sampled, and never computed.
                request.num_computed_before = len(request.token_ids) - 1
            else:
                self.prefill_kv_computed.observe(len(request.token_ids) - request.num_computed_tokens)
        self.recomputed_tokens += max(0, request.num_computed_before - request.num_computed_tokens)
        request.num_computed_before = 0

    def returned(self, plan: PlanInFlight, num_output_tokens: int) -> None:
        """A step's result: each row that decodes has got its token of the step before in that step's time."""
        before, self._returned_at = self._returned_at, self.clock()
        num_prefilled = 0
        for prefill in plan.prefills:
            if prefill.samples:
                num_prefilled += self._prefilled(prefill)
        num_decoded = num_output_tokens - num_prefilled
        if num_decoded > 0:
            self.inter_token_latency.observe(self._returned_at - before, num_decoded)

    def _prefilled(self, prefill: Prefill) -> bool:
        """Whether its chunk brought a token."""
        request, now = prefill.request, self._returned_at
        if request.num_output_tokens <= request.num_past_tokens or request.scoring is not None:
            return False
        if request.first_token_at is None:
            request.first_token_at = now
        elif request.stopped_at is not None:
            self.inter_token_latency.observe(now - request.stopped_at)
        request.stopped_at = None
        return True

    def stopped(self, request: Request) -> None:
        """It is about to be preempted, or was lost with the executor: its next token takes longer."""
        request.stopped_at = self._returned_at
        request.num_computed_before = request.num_computed_tokens

    def finished(self, request: Request) -> None:
        """Its stages, where all of them were seen here."""
        if request.admitted_at is not None and not request.num_past_tokens:
            now, admitted_at = self.clock(), request.admitted_at
            first_token_at = now if request.first_token_at is None else request.first_token_at
            self.queue_time.observe(max(0.0, admitted_at - request.group.arrived_at))
            self.prefill_time.observe(first_token_at - admitted_at)
            self.decode_time.observe(now - first_token_at)
            self.inference_time.observe(now - admitted_at)


def tell(state: SchedulerState, num_retained: Callable[[], int], families: Families) -> None:
    """All that the scheduler has to tell."""
    _tell_gauges(state, num_retained(), families)
    totals, metrics = state.totals, state.metrics
    for name, about, value in (
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.prompt_tokens),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.cached_tokens),
        ("num_preemptions", "Running requests that lost their place to others.", totals.preemptions),
        ("prompt_tokens", "Prompt tokens of requests that have begun to run.", totals.prompt_tokens),
        ("prompt_tokens_cached", "Those of them found in the prefix cache.", totals.cached_tokens),
        ("generation_tokens", "Output tokens.", totals.output_tokens),
        ("steps", "Step plans sent to the executor.", totals.steps),
        ("recomputed_tokens", "Tokens computed again after preemption or a death.", metrics.recomputed_tokens),
        ("executor_takeovers", "Epochs that executors have granted.", metrics.takeovers),
        ("executor_losses", "Executors lost while they took plans.", metrics.executor_losses),
        ("steps_failed", "Steps that failed or were refused.", metrics.steps_failed),
        ("scheduler_requests_added", "Requests taken in.", metrics.requests_added),
        ("scheduler_requests_added_again", "Requests told again by a tokenizer.", metrics.requests_added_again),
        ("scheduler_requests_failed", "Requests refused or failed here.", metrics.requests_failed),
    ):
        families.counter(name, about, value)
    for name, about, histogram in (
        ("iteration_tokens_total", "Tokens of a step.", metrics.iteration_tokens),
        ("inter_token_latency_seconds", "Time between tokens of a choice.", metrics.inter_token_latency),
        ("request_queue_time_seconds", "From arrival to the first step.", metrics.queue_time),
        ("request_prefill_time_seconds", "From the first step to the first token.", metrics.prefill_time),
        ("request_decode_time_seconds", "From the first token to the last.", metrics.decode_time),
        ("request_inference_time_seconds", "From the first step to the last token.", metrics.inference_time),
        (
            "request_prefill_kv_computed_tokens",
            "Prompt tokens computed, without those cached.",
            metrics.prefill_kv_computed,
        ),
    ):
        families.histogram(name, about, histogram)


def _tell_gauges(state: SchedulerState, num_retained: int, families: Families) -> None:
    pool, model = state.kv.pool, state.model
    num_waiting, num_preempted = len(state.waiting), len(state.preempted)
    num_blocks, num_free = pool.num_blocks, state.kv.num_free_blocks
    usage = 1 - num_free / num_blocks if num_blocks else 0.0
    for name, about, value in (
        ("num_requests_running", "Choices with a row in the batch.", len(state.running)),
        (
            "num_requests_waiting",
            "Choices that wait for a place, preempted ones included.",
            num_waiting + num_preempted,
        ),
        ("num_requests_preempted", "Those of them that have run before.", num_preempted),
        ("num_requests_retained", "Finished choices held until their tokenizer releases them.", num_retained),
        ("kv_cache_usage_perc", "Share of KV blocks that running requests hold: 1 is all.", usage),
        ("num_kv_blocks", "KV blocks.", num_blocks),
        ("num_kv_blocks_free", "KV blocks that nobody holds, cached ones included.", num_free),
        ("num_kv_blocks_cached", "KV blocks that hold a known prefix.", pool.num_cached_blocks),
        ("num_plans_in_flight", "Plans whose result is due.", len(state.in_flight)),
        ("executor_ready", "Whether an executor takes plans.", int(state.epoch is not None)),
        ("max_num_seqs", "Most choices in a step.", state.max_num_seqs),
        ("max_num_batched_tokens", "Token budget of a step.", state.max_num_batched_tokens),
    ):
        families.gauge(name, about, value)
    if model is not None:
        families.gauge(
            "cache_config_info",
            "1; labels tell the KV cache.",
            1,
            block_size=str(model.block_size),
            num_gpu_blocks=str(model.num_blocks),
            enable_prefix_caching=str(state.settings.enable_prefix_caching),
            cache_dtype=model.dtype,
            device=model.device,
            max_model_len=str(model.max_model_len),
        )
