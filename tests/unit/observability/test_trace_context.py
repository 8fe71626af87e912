"""A client's trace context is followed, or ignored where it is none; a span's parent is the request's."""

import pytest

from quartet.shared.config import SettingsError
from quartet.shared.trace_context import checked, is_sampled
from quartet.shared.tracing import make_tracer, tracer_to, traces_endpoint

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("given", [GOOD, GOOD.encode(), "01" + GOOD[2:], "01" + GOOD[2:] + "-more"])
def test_what_can_be_followed(given):
    assert checked(given) == GOOD


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        b"",
        "x",
        GOOD[:-1],
        GOOD.upper(),
        GOOD + "-more",
        "01" + GOOD[2:] + "more",
        "ff" + GOOD[2:],
        "00-" + "0" * 32 + GOOD[35:],
        GOOD[:36] + "0" * 16 + "-01",
        GOOD.replace("b7ad", "b7aé"),
        GOOD.replace("-", "_"),
        GOOD + "\n",
        "0" * 100_000,
        b"\xff" * 55,
    ],
)
def test_what_is_none(given):
    assert checked(given) == ""


def test_sampling_is_the_last_bit():
    assert is_sampled(GOOD) and is_sampled(GOOD[:-2] + "03")
    assert not is_sampled(GOOD[:-2] + "02") and not is_sampled("")


@pytest.mark.parametrize(
    ("setting", "environ", "url"),
    [
        ("", {}, ""),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/own/path", {}, "http://c:4318/own/path"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e:4318/base"}, "http://e:4318/base/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://e:1/x"}, "http://e:1/x"),
        ("http://c:1", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://e:1/x"}, "http://c:1/v1/traces"),
    ],
)
def test_where_spans_go(setting, environ, url):
    assert traces_endpoint(setting, environ) == url


def test_an_endpoint_that_is_none():
    with pytest.raises(SettingsError, match=r"otlp_endpoint must be an http:// or https:// URL, got 'collector:4318'"):
        traces_endpoint("collector:4318", {})


def test_without_an_endpoint_there_is_no_tracer(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert make_tracer("gateway", "", "") is None


def test_a_stage_has_the_request_as_its_parent_and_the_clients_trace():
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = tracer_to(exporter)
    request = tracer.start("llm_request", GOOD, 1.0, {"gen_ai.request.n": 1})
    inside = tracer.traceparent(request)
    assert inside.split("-")[1] == GOOD.split("-")[1] and checked(inside) == inside
    tracer.record("queue", inside, 2.0, 2.5, {"a": 1})
    tracer.end(request, 4.0, {}, error="INTERNAL: broken")
    queue, whole = exporter.get_finished_spans()
    assert (queue.name, whole.name) == ("queue", "llm_request")
    assert queue.parent.span_id == whole.context.span_id and whole.parent.span_id == int(GOOD.split("-")[2], 16)
    assert {span.context.trace_id for span in (queue, whole)} == {int(GOOD.split("-")[1], 16)}
    assert queue.end_time - queue.start_time == pytest.approx(0.5e9, rel=1e-3)
    assert not whole.status.is_ok and whole.resource.attributes["service.name"] == "quartet-test"


@pytest.mark.parametrize("parent", ["", GOOD[:-2] + "00"])
def test_nothing_is_recorded_without_a_sampled_parent(parent):
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = tracer_to(exporter)
    tracer.record("queue", parent, 1.0, 2.0, {})
    assert exporter.get_finished_spans() == ()
    if parent:
        request = tracer.start("llm_request", parent, 1.0, {})
        assert tracer.traceparent(request) == ""
