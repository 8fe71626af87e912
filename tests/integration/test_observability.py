"""Four real processes: their counters add up under mixed traffic and after kills, and a request's spans form one tree
over all of them, under the client's."""

import json
import re
import secrets
import threading
import urllib.request

import grpc
import pytest
from support.metrics import scrape, total, value
from support.otlp import OtlpCollector
from support.stack import eventually

STAGES = {
    ("llm_request", "quartet-gateway"),
    ("tokenize", "quartet-tokenizer"),
    ("queue", "quartet-scheduler"),
    ("prefill", "quartet-executor"),
    ("decode", "quartet-executor"),
}
OUTCOMES = ("finished", "aborted", "failed", "rejected")


def new_trace():
    """(traceparent, trace id, span id)"""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-01", trace_id, span_id


@pytest.fixture
def collector():
    with OtlpCollector() as running:
        yield running


def stages(spans):
    return {(span.name, span.service) for span in spans}


def check_tree(spans, parent_id):
    """One request under `parent_id`, and everything else under the request."""
    (request,) = [span for span in spans if span.name == "llm_request"]
    assert request.parent_id == parent_id
    for span in spans:
        assert span.start <= span.end
        if span is not request:
            assert span.parent_id == request.span_id, span
            assert request.start - 5_000_000 <= span.start and span.end <= request.end + 1_000_000_000, span
    return request


