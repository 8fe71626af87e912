"""Claims: what is summed in the scheduler, how static batches are formed, and what is held against the goals."""

import random

import pytest

from bench.claims import claims, loads
from bench.claims.loads import FULL, QUICK, STATIC_BATCH, asked, difference
from bench.claims.static_batches import Asked, serve
from bench.claims.watched_scheduler import Watch, watch
from bench.scheduler import new_core, new_request, plans, result_of
from quartet.services.cli.bench.record import Record
from quartet.services.scheduler.core import SchedulerCore
from quartet.services.scheduler.kv_cache_manager import KVCacheManager
from quartet.shared.messages import NewRequest


class Time:
    """A clock that moves when somebody sleeps or computes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.batches: list[tuple[float, list[list[int]], int]] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def generate(self, prompts: list[list[int]], output_tokens: int) -> None:
        """A second for each token of the longest answer."""
        self.batches.append((self.now - 100.0, prompts, output_tokens))
        self.now += output_tokens


def test_static_batches_take_what_waits_and_run_to_their_longest_answer() -> None:
    requests = [Asked(1.0, [1], 5), Asked(2.0, [2], 2), Asked(3.0, [3], 10), Asked(4.0, [4], 1), Asked(40.0, [5], 1)]
    time = Time()
    records, seconds, sizes = serve(requests, 2, time.generate, lambda: time.now, time.sleep)
    assert time.batches == [(1.0, [[1]], 5), (6.0, [[2], [3]], 10), (16.0, [[4]], 1), (40.0, [[5]], 1)]
    assert sizes == [1, 2, 1, 1] and seconds == 41.0
    # The short answer of the second batch is there when the long one is.
    assert [record.latency for record in records] == [5.0, 14.0, 13.0, 13.0, 1.0]
    assert [record.output_tokens for record in records] == [5, 2, 10, 1, 1], "what is computed on is no output"


@pytest.mark.parametrize("sizes", [FULL, QUICK])
def test_both_sides_are_asked_the_same(sizes) -> None:
    requests = asked(sizes, "s")
    assert requests == asked(sizes, "s") != asked(sizes, "t")
    assert len(requests) == sizes.batching_requests
    arrivals = [request.arrives for request in requests]
    assert arrivals == sorted(arrivals) and arrivals[-1] == pytest.approx(len(requests) / sizes.rate, rel=0.5)
    longest = max(len(request.prompt) + request.output_tokens for request in requests)
    assert longest <= 2048 // sizes.batching_scale and STATIC_BATCH == 16


def test_both_sides_count_from_when_a_request_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(started=11.0, times=[12.0], output_tokens=1, due=10.0, ended=12.0)
    found = {"duration": 2.0, "client": {"max_dispatch_lag_ms": 1000.0}, "blocks": {}}
    monkeypatch.setattr(loads, "load", lambda *_: ([record], found))
    ours = loads.continuous(None, QUICK, "s")
    assert ours["p95_e2el_ms"] == ours["median_e2el_ms"] == 2000.0 and ours["max_dispatch_lag_ms"] == 1000.0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watch:
    for owner, names in (
        (SchedulerCore, ["step_result"]),
        (KVCacheManager, ["allocate_slots", "take_computed_blocks"]),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    watcher = Watch()
    watch(watcher)
    return watcher


def run(core: SchedulerCore, requests: list[NewRequest]) -> None:
    for request in requests:
        core.new_request("tokenizer", request)
    while plans(core.schedule()) or core.state.in_flight:
        core.step_result(result_of(core))


def test_what_is_seen_of_one_request(watched: Watch) -> None:
    core = new_core(64, 256)
    run(core, [new_request(1, 40, 9)])
    # Prefill and 8 decodes, of which each is looked at when it returns, and its successor may have been planned.
    assert watched.steps == 9 and watched.running == 9 and watched.max_running == 1
    assert watched.new_blocks == 3 and watched.hit_blocks == 0
    assert watched.allocated == watched.tables == 9 * 3 * 16
    assert 9 * 40 < watched.tokens <= 9 * 48
    assert watched.reserved == {"max_model_len": 9 * 8192, "power_of_two": 9 * (40 + 16), "exact": 9 * 49}


def test_shared_blocks_are_counted_once_where_they_are_held_and_in_each_table(watched: Watch) -> None:
    core = new_core(256, 2048)
    random.seed(3)
    first = new_request(1, 160, 200)
    core.new_request("tokenizer", first)
    for _ in range(3):
        core.schedule()
        core.step_result(result_of(core))
    before = dict(vars(watched))
    others = [new_request(i, 8, 20) for i in (2, 3)]
    for other in others:
        other.prompt_token_ids[:0] = first.prompt_token_ids
    run(core, others)
    assert watched.hit_blocks == 2 * 10
    # Two more tables have the ten blocks; the pool holds them once.
    seen = {name: value for name, value in vars(watched).items() if name in ("tables", "allocated")}
    shared = (seen["tables"] - before["tables"]) - (seen["allocated"] - before["allocated"])
    assert shared > 0 and shared % 160 == 0
    assert 0 < claims.saved_at_once({"tables": seen["tables"], "allocated": seen["allocated"]}) < 67


def test_waste_is_what_the_tables_hold_beyond_tokens() -> None:
    blocks = {
        "tables": 1000,
        "tokens": 970,
        "allocated": 750,
        "steps": 10,
        "running": 20,
        "reserved": {"max_model_len": 9700, "power_of_two": 1940, "exact": 970},
    }
    (claim,), contiguous = claims.waste(blocks)
    assert claim.measured == 4.0 and claim.passed, "30 empty ones of 750 that are held"
    assert contiguous == {"max_model_len": 90.0, "power_of_two": 50.0, "exact": 0.0}
    (claim,), _ = claims.waste(blocks | {"tokens": 969})
    assert claim.measured > 4.0 and not claim.passed


def side(rate: float, p95: float, **fields: object) -> dict[str, object]:
    return {"completed": 9, "failed": 0, "output_throughput": rate, "p95_e2el_ms": p95, **fields}


def test_batching_is_held_against_the_best_size_of_static_batches() -> None:
    static = {"16": side(100, 50_000), "32": side(120, 60_000)}
    on_ours = side(240, 25_000)
    speed, latency = claims.batching(side(480, 20_000), static, on_ours)
    assert (speed.measured, speed.passed) == (4.0, True) and (latency.measured, latency.passed) == (60.0, True)
    assert "kernels 240: 2.00 x by scheduling" in speed.how and "kernels 25.0 s: 20.0 % by scheduling" in latency.how
    speed, latency = claims.batching(side(479, 20_500), static, on_ours)
    assert not speed.passed and not latency.passed
    with pytest.raises(ValueError):
        claims.batching(side(480, 1, failed=1), static, on_ours)
    with pytest.raises(ValueError):
        claims.batching(side(480, 1, completed=8), static, on_ours)


def test_sharing_counts_conversations_over_the_run_and_prompts_at_once() -> None:
    blocks = {"hit_blocks": 3, "new_blocks": 1, "tables": 100, "allocated": 60, "steps": 1, "running": 5}
    turns, prompt = claims.sharing(blocks, blocks)
    assert (turns.measured, turns.passed) == (75.0, True)
    assert (prompt.measured, prompt.passed) == (40.0, False)


def test_streams_must_all_finish() -> None:
    found = {"completed": 99, "output_throughput": 1.0, "median_ttft_ms": 1.0, "p99_ttft_ms": 1.0, "errors": {"x": 1}}
    found |= {"median_tpot_ms": 1.0, "p99_itl_ms": 1.0, "max_concurrent_requests": 50}
    (claim,) = claims.streams(found, 100, 50)
    assert not claim.passed and "{'x': 1}" in claim.how
    assert claims.streams(found | {"completed": 100}, 100, 50)[0].passed


def test_sums_are_of_the_time_between_two_looks() -> None:
    after = {"steps": 5, "max_running": 4, "reserved": {"exact": 9}}
    assert difference(after, {"steps": 2, "max_running": 3, "reserved": {"exact": 4}}) == {
        "steps": 3,
        "max_running": 4,
        "reserved": {"exact": 5},
    }
