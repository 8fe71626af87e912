"""`quartet trace`: events of /live become slices and spans where they belong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.live_server import LiveServer

from quartet.services.cli.main import main
from quartet.services.cli.trace_file import EXECUTOR, GATEWAY, REQUESTS, SCHEDULER, TOKENIZER, Trace, clock_offset

KEY = "0123456789abcdef/0"


def step(number: int, t: float, executor: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "epoch": 7, "step_id": number, "t": t, "num_prefill_tokens": 9, "num_decode_tokens": 2, "token_budget": 32,
        "prefills": [[KEY, 9]], "num_running": 3, "num_waiting": 0, "num_preempted": 0, "schedule_ms": 0.5,
        "update_ms": 0.25, "executor_ms": 18.0, "total_ms": 20.0, "lost": False, "returned_at": t + 0.02,
        "executor": executor,
    } | fields  # fmt: skip


def executor_part(t: float) -> dict[str, Any]:
    return {"t": t, "phases": [["host", 0.0, 2.0], ["forward", 2.0, 12.0], ["sampling", 14.0, 1.0]]}


def request(key: str, state: str, arrived_at: float, computed: int) -> dict[str, Any]:
    return {
        "key": key, "state": state, "arrived_at": arrived_at, "num_prompt_tokens": 9, "num_computed_tokens": computed,
    }  # fmt: skip


def slices(built: dict[str, Any], pid: int, name: str) -> list[tuple[float, float]]:
    found = [e for e in built["traceEvents"] if e["ph"] == "X" and e["pid"] == pid and e["name"].startswith(name)]
    return [(e["ts"], e["dur"]) for e in found]


def test_a_step_is_seen_in_scheduler_and_executor() -> None:
    trace = Trace()
    trace.add("snapshot", {"t": 100.0, "steps": [step(3, 90.0)]})
    trace.add("delta", {"t": 101.0, "steps": [step(4, 100.5, executor_part(100.502))]})
    trace.add("snapshot", {"t": 102.0, "steps": [step(4, 100.5, executor_part(100.502))]})
    built = trace.build()
    assert slices(built, SCHEDULER, "schedule 4") == [(100.4995e6, 500.0)]
    assert slices(built, SCHEDULER, "step 4: 9 prefill + 2 decode") == [(100.5e6, 20_000.0)]
    assert slices(built, SCHEDULER, "update 4") == [(100.52e6, 250.0)]
    assert slices(built, EXECUTOR, "step 4") == [(100.502e6, 15_000.0)]
    assert slices(built, EXECUTOR, "forward") == [(100.504e6, 12_000.0)]
    assert not slices(built, SCHEDULER, "step 3"), "it was over before the trace began"
    assert built["otherData"]["executor_clock_offset_ms"] == 0.0
    json.dumps(built, allow_nan=False)


def test_a_lost_step_has_no_update() -> None:
    trace = Trace()
    trace.add("snapshot", {"t": 100.0, "steps": [step(4, 100.5, lost=True)]})
    built = trace.build()
    assert slices(built, SCHEDULER, "step 4") and not slices(built, SCHEDULER, "update 4")


@pytest.mark.parametrize(("skew", "expected"), [(0.0, 0.0), (0.002, 0.0), (5.0, -5.0), (-3.0, 3.0)])
def test_an_executor_whose_clock_goes_wrong_is_put_right(skew: float, expected: float) -> None:
    steps = [step(i, 100.0 + i, executor_part(100.002 + i + skew)) for i in range(5)]
    assert clock_offset(steps) == pytest.approx(expected, abs=0.003)
    assert clock_offset([step(1, 100.0)]) == 0.0


def spans(built: dict[str, Any], key: str, pid: int = REQUESTS) -> list[tuple[str, float, float]]:
    """(name, begin, end), by their beginning."""
    begun: dict[str, float] = {}
    found = []
    for event in built["traceEvents"]:
        if event["pid"] != pid or event.get("id") != key:
            continue
        if event["ph"] == "b":
            assert event["name"] not in begun
            begun[event["name"]] = event["ts"] / 1e6
        else:
            found.append((event["name"], begun.pop(event["name"]), event["ts"] / 1e6))
    assert not begun, "every span ends"
    return sorted(found, key=lambda span: (span[1], span[0] not in ("request", "stream")))


def test_what_a_request_does_one_after_the_other() -> None:
    trace = Trace()
    trace.add("snapshot", {"t": 100.0})
    whats = ["queued", "admitted", "first_token", "preempted", "admitted", "first_token", "finished"]
    trace.add("delta", {"t": 110.0, "request_events": [[101.0 + i, KEY, what] for i, what in enumerate(whats)]})
    assert spans(trace.build(), KEY) == [
        ("request", 101.0, 107.0), ("queued", 101.0, 102.0), ("prefill", 102.0, 103.0), ("decode", 103.0, 104.0),
        ("preempted", 104.0, 105.0), ("prefill", 105.0, 106.0), ("decode", 106.0, 107.0),
    ]  # fmt: skip


def test_what_was_there_before_and_what_goes_on_is_cut() -> None:
    trace = Trace()
    requests = [request("a/0", "running", 90.0, 9), request("b/0", "running", 90.0, 4),
                request("c/0", "waiting", 99.0, 0), request("d/0", "preempted", 90.0, 0)]  # fmt: skip
    trace.add("snapshot", {"t": 100.0, "requests": requests})
    trace.add("delta", {"t": 104.0, "request_events": [[102.0, "c/0", "admitted"], [103.0, "a/0", "finished"]]})
    built = trace.build()
    assert spans(built, "a/0") == [("request", 100.0, 103.0), ("decode", 100.0, 103.0)]
    assert spans(built, "b/0") == [("request", 100.0, 104.0), ("prefill", 100.0, 104.0)]
    assert spans(built, "c/0") == [("request", 100.0, 104.0), ("queued", 100.0, 102.0), ("prefill", 102.0, 104.0)]
    assert spans(built, "d/0") == [("request", 100.0, 104.0), ("preempted", 100.0, 104.0)]


def test_a_stream_at_the_gateway() -> None:
    trace = Trace()
    trace.add("snapshot", {"t": 100.0, "stream_events": [[100.0, "b", "first_token"]]})
    whats = ["opened", "accepted", "first_token", "finished"]
    events = [[101.0 + i, "a", what] for i, what in enumerate(whats)]
    trace.add("delta", {"t": 110.0, "stream_events": [*events, [109.0, "c", "accepted"], [109.5, "d", "opened"]]})
    trace.add("delta", {"t": 111.0, "stream_events": [[110.0, "d", "failed"]]})
    built = trace.build()
    assert spans(built, "a", GATEWAY) == [
        ("stream", 101.0, 104.0), ("until accepted", 101.0, 102.0), ("until its first token", 102.0, 103.0),
        ("streaming", 103.0, 104.0),
    ]  # fmt: skip
    assert spans(built, "b", GATEWAY) == [("stream", 100.0, 111.0), ("streaming", 100.0, 111.0)]
    assert spans(built, "c", GATEWAY) == [("stream", 109.0, 111.0), ("until its first token", 109.0, 111.0)]
    assert spans(built, "d", GATEWAY) == [("stream", 109.5, 110.0), ("until accepted", 109.5, 110.0)]
    ended = [e for e in built["traceEvents"] if e["ph"] == "e" and e["pid"] == GATEWAY and "args" in e]
    assert {e["args"]["ends"] for e in ended} == {"finished", "failed", "after the trace"}


def test_what_gateway_and_tokenizers_do_is_on_tracks_of_their_own() -> None:
    trace = Trace()
    trace.add("snapshot", {"t": 100.0, "spans": [["gateway", "g", "deltas", 100.5, 0.25, 32, None]]})
    told = [
        ["tokenizer", "t1", "detokenize", 100.4, 1.5, 32, None],
        ["tokenizer", "t2", "tokenize", 100.1, 3.0, 9, "a"],
    ]
    trace.add("delta", {"t": 101.0, "spans": told})
    built = trace.build()
    assert slices(built, GATEWAY, "deltas") == [(100.5e6, 250.0)]
    assert slices(built, TOKENIZER, "detokenize") == [(100.4e6, 1500.0)]
    assert spans(built, "a", TOKENIZER + 1) == [("tokenize", 100.1, pytest.approx(100.103))]
    names = {e["pid"]: e["args"]["name"] for e in built["traceEvents"] if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in built["traceEvents"] if e["name"] == "process_sort_index"}
    line = [names[pid] for pid in sorted(order, key=order.__getitem__)]
    assert line == ["gateway", "tokenizer t1", "tokenizer t2", "scheduler", "executor", "requests", "services"]


def test_services_that_come_and_go_are_marks() -> None:
    trace = Trace()
    entry = {"role": "scheduler", "name": "s", "incarnation": "1", "alive": True, "ready": True}
    trace.add("snapshot", {"t": 100.0, "services": [entry]})
    trace.add("delta", {"t": 101.0, "services": [entry | {"alive": False}]})
    trace.add("delta", {"t": 102.0, "services": [entry | {"incarnation": "2"}]})
    marks = [(e["ts"], e["name"]) for e in trace.build()["traceEvents"] if e["ph"] == "i"]
    assert marks == [(101e6, "scheduler s went"), (102e6, "scheduler s came")]


def test_the_command_writes_what_it_saw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [("snapshot", {"t": 100.0, "steps": []}), ("delta", {"t": 100.9, "steps": [step(0, 100.5)]})]
    path = tmp_path / "trace.json"
    with LiveServer(events) as server:
        assert main(["trace", "--url", server.url, "--seconds", "0.3", "-o", str(path)]) == 0
    assert server.paths == ["/live?interval_ms=200&level=trace"]
    assert slices(json.loads(path.read_text()), SCHEDULER, "step 0")
    assert "1 steps (0 with the executor's phases)" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveServer([]) as server:
        url = server.url
    assert main(["trace", "--url", url, "-o", "-"]) == 1
    assert capsys.readouterr().err.startswith(f"quartet trace: {url}: ")
