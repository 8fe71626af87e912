"""What those who watch are told: replayed, it is what the scheduler has, after every event."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.fake_executor import model_info
from support.watching import Replay

from quartet.services.scheduler import recorder as recorder_module
from quartet.services.scheduler.core import EXECUTOR, SchedulerCore
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.shared.messages import (
    Granted,
    RequestEvent,
    RequestState,
    StepSpan,
    StepTimed,
    Watch,
    WatchedService,
    WatchEvents,
    WatchSteps,
    decode,
    encode,
)

VIEWER = "viewer"


class Viewer:
    """Watches a Sim under a session of its own, and compares after every event."""

    def __init__(self, sim: Any) -> None:
        self.sim = sim
        self.replay = Replay()
        self.watching: list[bool] = []
        self.strict = True
        self._dispatch = sim._dispatch
        self._core: SchedulerCore | None = None
        sim._dispatch = self.dispatch

    def dispatch(self, effects: list[Any]) -> None:
        told = [message for to, message in effects if to == VIEWER]
        self.watching += [message.enabled for _, message in effects if isinstance(message, WatchSteps)]
        self._dispatch([(to, m) for to, m in effects if to != VIEWER and not isinstance(m, WatchSteps)])
        for message in told:
            self.replay.apply(decode(encode(message)))
        if self.strict and not self.sim.todo:
            self.look()

    def watch(self) -> None:
        self._core = self.sim.core
        self.sim.event(self.sim.core.watch(VIEWER, Watch(20)))

    def look(self) -> None:
        """What is new is told, and is so."""
        core = self.sim.core
        if core is not self._core:
            return  # a new scheduler, that nobody watches yet
        for _ in range(1000):
            if core._watchers.next_at is None:
                break
            self.sim.now += 0.03
            for to, message in core._watchers.take():
                assert to == VIEWER
                self.replay.apply(decode(encode(message)))
        self.replay.check(core)
        self.replay.check_chains(core)


def live(viewer: Viewer, num_events: int) -> None:
    sim = viewer.sim
    r = sim.random
    for _ in range(num_events):
        sim.now += r.random()
        open_requests = [a for a in sim.asked.values() if not a.done]
        if sim.executor is None:
            if r.random() < 0.3:
                sim.executor_up()
        elif not sim.executor.queue or r.random() < 0.6:
            sim.schedule()
        kind = r.random()
        if kind < 0.15 and len(open_requests) < 20:
            prompt = [10 + r.randrange(3)] * r.randint(1, 17) + [r.randrange(3, 1000) for _ in range(r.randrange(6))]
            sim.ask(prompt, n=r.choice([1, 1, 2]), max_tokens=r.randint(1, 9), salt=r.choice(["", "", "x"]))
        elif kind < 0.18 and open_requests:
            sim.abort(r.choice(open_requests))
        elif kind < 0.19 and sim.executor is not None:
            sim.executor_dies()
        elif kind < 0.2:
            sim.scheduler_dies()
            viewer.watch()
        elif kind < 0.21 and sim.executor is not None:
            sim.step_fails()
        elif kind < 0.22:
            sim.reset_prefix_cache()
        elif kind < 0.23:
            viewer.watch()
        elif sim.executor is not None:
            sim.step()
    if sim.executor is None:
        sim.executor_up()
    sim.run()


@pytest.mark.parametrize("kind", ["roomy", "tight", "in parts"])
@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # seeds do not shrink
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32), caching=st.booleans())
def test_what_is_told_is_what_is_so_after_every_event(
    make_sim: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str, seed: int, caching: bool
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_BLOCKS", 3 if kind == "in parts" else 16384)
    num_blocks = 14 if kind == "tight" else 120
    sim = make_sim(model={"num_blocks": num_blocks, "max_model_len": 48}, seed=seed, enable_prefix_caching=caching)
    viewer = Viewer(sim)
    viewer.watch()
    live(viewer, 250)
    replay = viewer.replay
    assert not replay.requests and not replay.tables
    assert all(refs == 0 for refs, _, _ in replay.blocks.values())
    for step in replay.steps:
        assert step.lost or step.returned_at >= step.scheduled_at
        assert sum(chunk.num_tokens for chunk in step.chunks) == step.num_prefill_tokens


def watched_line(make_sim: Callable[..., Any], **options: Any) -> tuple[Any, Viewer]:
    sim = make_sim(**options)
    viewer = Viewer(sim)
    viewer.strict = False
    viewer.watch()
    return sim, viewer


def test_nobody_watches_and_nothing_is_noted(make_sim: Callable[..., Any]) -> None:
    sim = make_sim()
    sim.ask([5] * 9)
    sim.run()
    assert sim.core.state.recorder is None and sim.core.state.kv.pool.changed is None
    assert sim.core.next_deadline() is None


def test_the_last_to_leave_ends_it(make_sim: Callable[..., Any]) -> None:
    sim, viewer = watched_line(make_sim)
    sim.event(sim.core.watch("other", Watch(50)))
    sim.event(sim.core.watch(VIEWER, Watch(0)))
    assert sim.core.state.recorder is not None and viewer.watching == [True]
    sim.event(sim.core.owner_down("other"))
    assert sim.core.state.recorder is None and sim.core.state.kv.pool.changed is None
    assert viewer.watching == [True, False]


def test_who_comes_later_makes_the_account_start_over_for_all(make_sim: Callable[..., Any]) -> None:
    sim, viewer = watched_line(make_sim)
    sim.ask([5] * 9)
    sim.schedule()
    sim.now += 1
    effects = sim.core.watch("other", Watch(50))
    told = [(to, message.seq) for to, message in effects if isinstance(message, WatchEvents)]
    assert told == [(VIEWER, 0), ("other", 0)]
    assert viewer.watching == [True], "the executor knows already"


def test_at_most_once_in_an_interval_and_not_without_news(make_sim: Callable[..., Any]) -> None:
    sim = make_sim()
    told: list[float] = []
    now = sim.now

    def tell(effects: list[Any]) -> list[Any]:
        told.extend(sim.now for to, _ in effects if to == VIEWER)
        return [e for e in effects if e[0] != VIEWER]

    tell(sim.core.watch(VIEWER, Watch(100)))
    assert told == [now]
    sim.event(tell(sim.core.schedule()))
    assert sim.core.next_deadline() is None, "there is nothing to tell"
    sim.ask([5] * 9, max_tokens=30)
    assert sim.core.next_deadline() == pytest.approx(now + 0.1), "it is not told before"
    while sim.core.num_unfinished:
        sim.now += 0.01
        effects = sim.core.schedule()
        sim.event([e for e in tell(effects) if not isinstance(e[1], WatchSteps)])
        sim.step()
    assert len(told) > 2 and all(b - a > 0.0999 for a, b in itertools.pairwise(told))
    sim.now += 1
    tell(sim.core.tick())
    assert sim.core.next_deadline() is None


def test_an_executor_is_told_after_each_takeover(make_sim: Callable[..., Any]) -> None:
    sim, viewer = watched_line(make_sim)
    assert viewer.watching == [True]
    sim.executor_dies()
    sim.executor_up()
    assert viewer.watching == [True, True]
    sim.event(sim.core.watch(VIEWER, Watch(0)))
    sim.executor_dies()
    sim.executor_up()
    assert viewer.watching == [True, True, False]


def test_a_request_from_its_beginning_to_its_end(make_sim: Callable[..., Any]) -> None:
    sim, viewer = watched_line(make_sim)
    asked = sim.ask([5] * 9, max_tokens=3, tenant="acme", priority=2)
    sim.run()
    viewer.look()
    request_id = asked.message.request_id
    kinds = [e.what for e in viewer.replay.events if e.request_id == request_id]
    assert kinds == [RequestEvent.QUEUED, RequestEvent.ADMITTED, RequestEvent.FIRST_TOKEN, RequestEvent.FINISHED]
    (end,) = viewer.replay.ended
    assert (end.state, end.num_output_tokens, end.tenant, end.priority) == (RequestState.FINISHED, 3, "acme", 2)
    assert [(s.num_prefill_tokens, s.num_decode_tokens) for s in viewer.replay.steps] == [(9, 0), (0, 1), (0, 1)]
    assert [chunk.num_tokens for chunk in viewer.replay.steps[0].chunks] == [9]


def test_hits_are_counted_and_their_chain_is_known(make_sim: Callable[..., Any]) -> None:
    sim, viewer = watched_line(make_sim)
    for _ in range(3):
        sim.ask([5] * 13, max_tokens=1)
        sim.run()
    viewer.look()
    blocks, hits = viewer.replay.blocks, viewer.replay.hits
    assert sorted(hits.values()) == [2, 2, 2]
    parents = {block_hash: parent for _, block_hash, parent in blocks.values()}
    first = next(h for h, parent in parents.items() if parent == b"\xff" * 8)
    chain = [first]
    while (after := next((h for h, parent in parents.items() if parent == chain[-1]), None)) is not None:
        chain.append(after)
    assert len(chain) == 3


def test_blocks_that_an_executor_offers_have_no_known_parent_until_they_are_hit(make_sim: Callable[..., Any]) -> None:
    sim, viewer = watched_line(make_sim)
    sim.ask([5] * 13, max_tokens=1)
    sim.run()
    sim.scheduler_dies()
    viewer.watch()
    viewer.look()
    assert [parent for _, _, parent in viewer.replay.blocks.values()] == [bytes(8)] * 3
    sim.ask([5] * 13, max_tokens=1)
    sim.run()
    viewer.look()
    parents = [parent for _, _, parent in viewer.replay.blocks.values()]
    assert len(parents) == 3 and parents.count(b"\xff" * 8) == 1 and bytes(8) not in parents


def test_steps_that_are_lost_are_told_so(make_sim: Callable[..., Any]) -> None:
    sim, viewer = watched_line(make_sim)
    sim.ask([5] * 9)
    sim.schedule()
    sim.executor_dies()
    viewer.look()
    assert [step.lost for step in viewer.replay.steps] == [True, True]
    kinds = [event.what for event in viewer.replay.events]
    assert kinds == [RequestEvent.QUEUED, RequestEvent.ADMITTED, RequestEvent.PREEMPTED]


def test_the_executors_part_is_that_of_the_step_it_names(make_sim: Callable[..., Any]) -> None:
    sim, viewer = watched_line(make_sim)
    sim.ask([5] * 9, max_tokens=3)
    sim.schedule()
    spans = [StepSpan("forward", 10, 2000)]
    sim.core.step_timed(StepTimed(sim.core.granted_epoch, 0, 12.5, spans))
    sim.step()
    sim.core.step_timed(StepTimed(sim.core.granted_epoch, 7, 13.5, spans))  # of no step that is there
    sim.step()
    viewer.look()
    assert [(step.started_at, step.spans) for step in viewer.replay.steps[:2]] == [(12.5, spans), (0.0, [])]


def test_few_of_many_requests_are_listed_and_all_that_run(
    make_sim: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_QUEUED", 4)
    monkeypatch.setattr(recorder_module, "MAX_REQUESTS", 6)
    sim, viewer = watched_line(make_sim, model={"max_num_seqs": 2})
    for _ in range(12):
        sim.ask([5] * 3, max_tokens=2)
    viewer.look()
    assert len(viewer.replay.requests) == 4 and viewer.replay.last.num_requests_more == 8
    while sim.core.num_unfinished:
        sim.schedule()
        viewer.look()
        running = {(r.request_id, r.index) for r in sim.core.state.running}
        assert running <= set(viewer.replay.requests)
        sim.step()
    viewer.look()
    assert not viewer.replay.requests and viewer.replay.last.num_requests_more == 0


def test_steps_that_nobody_was_told_of_in_time_are_counted(
    make_sim: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_STEPS", 4)
    sim, viewer = watched_line(make_sim)
    viewer.sim.core._watchers._next_at = 1e9
    sim.ask([5] * 3, max_tokens=10)
    sim.run()
    sim.core._watchers._next_at = 0.0
    viewer.look()
    assert [step.step_id for step in viewer.replay.steps] == [6, 7, 8, 9]
    assert viewer.replay.last.num_steps_dropped == 6


def test_services_are_told_when_they_change() -> None:
    services = [WatchedService(3, "s", 1, "0", False, False, False)]
    core = SchedulerCore(SchedulerSettings(), 1, lambda: 0.0, services=lambda: list(services))
    (told,) = [message for to, message in core.watch(VIEWER, Watch(20)) if to == VIEWER]
    assert told.services == services and core.next_deadline() is None
    services.append(WatchedService(4, "e", 2, "0", True, False, False))
    assert core.next_deadline() is not None
    core._watchers._next_at = 0.0
    (told,) = [message for to, message in core.schedule() if to == VIEWER]
    assert told.services == services and told.seq == 1


def test_a_large_pool_comes_in_parts_of_a_bounded_size() -> None:
    now = 0.0
    core = SchedulerCore(SchedulerSettings(), 1, lambda: now)
    core.executor_up(model_info(num_blocks=100_000))
    ids = b"".join(i.to_bytes(4, "little") for i in range(1, 100_001))
    hashes = b"".join(i.to_bytes(32, "little") for i in range(1, 100_001))
    core.granted(Granted(1, ids, hashes))
    replay, sizes = Replay(), []
    effects = core.watch(VIEWER, Watch(20))
    while True:
        for to, message in effects:
            if to is not EXECUTOR:
                sizes.append(len(encode(message)))
                replay.apply(message)
        if core.next_deadline() is None:
            break
        now += 0.03
        effects = core.tick()
    assert len(replay.blocks) == 100_000 and len(sizes) == 7 and max(sizes) < 500_000
