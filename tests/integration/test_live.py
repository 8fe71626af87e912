"""/live over the real line: blocks, requests, steps and services as they come, go and come back."""

from __future__ import annotations

import threading
from typing import Any

from support.http import call
from support.live_client import LiveClient
from support.live_view import LiveView
from support.stack import eventually

OPTIONS = {"temperature": 0.0, "ignore_eos": True}
PROMPT = "A long time ago, in a village by the sea, there lived an old fisherman who had seen many storms. " * 2


def generate(running: Any, **options: Any) -> threading.Thread:
    """In a thread, to its end."""
    thread = threading.Thread(target=lambda: running.client.generate(PROMPT, timeout=120, **OPTIONS | options))
    thread.start()
    return thread


def owned(view: LiveView) -> int:
    return sum(block[0] > 0 for block in view.blocks.values())


def cached(view: LiveView) -> int:
    return sum(block[0] == 0 and block[1] != "" for block in view.blocks.values())


def incarnation(view: LiveView, role: str) -> str | None:
    service = view.service(role)
    return service["incarnation"] if service and service["ready"] else None


def test_what_is_seen_of_a_request(stack: Any) -> None:
    stack.client.wait_ready()
    with LiveClient(stack.http_address, "?interval_ms=50&level=trace") as live:
        live.until(lambda view: view.state["pool"] and incarnation(view, "executor"))
        assert [s["role"] for s in live.view.state["services"]] == ["gateway", "tokenizer", "scheduler", "executor"]
        assert live.view.state["pool"]["num_blocks"] == 1024
        thread = generate(stack, max_tokens=24)
        live.until(lambda view: owned(view) >= 3)
        thread.join()
        live.until(lambda view: not view.requests and view.ended and owned(view) == 0)
        assert cached(live.view) >= 3
        (ended,) = live.view.ended.values()
        assert ended["state"] == "finished" and ended["num_output_tokens"] == 24
        steps = [step for step in live.view.steps.values() if step["executor"]]
        assert sum(step["num_prefill_tokens"] for step in steps) >= ended["num_prompt_tokens"] - 15
        for step in steps:
            assert 0 < step["executor_ms"] <= step["total_ms"] + 1 and not step["lost"]
            names = {name for name, _, _ in step["executor"]["phases"]}
            assert {"forward", "logits", "sampling"} <= names <= {"host", "forward", "logits", "sampling"}
        whats = [what for _, _, what in live.view.request_events]
        assert whats == ["queued", "admitted", "first_token", "finished"]
        generate(stack, max_tokens=2).join()
        live.until(lambda view: max(block[3] for block in view.blocks.values()) >= 1)
        live.until(lambda view: view.state["counters"]["prefix_cache_hits"] > 0)
        live.until(lambda view: view.state["latency"]["itl"]["count"] >= 20 and view.state["latency"]["ttft"]["p50"])
        chains = {block_id: block[2] for block_id, block in live.view.blocks.items() if block[1]}
        assert 0 in chains.values() and set(chains.values()) <= {0, *chains}


def test_services_die_and_are_seen_to_come_back(stack: Any) -> None:
    stack.client.wait_ready()
    with LiveClient(stack.http_address) as live:
        live.until(lambda view: all(incarnation(view, role) for role in ("tokenizer", "scheduler", "executor")))
        for role in ("tokenizer", "scheduler", "executor"):
            before = incarnation(live.view, role)
            thread = generate(stack, max_tokens=150)
            live.until(lambda view: any(r["num_output_tokens"] > 3 for r in view.requests.values()))
            stack.kill(role)
            live.until(lambda view, role=role: view.service(role) is None)
            stack.start(role)
            live.until(lambda view, role=role, before=before: incarnation(view, role) not in (None, before))
            live.until(lambda view: any(r["num_output_tokens"] > 3 for r in view.requests.values()))
            thread.join()
            live.until(lambda view: not view.requests and owned(view) == 0)
        assert [s["alive"] for s in live.view.state["services"]] == [True] * 4


def test_when_the_viewer_leaves_the_events_stop(stack: Any) -> None:
    stack.client.wait_ready()
    thread = generate(stack, max_tokens=400)
    with LiveClient(stack.http_address) as live:
        live.until(lambda view: view.requests)
    # Whoever comes next finds no account: it was given up with the last viewer.
    with LiveClient(stack.http_address) as live:
        live.until(lambda view: view.requests)
    thread.join()


def test_what_cannot_be_asked_for(stack: Any) -> None:
    for query, field in (("?interval_ms=5", "interval_ms"), ("?interval_ms=x", "interval_ms"), ("?level=all", "level"),
                         ("?nothing=1", "nothing")):  # fmt: skip
        reply = call(stack.http_address, "GET", f"/live{query}")
        assert reply.status == 400 and reply.error["param"] == field
    assert call(stack.http_address, "POST", "/live").status == 405


def test_a_gateway_that_stops_ends_the_stream(small: Any) -> None:
    running = small()
    with LiveClient(running.http_address) as live:
        live.until(lambda view: view.state["pool"])
        running.processes["gateway"].terminate()
        assert running.wait("gateway") == 0
        eventually(lambda: live.closed, 10)
