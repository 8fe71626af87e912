"""From a scheduler's events to what viewers are told, and whom the gateway asks for them."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from support.fake_executor import FakeExecutor, model_info
from support.gateway_fakes import Bench, delta
from support.live_view import LiveView

from quartet.services.gateway.events import StreamError
from quartet.services.gateway.live import account as account_module
from quartet.services.gateway.live import viewer as viewer_module
from quartet.services.gateway.live.latency import Histogram
from quartet.services.scheduler.core import EXECUTOR, SchedulerCore
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.shared.messages import (
    Abort,
    ChoicePast,
    NewRequest,
    ResetPrefixCache,
    Role,
    StepPlan,
    Takeover,
    Watch,
    WatchedService,
    WatchEnded,
    WatchEvents,
    decode,
    encode,
)
from quartet.shared.sampling_params import SamplingParams


class Line:
    """A scheduler's core with a fake executor behind a fake tokenizer of a table."""

    def __init__(self, num_blocks: int = 40, seed: int = 0) -> None:
        self.bench = Bench()
        self.peer = self.bench.peer()
        self.random = random.Random(seed)
        self.now = 0.0
        self.incarnation = 0
        self.num_blocks = num_blocks
        self.executor = FakeExecutor(model_info(num_blocks=num_blocks, max_model_len=64))
        self.start_scheduler()

    def start_scheduler(self) -> None:
        self.incarnation += 1
        services = [
            WatchedService(Role.SCHEDULER, "s", self.incarnation, "1", True, False, False),
            WatchedService(Role.EXECUTOR, "e", 7, "1", True, False, False),
        ]
        self.core = SchedulerCore(
            SchedulerSettings(), self.incarnation, lambda: self.now, lambda: 1000.0 + self.now, lambda: services
        )
        self.core.owner_up("t")
        self.carry(self.core.executor_up(self.executor.model))

    @property
    def watch(self) -> Watch | None:
        return next((m for m in reversed(self.peer.sent) if isinstance(m, Watch)), None)

    def told(self) -> None:
        """The tokenizer passes on what the gateway has said of watching."""
        self.carry(self.core.watch("t", self.watch))

    def carry(self, effects: list[Any]) -> None:
        for to, message in effects:
            if isinstance(message, WatchEvents):
                self.bench.table.on_message(self.peer, decode(encode(message)))
            elif isinstance(message, Takeover):
                self.carry(self.core.granted(self.executor.take_over()))
            elif isinstance(message, StepPlan):
                assert to is EXECUTOR
                self.executor.receive(message)

    def ask(self, prompt: list[int], max_tokens: int = 4) -> NewRequest:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        message = NewRequest(self.random.getrandbits(64), 1, prompt, sampling, [], [ChoicePast(0)], tenant="acme")
        self.carry(self.core.new_request("t", message))
        return message

    def step(self) -> None:
        self.now += 0.03
        self.carry(self.core.schedule())
        if self.executor.queue:
            result = self.executor.step()
            self.executor.delivered()
            self.carry(self.core.step_result(result))

    def settle(self) -> None:
        """All that is new has been told."""
        while self.core.next_deadline() is not None:
            self.now += 0.03
            self.carry(self.core.tick())

    def run(self) -> None:
        while self.core.num_unfinished:
            self.step()
        self.settle()


def look(line: Line, interval_ms: int = 100, trace: bool = False) -> tuple[Any, LiveView]:
    viewer, view = line.bench.table.live.open(interval_ms, trace), LiveView()
    line.told()
    return viewer, view


def drain(viewer: Any, view: LiveView) -> None:
    while (event := viewer.take()) is not None:
        view.take(event)


