"""OpenTelemetry spans, where an endpoint for them is set. Without one nothing of it is imported.

Every stage of a request is a span under the gateway's, whose traceparent travels with the request:
so a stage that is done again elsewhere after a service died belongs to the same trace.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quartet.shared.config import SettingsError
from quartet.shared.trace_context import is_sampled

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

Attributes = Mapping[str, str | bool | int | float]

# How long a process that ends may take to hand over its last spans.
CLOSE_TIMEOUT = 2.0

# OpenTelemetry's names for generative AI, and vLLM's where it has none.
REQUEST_ID = "gen_ai.request.id"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_N = "gen_ai.request.n"
RESPONSE_MODEL = "gen_ai.response.model"
USAGE_PROMPT_TOKENS = "gen_ai.usage.prompt_tokens"
USAGE_COMPLETION_TOKENS = "gen_ai.usage.completion_tokens"
LATENCY_E2E = "gen_ai.latency.e2e"
LATENCY_TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
LATENCY_TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
LATENCY_TIME_IN_MODEL_PREFILL = "gen_ai.latency.time_in_model_prefill"
LATENCY_TIME_IN_MODEL_DECODE = "gen_ai.latency.time_in_model_decode"


def traces_endpoint(setting: str, environ: Mapping[str, str] = os.environ) -> str:
    """The URL that spans are posted to; "" where they are not wanted. Of a bare http://host:port it is /v1/traces."""
    if not setting and (traces := environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")):
        return traces
    base = setting or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if not base:
        return ""
    url = urlsplit(base)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise SettingsError(f"otlp_endpoint must be an http:// or https:// URL, got {base!r}")
    if setting and url.path not in ("", "/"):
        return base
    return f"{base.rstrip('/')}/v1/traces"


def make_tracer(service: str, name: str, endpoint_setting: str) -> Tracer | None:
    """None where no endpoint is set. Raises SettingsError when it cannot be had."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    endpoint = traces_endpoint(endpoint_setting)
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(f"otlp_endpoint needs OpenTelemetry: pip install 'quartet[otel]' ({error})") from None
    provider = _provider(service, name)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracer(provider)


def tracer_to(exporter: SpanExporter, service: str = "test") -> Tracer:
    """Hands each span to `exporter` when it ends."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = _provider(service, service)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracer(provider)


def _provider(service: str, name: str) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES add to these, or win.
    known = {"service.namespace": "quartet", "service.instance.id": name or f"{socket.gethostname()}-{os.getpid()}"}
    attributes = known if "OTEL_SERVICE_NAME" in os.environ else known | {"service.name": f"quartet-{service}"}
    # Not at the interpreter's exit: `close` has a limit.
    return TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)


class Tracer:
    """Times are by time.monotonic, in seconds; parents are checked traceparents, "" for none."""

    def __init__(self, provider: TracerProvider, clock: Callable[[], float] = time.monotonic) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._provider = provider
        self._tracer = provider.get_tracer("quartet")
        self._clock = clock

    def start(self, name: str, parent: str, since: float, attributes: Attributes) -> Span:
        """A span that serves a client: of the trace of `parent`, or of one of its own."""
        kind = self._trace.SpanKind.SERVER
        return self._tracer.start_span(name, self._context(parent), kind, attributes, start_time=self._wall(since))

    def end(self, span: Span, until: float, attributes: Attributes, error: str = "") -> None:
        span.set_attributes(attributes)
        if error:
            span.set_status(self._trace.StatusCode.ERROR, error)
        span.end(self._wall(until))

    def traceparent(self, span: Span) -> str:
        """For those that work for it; "" where the trace is not sampled, so that they need do nothing."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        traceparent = carrier.get("traceparent", "")
        return traceparent if is_sampled(traceparent) else ""

    def record(self, name: str, parent: str, since: float, until: float, attributes: Attributes) -> None:
        """A stage that is over; nothing without a parent that is sampled."""
        if is_sampled(parent):
            span = self._tracer.start_span(
                name, self._context(parent), attributes=attributes, start_time=self._wall(since)
            )
            span.end(self._wall(until))

    def close(self) -> None:
        """Hands over what has ended, for at most CLOSE_TIMEOUT seconds."""
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        thread.join(CLOSE_TIMEOUT)

    def _context(self, parent: str) -> Context:
        return self._propagator.extract({"traceparent": parent} if parent else {})

    def _wall(self, at: float) -> int:
        return time.time_ns() - int((self._clock() - at) * 1e9)
