"""A collector that keeps the spans it is sent over OTLP/HTTP."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    start: int
    end: int

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"


class OtlpCollector:
    """`with OtlpCollector() as collector:` collects at collector.url."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces", self.path
                collector._spans += _spans(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> OtlpCollector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, trace_id: str) -> list[Span]:
        return [span for span in list(self._spans) if span.trace_id == trace_id]

    def all(self) -> list[Span]:
        return list(self._spans)


def _spans(request: ExportTraceServiceRequest) -> list[Span]:
    found = []
    for resource in request.resource_spans:
        names = {a.key: a.value.string_value for a in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                times = (span.start_time_unix_nano, span.end_time_unix_nano)
                found.append(Span(names["service.name"], span.name, *ids, attributes, *times))
    return found
