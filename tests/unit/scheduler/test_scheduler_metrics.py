"""What the scheduler counts, by a clock that the test moves: a second for each step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from support.metrics import collect, value

from quartet.services.scheduler.metrics import tell

MakeSim = Callable[..., Any]


def told(sim: Any) -> Any:
    return collect(functools.partial(tell, sim.core.state, lambda: 0))


def step(sim: Any, times: int = 1) -> None:
    for _ in range(times):
        sim.schedule()
        sim.now += 1.0
        sim.step()


def run(sim: Any) -> None:
    while sim.core.num_unfinished:
        step(sim)


def test_stages_and_tokens_of_requests(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_num_seqs": 1})
    first, second = sim.ask([5] * 6, max_tokens=4), sim.ask([6] * 3, max_tokens=1)
    run(sim)
    sim.check_finished(first)
    sim.check_finished(second)
    samples = told(sim)
    for stage, count in (("queue", 2), ("prefill", 2), ("decode", 2), ("inference", 2)):
        assert value(samples, f"request_{stage}_time_seconds_count") == count
    stages = {s: value(samples, f"request_{s}_time_seconds_sum") for s in ("queue", "prefill", "decode", "inference")}
    assert stages["inference"] == stages["prefill"] + stages["decode"]
    assert stages["decode"] == 3.0, "three further tokens of the first, a second each"
    assert stages["queue"] >= 4.0, "the second waited for all of the first"
    assert value(samples, "inter_token_latency_seconds_count") == 3
    assert value(samples, "inter_token_latency_seconds_sum") == 3.0
    assert value(samples, "generation_tokens_total") == 5
    assert value(samples, "prompt_tokens_total") == value(samples, "prefix_cache_queries_total") == 9
    assert value(samples, "recomputed_tokens_total") == 0
    assert value(samples, "request_prefill_kv_computed_tokens_sum") == 9
    assert value(samples, "iteration_tokens_total_sum") == 9 + 3
    assert value(samples, "iteration_tokens_total_count") <= value(samples, "steps_total")


def test_a_batch_counts_each_stream_in_each_step(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = [sim.ask([5 + i], max_tokens=6) for i in range(4)]
    run(sim)
    for one in asked:
        sim.check_finished(one)
    samples = told(sim)
    assert value(samples, "inter_token_latency_seconds_count") == 4 * 5
    assert value(samples, "inter_token_latency_seconds_sum") == pytest.approx(4 * 5 * 1.0)


def test_gauges_while_it_runs(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_num_seqs": 2})
    for _ in range(3):
        sim.ask([5] * 8, max_tokens=20)
    step(sim, 2)
    samples = told(sim)
    assert (value(samples, "num_requests_running"), value(samples, "num_requests_waiting")) == (2, 1)
    assert 0 < value(samples, "kv_cache_usage_perc") < 1
    free, blocks = value(samples, "num_kv_blocks_free"), value(samples, "num_kv_blocks")
    assert value(samples, "kv_cache_usage_perc") == pytest.approx(1 - free / blocks)
    run(sim)
    samples = told(sim)
    assert value(samples, "kv_cache_usage_perc") == value(samples, "num_requests_running") == 0
    assert value(samples, "prefix_cache_hits_total") > 0


def test_an_executors_death_is_a_long_gap_and_work_done_again(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = sim.ask([5] * 6, max_tokens=10)
    step(sim, 4)
    sim.executor_dies()
    sim.now += 100.0
    sim.executor_up()
    run(sim)
    sim.check_finished(asked)
    samples = told(sim)
    assert value(samples, "executor_losses_total") == 1 and value(samples, "executor_takeovers_total") == 2
    assert value(samples, "inter_token_latency_seconds_count") == 9
    assert value(samples, "inter_token_latency_seconds_sum") > 100.0
    # The prompt, and the outputs that had been fed back: the step in flight counts as computed too.
    assert 6 + 3 <= value(samples, "recomputed_tokens_total") <= 6 + 5
    assert value(samples, "generation_tokens_total") == 10


def test_a_new_scheduler_counts_what_it_computes_again_and_no_stages(make_sim: MakeSim) -> None:
    sim = make_sim(enable_prefix_caching=False)
    asked = sim.ask([5] * 6, max_tokens=10)
    step(sim, 4)
    known = len(asked.outputs[0])
    sim.scheduler_dies()
    run(sim)
    sim.check_finished(asked)
    samples = told(sim)
    assert value(samples, "recomputed_tokens_total") == 6 + known - 1
    assert value(samples, "request_decode_time_seconds_count") == 0
    assert value(samples, "generation_tokens_total") == 10 - known


def test_preemption_costs_what_it_computed(make_sim: MakeSim) -> None:
    sim = make_sim(model={"num_blocks": 8, "max_model_len": 32}, enable_prefix_caching=False)
    asked = [sim.ask([5 + i] * 4, max_tokens=16) for i in range(3)]
    run(sim)
    for one in asked:
        sim.check_finished(one)
    samples = told(sim)
    assert value(samples, "num_preemptions_total") > 0
    computed = sim.executor.num_computed_tokens
    needed = sum(4 + 16 - 1 for _ in asked)
    assert value(samples, "recomputed_tokens_total") == pytest.approx(computed - needed, abs=len(asked) * 2)
    assert value(samples, "inter_token_latency_seconds_count") == 3 * 15


def test_refusals_and_failures(make_sim: MakeSim) -> None:
    sim = make_sim()
    sim.ask([5] * 300)
    bad = sim.ask([6], max_tokens=9)
    step(sim, 2)
    (row,) = [r.req_index for r in sim.core.state.running if r.request_id == bad.message.request_id]
    sim.executor.fail_rows.add(row)
    run(sim)
    samples = told(sim)
    assert value(samples, "scheduler_requests_failed_total") == 2
    assert value(samples, "scheduler_requests_added_total") == 1


def test_the_queue_of_a_traced_request_is_a_span(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_num_seqs": 1})
    recorded: list[Any] = []

    class Tracer:
        def record(self, name: str, parent: str, since: float, until: float, attributes: Any) -> None:
            recorded.append((name, parent, since, until, attributes["gen_ai.request.id"]))

    sim.core.state.tracer = Tracer()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sim.ask([5], max_tokens=3)
    traced = sim.ask([6], max_tokens=2)
    group = sim.core.ledger.groups[traced.message.request_id]
    group.trace_context = parent
    run(sim)
    spans = [span for span in recorded if span[1]]
    assert len(spans) == 1 and spans[0][:2] == ("queue", parent) and spans[0][2] == 0.0 and spans[0][3] >= 3.0
    assert spans[0][4] == f"{traced.message.request_id:016x}"