def test_counters_add_up_and_spans_form_a_tree_through_kills(small, tiny_model, collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    stack = small(
        model=tiny_model[0],
        tokenizer_tokenizer="byte",
        executor_max_model_len=4096,
        otlp_endpoint=collector.url,
        gateway_metrics_address="127.0.0.1:0",
        tokenizer_metrics_address="127.0.0.1:0",
        scheduler_metrics_address="127.0.0.1:0",
        executor_metrics_address="127.0.0.1:0",
    )
    client, stub = stack.client, stack.client.stub

    def metrics(service):
        eventually(lambda: re.findall(r"url=(\S+/metrics)", stack.log(service).read_text()), 30.0)
        return scrape(re.findall(r"url=(\S+/metrics)", stack.log(service).read_text())[-1])

    def restarted(service):
        return len(re.findall(r"url=(\S+/metrics)", stack.log(service).read_text())) == 2

    def generate(traceparent, **options):
        request = client.request("Once upon a time", temperature=0.0, ignore_eos=True, **options)
        return stub.Generate(request, timeout=120, metadata=(("traceparent", traceparent),))

    # Over gRPC, under the client's trace; a broken trace context is as good as none.
    over_grpc, over_http, broken = new_trace(), new_trace(), new_trace()
    assert len(list(generate(over_grpc[0], max_tokens=12))) > 2
    assert len(list(generate(broken[0] + "x", max_tokens=3))) > 2
    body = json.dumps({"prompt": "Hi", "max_tokens": 5, "n": 2, "ignore_eos": True}).encode()
    headers = {"content-type": "application/json", "traceparent": over_http[0]}
    call = urllib.request.Request(f"http://{stack.http_address}/v1/completions", body, headers)
    assert len(json.load(urllib.request.urlopen(call, timeout=60))["choices"]) == 2
    # One whose client leaves, and one that no line of this size can have.
    left = generate(new_trace()[0], max_tokens=4000)
    while next(left).WhichOneof("event") != "chunk":
        pass
    left.cancel()
    with pytest.raises(grpc.RpcError):
        list(generate(new_trace()[0], max_tokens=5000))

    for _, trace_id, span_id in (over_grpc, over_http):
        eventually(lambda trace_id=trace_id: stages(collector.of(trace_id)) >= STAGES, 30.0, "spans are missing")
        request = check_tree(collector.of(trace_id), span_id)
        assert request.attributes["quartet.attempts"] == 1
        assert request.attributes["gen_ai.usage.completion_tokens"] == (12 if trace_id == over_grpc[1] else 10)
    assert len([span for span in collector.of(over_http[1]) if span.name == "prefill"]) == 2, "one for each choice"
    assert not collector.of(broken[1])
    roots = [span for span in collector.all() if span.name == "llm_request" and not span.parent_id]
    assert len(roots) == 1 and stages(collector.of(roots[0].trace_id)) >= STAGES - {("decode", "quartet-executor")}

    # A stream through three deaths.
    through_deaths = new_trace()
    stream = generate(through_deaths[0], max_tokens=3000)
    for victim, span, gauge in (
        ("tokenizer", "tokenize", "tokenizer_added_total"),
        ("scheduler", "queue", "num_requests_running"),
        ("executor", "prefill", None),
    ):
        for _ in range(20):
            next(stream)
        # What a process has not sent dies with it.
        eventually(lambda span=span: seen(collector, through_deaths, span), 30.0)
        stack.restart(victim)
        if gauge is not None:
            # Chunks may be at hand from before; the next one dies when this one has the stream.
            eventually(lambda of=victim, gauge=gauge: restarted(of) and value(metrics(of), gauge) >= 1, 30.0)
    responses = list(stream)
    assert responses[-1].completion.usage.completion_tokens == 3000

    eventually(lambda: seen(collector, through_deaths, "llm_request"), 30.0)
    eventually(lambda: seen(collector, through_deaths, "decode"), 30.0)
    spans = collector.of(through_deaths[1])
    request = check_tree(spans, through_deaths[2])
    assert request.attributes["quartet.attempts"] == 2, "the tokenizer's death alone concerns the gateway"
    prefills = [span for span in spans if span.name == "prefill"]
    assert len(prefills) >= 2 and len([span for span in spans if span.name == "tokenize"]) == 2

    samples = metrics("gateway")
    ended = {outcome: value(samples, "requests_ended_total", outcome=outcome) for outcome in OUTCOMES}
    assert ended == {"finished": 4, "aborted": 1, "failed": 0, "rejected": 1}
    assert value(samples, "requests_received_total") == sum(ended.values()) == 6
    assert value(samples, "requests_in_progress") == 0
    assert value(samples, "request_success_total", finished_reason="length") == 5
    assert value(samples, "request_resubmits_total") == 1
    assert value(samples, "time_to_first_token_seconds_count") == 5
    assert value(samples, "link_incarnations_total", peer="tokenizer") == 2
    assert value(samples, "http_requests_total", method="POST", handler="/v1/completions", status="200") == 1
    assert value(samples, "grpc_requests_total", method="Generate", code="OK") == 3
    assert value(samples, "grpc_requests_total", method="Generate", code="INVALID_ARGUMENT") == 1
    assert value(samples, "grpc_requests_total", method="Generate", code="CANCELLED") == 1
    assert scrape(f"http://{stack.http_address}/metrics").keys() >= {("requests_received_total", ())}

    samples = metrics("scheduler")
    assert value(samples, "num_requests_running") == value(samples, "num_requests_waiting") == 0
    assert value(samples, "kv_cache_usage_perc") == 0
    assert value(samples, "executor_ready") == 1 and value(samples, "executor_losses_total") == 1
    assert value(samples, "executor_takeovers_total") == value(samples, "link_incarnations_total", peer="executor") == 2
    assert value(samples, "recomputed_tokens_total") >= 1
    decoded = value(samples, "inter_token_latency_seconds_count")
    assert decoded <= value(samples, "generation_tokens_total") < 3000
    samples = metrics("executor")
    phases = {labels: seconds for (name, labels), seconds in samples.items() if name == "executor_phase_seconds_total"}
    assert len(phases) == 5 and all(seconds >= 0 for seconds in phases.values())
    assert value(samples, "executor_tokens_total") >= value(samples, "executor_sampled_tokens_total") > 0
    samples = metrics("tokenizer")
    assert value(samples, "tokenizer_resubmits_total") >= 1
    assert total(samples, "link_peers") >= 4


def seen(collector, trace, name):
    return [span for span in collector.of(trace[1]) if span.name == name]


def test_scrapes_while_it_works(small, tiny_model):
    """A scrape reads what other threads change."""
    stack = small(model=tiny_model[0], tokenizer_tokenizer="byte", scheduler_metrics_address="127.0.0.1:0")
    urls = [f"http://{stack.http_address}/metrics"]
    eventually(lambda: re.findall(r"url=(\S+/metrics)", stack.log("scheduler").read_text()), 30.0)
    urls += re.findall(r"url=(\S+/metrics)", stack.log("scheduler").read_text())
    done, failures = threading.Event(), []

    def keep_scraping():
        while not done.is_set():
            try:
                for url in urls:
                    samples = scrape(url)
                    assert total(samples, "process_start_time_seconds") > 0
            except Exception as error:
                failures.append(error)
                return

    thread = threading.Thread(target=keep_scraping)
    thread.start()
    for _ in range(3):
        streams = [stack.client.stream("Hi", max_tokens=40, ignore_eos=True) for _ in range(8)]
        for stream in streams:
            list(stream)
    done.set()
    thread.join(30)
    assert not failures, failures
