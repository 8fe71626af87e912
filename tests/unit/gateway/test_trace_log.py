"""What a trace has of the gateway's streams, and of the work of gateway and tokenizers."""

from __future__ import annotations

from typing import Any

import pytest
from support.gateway_fakes import Bench, accepted, delta
from support.live_view import LiveView

from quartet.services.gateway.events import StreamError
from quartet.shared.messages import Deltas, ErrorCode, Failed, FinishReason, WatchedSpan, WatchedSpans, WatchSpans


def drain(viewer: Any, view: LiveView) -> LiveView:
    while (event := viewer.take()) is not None:
        view.take(event)
    return view


def whats(view: LiveView, request_id: int) -> list[tuple[float, str]]:
    return [(t, what) for t, key, what in view.stream_events if key == f"{request_id:016x}"]


def test_what_becomes_of_streams() -> None:
    bench = Bench()
    peer, viewer, view = bench.peer(), bench.table.live.open(100, trace=True), LiveView()
    wall = bench.wall - bench.now
    bench.open()
    submit = bench.accept(peer) or peer.last()
    bench.now += 1.0
    bench.say(peer, delta(submit, 0, [5], "a", 1))
    bench.now += 1.0
    bench.say(peer, delta(submit, 1, [6], "b", 2, finish=FinishReason.STOP))
    bench.open()
    refused = peer.last()
    bench.table.on_message(peer, Failed(refused.request_id, refused.attempt, ErrorCode.INVALID_ARGUMENT, "no"))
    drain(viewer, view)
    assert whats(view, submit.request_id) == [
        (wall + 1000.0, "opened"), (wall + 1000.0, "accepted"), (wall + 1001.0, "first_token"),
        (wall + 1002.0, "finished"),
    ]  # fmt: skip
    assert [what for _, what in whats(view, refused.request_id)] == ["opened", "failed"]
    bench.table.live.close(viewer)
    assert bench.table.metrics.trace_log is None


def test_streams_that_are_open_tell_what_they_are_at() -> None:
    bench = Bench()
    peer = bench.peer()
    submits = []
    for _ in range(3):
        bench.open()
        submits.append(peer.last())
    for submit in submits[1:]:
        bench.table.on_message(peer, accepted(submit))
    bench.say(peer, delta(submits[2], 0, [5], "a", 1))
    viewer = bench.table.live.open(100, trace=True)
    view = drain(viewer, LiveView())
    assert [whats(view, submit.request_id)[0][1] for submit in submits] == ["opened", "accepted", "first_token"]
    second = bench.table.live.open(100, trace=True)
    bench.say(peer, delta(submits[2], 1, [6], "b", 2, finish=FinishReason.STOP))
    assert [what for _, what in whats(drain(viewer, view), submits[2].request_id)] == ["first_token", "finished"]
    second_view = drain(second, LiveView())
    assert [what for _, what in whats(second_view, submits[2].request_id)] == ["first_token", "finished"]


def test_each_tokenizer_is_asked_while_somebody_traces() -> None:
    bench = Bench()
    first = bench.peer("t1")
    looks = bench.table.live.open(100, trace=False)
    assert not first.all(WatchSpans) and bench.table.metrics.trace_log is None
    viewers = [bench.table.live.open(100, trace=True) for _ in range(2)]
    second = bench.peer("t2")
    assert first.all(WatchSpans) == second.all(WatchSpans) == [WatchSpans(True)]
    for peer, name in ((first, "tokenize"), (second, "detokenize")):
        bench.table.on_message(peer, WatchedSpans([WatchedSpan(name, 5000.5, 1500, 3, 7 if peer is first else None)]))
    for viewer in viewers:
        assert drain(viewer, LiveView()).spans == [
            ["tokenizer", "t1", "tokenize", 5000.5, 1.5, 3, f"{7:016x}"],
            ["tokenizer", "t2", "detokenize", 5000.5, 1.5, 3, None],
        ]
    assert not drain(looks, LiveView()).spans
    bench.table.live.close(viewers.pop())
    assert first.all(WatchSpans) == [WatchSpans(True)]
    bench.table.live.close(viewers.pop())
    assert first.all(WatchSpans) == second.all(WatchSpans) == [WatchSpans(True), WatchSpans(False)]
    bench.table.on_message(first, WatchedSpans([WatchedSpan("tokenize", 1.0, 1, 1)]))


def test_what_a_step_costs_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    peer, viewer = bench.peer(), bench.table.live.open(100, trace=True)
    bench.open()
    bench.accept(peer)
    submit = peer.last()
    ticks = iter([1010.0, 1010.25])
    monkeypatch.setattr(bench.table, "_on_delta", lambda *_: None)
    monkeypatch.setattr(bench.table, "_clock", lambda: next(ticks))
    monkeypatch.setattr(bench.table.metrics.trace_log, "_clock", lambda: next(ticks))
    bench.table.on_message(peer, Deltas([delta(submit, 0, [5, 6], "ab", 2), delta(submit, 2, [7], "c", 3)]))
    ((role, _, name, t, ms, num_tokens, request_id),) = drain(viewer, LiveView()).spans
    assert (role, name, t - (bench.wall - bench.now), ms, num_tokens, request_id) == (
        "gateway", "deltas", 1010.0, 250.0, 3, None,
    )  # fmt: skip


def test_who_is_refused_leaves_no_trace() -> None:
    bench = Bench()
    bench.table.draining = True
    with pytest.raises(StreamError):
        bench.table.live.open(100, trace=True)
    assert bench.table.metrics.trace_log is None
