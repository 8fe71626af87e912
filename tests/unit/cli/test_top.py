"""`quartet top`: rates from events, the table, and what it says when there is nothing to see."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
from rich.console import Console
from support.live_server import LiveServer

from quartet.services.cli.main import main
from quartet.services.cli.top_table import Screen, render
from quartet.services.cli.top_view import TopView

SERVICES = [
    {"role": role, "name": f"{role}-1", "incarnation": "00a1b2c3d4e5f607", "version": "0", "alive": role != "executor",
     "ready": True, "draining": False, "stalled": False}
    for role in ("gateway", "tokenizer", "scheduler", "executor")
]  # fmt: skip


def counters(steps: int, output: int, queries: int = 0, hits: int = 0) -> dict[str, int]:
    return {"steps": steps, "preemptions": 1, "prefix_cache_queries": queries, "prefix_cache_hits": hits,
            "output_tokens": output}  # fmt: skip


def snapshot(t: float = 100.0, **members: Any) -> dict[str, Any]:
    return {
        "seq": 0, "t": t, "model": {"name": "tiny"}, "services": SERVICES, "steps": [],
        "pool": {"num_blocks": 200, "block_size": 16, "num_free": 150, "num_cached": 80},
        "queue": {"num_running": 3, "num_waiting": 1, "num_preempted": 0, "max_num_seqs": 8, "token_budget": 256},
        "counters": counters(10, 1000, 400, 100),
        "latency": {"window_s": 30, "ttft": {"count": 2, "p50": 40.0, "p90": 50.0, "p99": 50.0},
                    "itl": {"count": 0, "p50": None, "p90": None, "p99": None}},
    } | members  # fmt: skip


def step(t: float, prefill: int, decode: int, lost: bool = False) -> dict[str, Any]:
    return {"t": t, "num_prefill_tokens": prefill, "num_decode_tokens": decode, "executor_ms": 20.0,
            "schedule_ms": 0.1, "update_ms": 0.2, "lost": lost}  # fmt: skip


def test_rates_are_those_of_the_last_seconds() -> None:
    view = TopView()
    assert not view.has_scheduler and view.summary()["output_tokens_per_second"] is None
    view.apply("snapshot", snapshot(90.0))
    view.apply("delta", {"t": 100.0, "counters": counters(20, 2000, 400, 100)})
    steps = [step(101.0, 100, 3), step(101.5, 0, 3), step(101.6, 50, 0, lost=True)]
    view.apply("delta", {"t": 102.0, "counters": counters(40, 2100, 500, 180), "steps": steps})
    summary = view.summary()
    assert summary["output_tokens_per_second"] == 50.0 and summary["steps_per_second"] == 10.0
    assert summary["prefill_tokens_per_second"] == 50.0 and summary["tokens_per_step"] == 53.0
    assert summary["executor_ms"] == 20.0 and summary["scheduler_ms"] == 0.3
    assert summary["prefix_cache_hit_rate"] == 0.8
    assert summary["kv_cache"]["num_used"] == 50 and summary["kv_cache"]["usage"] == 0.25
    json.dumps(summary, allow_nan=False)


def test_steps_from_before_it_watched_are_in_no_rate() -> None:
    view = TopView()
    view.apply("snapshot", snapshot(100.0, steps=[step(97.0, 900, 1), step(99.9, 100, 1)]))
    assert view.summary()["prefill_tokens_per_second"] is None and view.summary()["tokens_per_step"] == 501.0
    view.apply("delta", {"t": 100.5, "counters": counters(11, 1001), "steps": [step(100.4, 20, 1)]})
    assert view.summary()["prefill_tokens_per_second"] == 40.0
    view.apply("snapshot", snapshot(102.0, counters=counters(20, 1009), steps=[step(101.0, 500, 1)]))
    view.apply("delta", {"t": 103.0, "counters": counters(21, 1010), "steps": [step(102.5, 30, 1)]})
    assert view.summary()["prefill_tokens_per_second"] == 30.0


@pytest.mark.parametrize("ahead", [-1000.0, 1000.0])
def test_the_schedulers_clock_may_differ_from_the_gateways(ahead: float) -> None:
    view = TopView()
    view.apply("snapshot", snapshot(100.0))
    view.apply("delta", {"t": 101.0, "counters": counters(11, 1001), "steps": [step(100.5 + ahead, 40, 0)]})
    view.apply("delta", {"t": 102.0, "counters": counters(12, 1002), "steps": [step(101.5 + ahead, 20, 0)]})
    summary = view.summary()
    assert (summary["prefill_tokens_per_second"], summary["tokens_per_step"]) == (30.0, 30.0)
    view.apply("delta", {"t": 108.0})
    summary = view.summary()
    assert (summary["prefill_tokens_per_second"], summary["tokens_per_step"]) == (None, None)
    view.apply("delta", {"t": 109.0})
    assert view.summary()["prefill_tokens_per_second"] == 0.0


def test_without_prompts_lately_the_hit_rate_is_that_of_all() -> None:
    view = TopView()
    view.apply("snapshot", snapshot())
    assert view.summary()["prefix_cache_hit_rate"] == 0.25


def test_another_scheduler_counts_anew() -> None:
    view = TopView()
    view.apply("snapshot", snapshot(100.0))
    view.apply("snapshot", snapshot(101.0, counters=counters(1, 5)))
    view.apply("delta", {"t": 103.0, "counters": counters(21, 105)})
    assert view.summary()["output_tokens_per_second"] == 50.0


def test_the_table_says_it_all() -> None:
    view = TopView()
    view.apply("snapshot", snapshot())
    console = Console(file=io.StringIO(), width=100)
    console.print(render(view.summary()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("tiny", "25.0 % of 200 blocks, 80 cached", "3 of 8", "first token", "40.0", "00a1b2c3", "gone",
                 "25.0 % of prompt tokens"):  # fmt: skip
        assert part in text, part
    console = Console(file=io.StringIO(), width=100)
    console.print(render(TopView().summary()))
    assert "no executor yet" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_screen_that_loses_its_server_keeps_what_it_showed() -> None:
    view = TopView()
    view.apply("snapshot", snapshot())
    console = Console(file=io.StringIO(), width=100)
    with Screen(console) as screen:
        screen.lost("it is away")
        screen.show(view.summary())
        screen.lost("it is away")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "it is away; trying again" in text and "tiny" in text


def test_once_with_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveServer([("snapshot", snapshot())], key="secret") as server:
        command = ["top", "--url", server.url, "--once", "--json", "--seconds", "0.2"]
        assert main([*command, "--api-key", "secret"]) == 0
        assert json.loads(capsys.readouterr().out)["queue"]["num_running"] == 3
        assert main(command) == 1
    assert capsys.readouterr().err == f"quartet top: {server.url}: 401: an API key is needed\n"


def test_once_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveServer([("snapshot", snapshot())]) as server:
        assert main(["top", "--url", server.url, "--once", "--seconds", "0.2"]) == 0
    assert "output tokens/s" in capsys.readouterr().out


def test_json_lines_until_the_server_ends_them(capsys: pytest.CaptureFixture[str]) -> None:
    events = [("snapshot", snapshot()), ("delta", {"t": 101.0, "counters": counters(20, 1500)})]
    with LiveServer(events, ends=True) as server:
        assert main(["top", "--url", server.url, "--json"]) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["output_tokens_per_second"] for line in out.splitlines()] == [None, 500.0]
    assert "the server has ended the stream" in err


def test_without_rich_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "quartet.services.cli.top_table", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["top", "--once"]) == 1
    assert "pip install 'quartet[top]'" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://x", "http://"])
def test_an_address_that_is_none(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--url", url, "-o", "-"]) == 1
    assert "--url must be" in capsys.readouterr().err
