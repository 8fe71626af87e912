"""What the gateway counts for Prometheus, and the span of each request.

Every stream that the table has ever been asked for is counted once as received, and once more when it
ends: finished, aborted (by its client), failed, or rejected. What is left is open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from quartet.shared.messages import ErrorCode, FinishReason
from quartet.shared.metrics import (
    ITL_BUCKETS,
    LATENCY_BUCKETS,
    N_BUCKETS,
    TOKENS_BUCKETS,
    TTFT_BUCKETS,
    Families,
    Histogram,
)
from quartet.shared.tracing import (
    LATENCY_E2E,
    LATENCY_TIME_TO_FIRST_TOKEN,
    REQUEST_ID,
    REQUEST_MAX_TOKENS,
    REQUEST_N,
    REQUEST_TEMPERATURE,
    REQUEST_TOP_P,
    RESPONSE_MODEL,
    USAGE_COMPLETION_TOKENS,
    USAGE_PROMPT_TOKENS,
    Tracer,
)

if TYPE_CHECKING:
    from quartet.services.gateway.events import StreamError
    from quartet.services.gateway.live.trace_log import TraceLog
    from quartet.services.gateway.stream import Stream
    from quartet.services.gateway.stream_table import StreamTable

OUTCOMES = ("finished", "aborted", "failed", "rejected")
# Of a stream without a token: the request could not be had.
_REJECTIONS = frozenset(
    {
        ErrorCode.INVALID_ARGUMENT,
        ErrorCode.FAILED_PRECONDITION,
        ErrorCode.RESOURCE_EXHAUSTED,
        ErrorCode.UNIMPLEMENTED,
    }
)
FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


class GatewayMetrics:
    """A few additions a request, none a token. `clock` gives seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.tracer: Tracer | None = None
        # There while somebody traces.
        self.trace_log: TraceLog | None = None
        self.model_name: Callable[[], str] = str
        self.received = 0
        self.ended: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.finish_reasons: Counter[str] = Counter(dict.fromkeys((*FINISH_REASONS.values(), "error"), 0))
        self.resubmits = 0
        self.gaps = 0
        self.attached = 0
        self.http_responses: Counter[tuple[str, str, int]] = Counter()
        self.grpc_calls: Counter[tuple[str, str]] = Counter()
        self.time_to_first_token = Histogram(TTFT_BUCKETS)
        self.time_per_output_token = Histogram(ITL_BUCKETS)
        self.e2e_latency = Histogram(LATENCY_BUCKETS)
        self.prompt_tokens = Histogram(TOKENS_BUCKETS)
        self.generation_tokens = Histogram(TOKENS_BUCKETS)
        self.params_n = Histogram(N_BUCKETS)
        self.params_max_tokens = Histogram(TOKENS_BUCKETS)

    # --- events of the table ----------------------------------------------------------------------

    def rejected(self, count: int) -> None:
        """So many were asked for, and not let in."""
        self.received += count
        self.ended["rejected"] += count

    def opened(self, stream: Stream, *, adopted: bool = False) -> None:
        """`adopted`: it was an earlier gateway's."""
        self.received += 1
        self.attached += adopted
        stream.opened_at = self._clock()
        if not adopted:
            self.params_n.observe(len(stream.choices))
            if stream.sampling.max_tokens is not None:
                self.params_max_tokens.observe(stream.sampling.max_tokens)
        if self.tracer is not None:
            self._start_span(stream, self.tracer, adopted)
        if self.trace_log is not None:
            self.trace_log.happened(stream, "accepted" if adopted else "opened")

    def accepted(self, stream: Stream) -> None:
        if self.trace_log is not None:
            self.trace_log.happened(stream, "accepted")

    def first_token(self, stream: Stream) -> None:
        if self.trace_log is not None:
            self.trace_log.happened(stream, "first_token")
        # What came before it was adopted is not known.
        if not stream.adopted:
            stream.first_token_at = self._clock()
            self.time_to_first_token.observe(stream.first_token_at - stream.opened_at)

    def finished(self, stream: Stream) -> None:
        reasons = [choice.finish_reason for choice in stream.choices.values()]
        aborted = FinishReason.ABORT in reasons
        self.ended["aborted" if aborted else "finished"] += 1
        self._count(reasons)
        now = self._clock()
        num_output_tokens = sum(choice.num_output_tokens for choice in stream.choices.values())
        if not aborted and not stream.adopted:
            self.e2e_latency.observe(now - stream.opened_at)
            self.prompt_tokens.observe(len(stream.prompt_token_ids or ()))
            self.generation_tokens.observe(num_output_tokens)
            steps = max((choice.num_output_tokens for choice in stream.choices.values()), default=0) - 1
            if stream.first_token_at is not None and steps > 0:
                self.time_per_output_token.observe((now - stream.first_token_at) / steps)
        self._end_span(stream, "")
        if self.trace_log is not None:
            self.trace_log.happened(stream, "finished")

    def failed(self, stream: Stream, error: StreamError) -> None:
        if error.code == ErrorCode.CANCELLED:
            outcome, reason = "aborted", "abort"
        else:
            begun = stream.num_cached_tokens is not None or stream.adopted
            outcome, reason = "rejected" if not begun and error.code in _REJECTIONS else "failed", "error"
        self.ended[outcome] += 1
        if outcome != "rejected":
            self.finish_reasons[reason] += stream.unfinished
            # Those that had finished before have ended as well.
            self._count(choice.finish_reason for choice in stream.choices.values())
        self._end_span(stream, "" if outcome == "aborted" else f"{error.code.name}: {error.message}")
        if self.trace_log is not None:
            self.trace_log.happened(stream, "failed")

    def _count(self, reasons: Iterable[FinishReason | None]) -> None:
        for reason in reasons:
            if reason is not None:
                self.finish_reasons[FINISH_REASONS[reason]] += 1

    # --- spans ------------------------------------------------------------------------------------

    def _start_span(self, stream: Stream, tracer: Tracer, adopted: bool) -> None:
        sampling = stream.sampling
        attributes: dict[str, str | bool | int | float] = {
            REQUEST_ID: f"{stream.request_id:016x}",
            REQUEST_N: len(stream.choices),
            REQUEST_TEMPERATURE: sampling.temperature,
            REQUEST_TOP_P: sampling.top_p,
            "quartet.attached": adopted,
        }
        if sampling.max_tokens is not None:
            attributes[REQUEST_MAX_TOKENS] = sampling.max_tokens
        stream.span = tracer.start("llm_request", stream.trace_context, stream.opened_at, attributes)
        stream.trace_context = tracer.traceparent(stream.span)

    def _end_span(self, stream: Stream, error: str) -> None:
        if self.tracer is None or stream.span is None:
            return
        now = self._clock()
        attributes: dict[str, str | bool | int | float] = {
            USAGE_PROMPT_TOKENS: len(stream.prompt_token_ids or ()),
            USAGE_COMPLETION_TOKENS: sum(choice.num_output_tokens for choice in stream.choices.values()),
            LATENCY_E2E: now - stream.opened_at,
            "quartet.attempts": stream.num_submits,
        }
        if model := self.model_name():
            attributes[RESPONSE_MODEL] = model
        if stream.first_token_at is not None:
            attributes[LATENCY_TIME_TO_FIRST_TOKEN] = stream.first_token_at - stream.opened_at
        self.tracer.end(stream.span, now, attributes, error)
        stream.span = None