def check(view: LiveView, core: SchedulerCore) -> None:
    pool = core.state.kv.pool
    expected = {b.block_id: b for b in pool.blocks if b.ref_cnt or b.block_hash is not None}
    assert set(view.blocks) == set(expected)
    by_hash = {b.block_hash: b.block_id for b in expected.values() if b.block_hash is not None}
    for block_id, block in expected.items():
        parent = -1
        if block.block_hash is not None and block.parent_hash is not None:
            parent = 0 if block.parent_hash == b"" else by_hash.get(block.parent_hash, -1)
        name = "" if block.block_hash is None else block.block_hash[:4].hex()
        assert view.blocks[block_id][:3] == (block.ref_cnt, name, parent), block_id
    state = core.state
    assert view.state["pool"]["num_free"] == pool.num_free_blocks
    assert view.state["queue"]["num_running"] == len(state.running)
    for request in [*state.running, *state.preempted, *state.waiting]:
        key = f"{request.request_id:016x}/{request.index}"
        entry = view.requests[key]
        assert entry["state"] == request.status.name.lower()
        assert entry["num_computed_tokens"] == request.num_computed_tokens
        assert entry["num_output_tokens"] == request.num_output_tokens
        assert view.tables[key] == [block.block_id for block in request.blocks]
    assert len(view.requests) == state.num_unfinished


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("most_blocks", [8192, 3])
def test_viewers_know_what_is_so_whenever_they_look(
    monkeypatch: pytest.MonkeyPatch, seed: int, most_blocks: int
) -> None:
    monkeypatch.setattr(viewer_module, "MAX_BLOCKS", most_blocks)
    line = Line(num_blocks=[16, 60][seed % 2], seed=seed)
    r = line.random
    viewers = [look(line)]
    asked: list[NewRequest] = []
    for _ in range(120):
        kind = r.random()
        if kind < 0.25 and line.core.num_unfinished < 12:
            prompt = [10 + r.randrange(2)] * r.randint(1, 20) + [r.randrange(3, 1000) for _ in range(r.randrange(5))]
            asked.append(line.ask(prompt, r.randint(1, 9)))
        elif kind < 0.28 and asked:
            line.carry(line.core.abort(Abort(r.choice(asked).request_id, 1)))
        elif kind < 0.3:
            line.carry(line.core.reset_prefix_cache("t", ResetPrefixCache(1)))
        elif kind < 0.31:
            line.start_scheduler()
            line.told()
        elif kind < 0.34 and len(viewers) < 4:
            viewer, view = look(line)
            viewers.append((viewer, view))
        else:
            line.step()
        if r.random() < 0.3:
            line.settle()
            viewer, view = r.choice(viewers)
            drain(viewer, view)
            check(view, line.core)
    line.run()
    for viewer, view in viewers:
        drain(viewer, view)
        check(view, line.core)
        assert all(block[0] == 0 for block in view.blocks.values())


def test_hits_and_the_tree_that_they_are_of() -> None:
    line = Line()
    viewer, view = look(line)
    for _ in range(3):
        line.ask([5] * 13, max_tokens=1)
        line.run()
    drain(viewer, view)
    chain = sorted(view.blocks.items(), key=lambda item: item[1][2] != 0)
    assert [block[3] for _, block in chain] == [2, 2, 2]
    parents = {block_id: block[2] for block_id, block in view.blocks.items()}
    assert sorted(parents.values()).count(0) == 1 and set(parents.values()) - {0} <= set(parents)


def test_a_block_whose_parent_goes_is_told_again() -> None:
    line = Line()
    viewer, view = look(line)
    line.ask([5] * 13, max_tokens=1)
    line.run()
    drain(viewer, view)
    first = next(i for i, block in view.blocks.items() if block[2] == 0)
    child = next(i for i, block in view.blocks.items() if block[2] == first)
    events = msgspec.structs.replace(
        _nothing(line), block_ids=first.to_bytes(4, "little"), block_refs=b"\0\0", block_hashes=bytes(8),
        block_parents=bytes(8), block_hits=bytes(4),
    )  # fmt: skip
    line.bench.table.on_message(line.peer, events)
    drain(viewer, view)
    assert first not in view.blocks and view.blocks[child][2] == -1


