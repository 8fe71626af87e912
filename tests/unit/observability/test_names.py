"""Dashboard, alerts and documents name metrics that there are, and the document names all of them."""

import functools
import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.fake_executor import FakeRunner, model_info
from support.gateway_fakes import Bench

from quartet.services.executor import metrics as executor_metrics
from quartet.services.executor.loop import ExecutorLoop
from quartet.services.executor.step_times import StepTimes
from quartet.services.gateway import metrics as gateway_metrics
from quartet.services.scheduler import metrics as scheduler_metrics
from quartet.services.scheduler.core import SchedulerCore
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.services.tokenizer import metrics as tokenizer_metrics
from quartet.services.tokenizer.core import TokenizerCore
from quartet.shared.link import DialerLink, Identity, Status
from quartet.shared.messages import Role
from quartet.shared.metrics import Collector, exposition, service_source

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "docker" / "grafana" / "quartet.json"
ALERTS = ROOT / "docker" / "prometheus" / "alerts.yml"
DOC = ROOT / "docs" / "metrics.md"
# What prometheus_client tells of each process.
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds"}


def sources(folder):
    bench = Bench()
    bench.peer()
    bench.table.metrics.http_responses["GET", "/health", 200] = 1
    bench.table.metrics.grpc_calls["Generate", "OK"] = 1
    core = SchedulerCore(SchedulerSettings(run_dir=str(folder)), 1, lambda: 0.0)
    core.executor_up(model_info())
    identity = Identity(Role.SCHEDULER, "s", version="1")
    link = DialerLink(identity, None, lambda: Status(0, 0, True), None, lambda: 0.0)
    loop = ExecutorLoop(FakeRunner(model_info()), 1)
    times = StepTimes(lambda: {"products": 1.0})
    return {
        "every service": service_source(identity, lambda: [("tokenizer", link)]),
        "gateway": functools.partial(gateway_metrics.tell, bench.table),
        "tokenizer": functools.partial(tokenizer_metrics.tell, TokenizerCore(None, lambda: 0.0), 0),
        "scheduler": functools.partial(scheduler_metrics.tell, core.state, lambda: 0),
        "executor": functools.partial(executor_metrics.tell, loop, times, model_info()),
    }


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """By service: {name: family}, names as they are asked for, without a histogram's suffixes."""
    found = {}
    for service, source in sources(tmp_path_factory.mktemp("run")).items():
        text = exposition(Collector([source], lambda: "tiny"))[0].decode()
        told = [f for f in text_string_to_metric_families(text) if f.name.startswith("quartet:")]
        found[service] = {f.name + "_total" * (f.type == "counter"): f for f in told}
    return found


@pytest.fixture(scope="module")
def samples(families):
    return {s.name for told in families.values() for family in told.values() for s in family.samples}


def names_in(expression):
    found = set(re.findall(r"\bquartet:\w+", expression))
    return found | set(re.findall(r"\bprocess_\w+", expression))


def check_expression(expression, samples, families):
    assert names_in(expression), f"no metric in {expression}"
    unknown = names_in(expression) - samples - PROCESS
    assert not unknown, f"{unknown} in {expression}"
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")
    labels = {label for told in families.values() for f in told.values() for s in f.samples for label in s.labels}
    for group in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {label.strip() for label in group.split(",")} <= labels | {"job", "instance"}, expression
    for label in re.findall(r"[{,]\s*(\w+)\s*(?:=~|!=|=|!~)", expression):
        assert label in labels, f"{label} in {expression}"


def test_no_metric_is_told_by_two_services(families):
    told = [name for service, known in families.items() for name in known]
    assert len(told) == len(set(told))


def test_the_dashboards_expressions(families, samples):
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or panel["targets"], panel["title"]
        for target in panel.get("targets", []):
            check_expression(target["expr"].replace("$__rate_interval", "1m"), samples, families)
    for annotation in dashboard["annotations"]["list"]:
        check_expression(annotation["expr"], samples, families)
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == ["Traffic", "Latency", "KV memory and prefixes", "Steps", "Services and recovery"]


def test_the_alerts_expressions(families, samples):
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    operating = (ROOT / "docs" / "operating.md").read_text()
    for rule in group["rules"]:
        check_expression(rule["expr"], samples, families)
        assert f"`{rule['alert']}`" in operating, f"{rule['alert']} is not in docs/operating.md"


def test_the_document_names_every_metric_with_its_type(families):
    told = dict(re.findall(r"^\| `(quartet:\w+)` \| (\w+) \|", DOC.read_text(), re.M))
    assert told == {name: family.type for known in families.values() for name, family in known.items()}


def test_the_names_of_vllm_that_its_dashboards_ask_for(samples):
    wanted = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
        prefix_cache_hits_total num_preemptions_total prompt_tokens_total generation_tokens_total request_success_total
        time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket
        request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
        request_inference_time_seconds_sum iteration_tokens_total_bucket request_prompt_tokens_bucket
        request_generation_tokens_bucket request_params_n_bucket request_params_max_tokens_bucket
        request_time_per_output_token_seconds_bucket cache_config_info"""
    assert {f"quartet:{name}" for name in wanted.split()} <= samples