def tell(table: StreamTable, families: Families) -> None:
    metrics = table.metrics
    for name, about, value in (
        ("requests_in_progress", "Requests that are open.", table.num_open_streams),
        ("streams_attached", "Those of them, and searches, that a client waits for.", table.num_attached_streams),
        ("streams_retained", "Finished ones kept for clients that attach again.", table.num_retained_streams),
        ("gateway_ready", "Whether requests can be answered now.", int(table.ready)),
        ("gateway_draining", "Whether the gateway is shutting down.", int(table.draining)),
        ("max_concurrent_requests", "The most requests that may be open.", table.limits.max_concurrent_requests),
    ):
        families.gauge(name, about, value)
    families.counter("requests_received", "Requests asked of the gateway's ledger.", metrics.received)
    for outcome in OUTCOMES:
        about = "Requests that have ended; all outcomes and requests_in_progress make up requests_received."
        families.counter("requests_ended", about, metrics.ended[outcome], outcome=outcome)
    for reason, count in list(metrics.finish_reasons.items()):
        families.counter("request_success", "Choices that have ended.", count, finished_reason=reason)
    for name, about, value in (
        (
            "request_resubmits",
            "Requests sent again after a loss.",
            metrics.resubmits,
        ),
        ("stream_gaps", "Gaps found in streams, each of which was filled by a resubmit.", metrics.gaps),
        ("requests_attached", "Requests taken over from an earlier gateway.", metrics.attached),
    ):
        families.counter(name, about, value)
    for (method, handler, status), count in list(metrics.http_responses.items()):
        labels = {"method": method, "handler": handler, "status": str(status)}
        families.counter("http_requests", "Responses over HTTP.", count, **labels)
    for (method, code), count in list(metrics.grpc_calls.items()):
        families.counter("grpc_requests", "Calls over gRPC that have ended.", count, method=method, code=code)
    for name, about, histogram in (
        ("time_to_first_token_seconds", "From arrival to the first token.", metrics.time_to_first_token),
        (
            "request_time_per_output_token_seconds",
            "Mean time of a token after the first.",
            metrics.time_per_output_token,
        ),
        ("e2e_request_latency_seconds", "From arrival to the last token.", metrics.e2e_latency),
        ("request_prompt_tokens", "Prompt tokens of finished requests.", metrics.prompt_tokens),
        ("request_generation_tokens", "Output tokens of finished requests.", metrics.generation_tokens),
        ("request_params_n", "Parameter n.", metrics.params_n),
        ("request_params_max_tokens", "Parameter max_tokens, where given.", metrics.params_max_tokens),
    ):
        families.histogram(name, about, histogram)