def _nothing(line: Line) -> WatchEvents:
    """Events that go on from those before, and tell of no change."""
    account = line.bench.table.live.account
    return WatchEvents(
        line.incarnation, account._seq + 1, 0.0, line.num_blocks, 4, 1, 1, 32, 8, 0, 0, 0, 0, 0, 0, 0, 0,
        b"", b"", b"", b"", b"", [], 0, [], 0, [], [],
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"block_ids": b"\1\0\0"},
        {"block_ids": b"\1\0\0\0"},
        {"block_ids": b"\xff\0\0\0", "block_refs": b"\1\0", "block_hits": bytes(4), "block_hashes": bytes(8),
         "block_parents": bytes(8)},
        {"seq": 99},
    ],
)  # fmt: skip
def test_events_that_do_not_fit_make_it_start_over(changes: dict[str, Any]) -> None:
    line = Line()
    viewer, view = look(line)
    line.ask([5] * 13)
    line.settle()
    drain(viewer, view)
    before, line.bench.now = len(line.peer.all(Watch)), line.bench.now + 5
    line.bench.table.on_message(line.peer, msgspec.structs.replace(_nothing(line), **changes))
    assert len(line.peer.all(Watch)) == before + 1
    line.bench.table.on_message(line.peer, _nothing(line))
    assert len(line.peer.all(Watch)) == before + 1, "it does not ask again at once"
    line.told()
    line.run()
    drain(viewer, view)
    check(view, line.core)


def test_nothing_is_asked_for_before_somebody_looks_and_after_the_last_has_left() -> None:
    line = Line()
    table = line.bench.table
    assert line.watch is None and table.latencies is None
    first = table.live.open(200, False)
    assert line.watch == Watch(200) and table.latencies is not None
    second = table.live.open(500, False)
    assert len(line.peer.all(Watch)) == 1
    third = table.live.open(100, False)
    assert line.watch == Watch(100), "it wants to know more often"
    for viewer in (first, second):
        table.live.close(viewer)
    assert line.watch == Watch(100)
    table.live.close(third)
    assert line.watch == Watch(0) and table.latencies is None
    assert not table.live.has_account


def test_one_tokenizer_is_asked_and_another_when_it_goes() -> None:
    bench = Bench()
    one = bench.peer("one")
    two = bench.peer("two")
    viewer, view = bench.table.live.open(100, False), LiveView()
    assert one.all(Watch) == [Watch(100)] and not two.all(Watch)
    one.draining = True
    bench.table.on_status(one)
    assert one.last(Watch) == Watch(0) and two.all(Watch) == [Watch(100)]
    bench.down(two)
    assert one.last(Watch) == Watch(100)
    bench.down(one)
    three = bench.peer("three")
    assert three.all(Watch) == [Watch(100)]
    drain(viewer, view)
    assert [(s["name"], s["alive"]) for s in view.state["services"]] == [("three", True)]


def test_services_that_go_are_kept_for_a_while_or_until_the_next_comes() -> None:
    line = Line()
    viewer, view = look(line)
    drain(viewer, view)
    assert [(s["role"], s["alive"]) for s in view.state["services"]] == [
        ("tokenizer", True), ("scheduler", True), ("executor", True),
    ]  # fmt: skip
    line.bench.table.on_message(line.peer, WatchEnded())
    drain(viewer, view)
    assert view.service("scheduler") is None and view.service("executor") is not None
    line.start_scheduler()
    line.told()
    drain(viewer, view)
    scheduler = view.service("scheduler")
    assert scheduler is not None and scheduler["incarnation"] == f"{2:016x}"
    assert len(view.state["services"]) == 3
    line.bench.down(line.peer)
    drain(viewer, view)
    assert view.service("tokenizer") is None and len(view.state["services"]) == 3
    line.bench.now += 61
    drain(viewer, view)
    assert [s["role"] for s in view.state["services"]] == ["executor"]


def test_one_who_does_not_read_gets_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewer_module, "MAX_UNREAD_STEPS", 5)
    line = Line()
    (slow, slow_view), (quick, quick_view) = look(line), look(line)
    for viewer, view in ((slow, slow_view), (quick, quick_view)):
        drain(viewer, view)
    line.ask([5] * 13, max_tokens=12)
    while line.core.num_unfinished:
        line.step()
        drain(quick, quick_view)
    line.settle()
    drain(slow, slow_view)
    drain(quick, quick_view)
    assert (slow_view.num_snapshots, quick_view.num_snapshots) == (2, 1)
    check(slow_view, line.core)
    check(quick_view, line.core)


def test_steps_and_events_of_level_trace() -> None:
    line = Line()
    (plain, plain_view), (traced, traced_view) = look(line), look(line, trace=True)
    drain(plain, plain_view)
    drain(traced, traced_view)
    message = line.ask([5] * 9, max_tokens=3)
    line.run()
    drain(plain, plain_view)
    drain(traced, traced_view)
    key = f"{message.request_id:016x}/0"
    whats = [what for _, told, what in traced_view.request_events if told == key]
    assert whats == ["queued", "admitted", "first_token", "finished"]
    assert not plain_view.request_events
    (step, *_), (full, *_) = plain_view.steps.values(), traced_view.steps.values()
    assert step["prefills"] == [[key, 9]] and step["num_prefill_tokens"] == 9 and step["token_budget"] == 32
    assert full["executor"] is None and full["returned_at"] >= full["t"] and "executor" not in step
    assert traced_view.ended[key]["num_output_tokens"] == 3 and traced_view.ended[key]["tenant"] == "acme"


def test_there_are_not_more_viewers_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    viewers = [bench.table.live.open(100, False) for _ in range(32)]
    with pytest.raises(StreamError, match="32 viewers"):
        bench.table.live.open(100, False)
    bench.table.live.close(viewers[0])
    bench.table.live.close(bench.table.live.open(100, False))
    bench.table.draining = True
    with pytest.raises(StreamError, match="shutting down"):
        bench.table.live.open(100, False)


def test_one_who_cannot_be_asked_for_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    peer = bench.peer()

    def send(message: Any) -> None:
        raise OverflowError

    monkeypatch.setattr(peer, "send", send)
    for _ in range(33):
        with pytest.raises(OverflowError):
            bench.table.live.open(100, False)
    monkeypatch.undo()
    assert bench.table.latencies is None
    bench.table.live.close(bench.table.live.open(100, False))


def test_requests_without_end_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account_module, "MAX_REQUESTS", 3)
    line = Line()
    look(line)
    for _ in range(5):
        line.ask([5] * 3)
    line.settle()
    assert len(line.bench.table.live.account.requests) <= 3


# --- what clients see -----------------------------------------------------------------------------


def test_times_to_the_first_token_and_between_tokens() -> None:
    bench = Bench()
    peer = bench.peer()
    viewer, view = bench.table.live.open(100, False), LiveView()
    drain(viewer, view)
    assert view.state["latency"]["ttft"] == {"count": 0, "p50": None, "p90": None, "p99": None}
    bench.open()
    bench.accept(peer)
    submit = peer.last()
    bench.now += 0.5
    bench.say(peer, delta(submit, 0, [7], "a", 1))
    for i in range(10):
        bench.now += 0.02
        bench.say(peer, delta(submit, 1 + i, [7], "a", 2 + i))
    bench.now += 0.12
    bench.say(peer, delta(submit, 11, [7, 7], "aa", 13))
    bench.now += 1.0
    drain(viewer, view)
    latency = view.state["latency"]
    assert latency["ttft"]["count"] == 1 and latency["ttft"]["p50"] == pytest.approx(500, rel=0.03)
    assert latency["itl"]["count"] == 12
    assert latency["itl"]["p50"] == pytest.approx(20, rel=0.03)
    assert latency["itl"]["p99"] == pytest.approx(60, rel=0.03)
    bench.now += 40
    drain(viewer, view)
    assert view.state["latency"]["itl"]["count"] == 0


def test_percentiles_are_within_their_bound() -> None:
    r = random.Random(1)
    histogram = Histogram()
    values = sorted(r.lognormvariate(3, 1.2) for _ in range(4000))
    for value in values:
        histogram.add(0.0, value)
    found = histogram.percentiles(1.0)
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert found[name] == pytest.approx(values[int(share * len(values)) - 1], rel=0.026)
