"""/live over the real line: blocks, requests, steps and services as they come, go and come back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.client import Client
from support.http import call
from support.live_client import LiveClient
from support.live_view import LiveView
from support.stack import Stack, eventually
from support.tiny_model import make_tiny_llama

OPTIONS = {"temperature": 0.0, "ignore_eos": True}
PROMPT = "A long time ago, in a village by the sea, there lived an old fisherman who had seen many storms."
NUM_BLOCKS = 256


def start(folder: Any, model: Any) -> Stack:
    stack = Stack(
        folder,
        model=model,
        tokenizer_tokenizer="byte",
        executor_dtype="float32",
        executor_max_model_len=1024,
        executor_num_blocks=NUM_BLOCKS,
    ).start()
    stack.client = Client(stack.address)  # type: ignore[attr-defined]
    stack.client.wait_ready()  # type: ignore[attr-defined]
    return stack


def stop(stack: Any) -> None:
    stack.client.close()
    codes = stack.stop()
    assert set(codes.values()) <= {0}, f"{codes}\n{stack.tail()}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("live_tiny")
    make_tiny_llama(folder, 1024)
    return folder


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Iterator[Any]:
    running = start(tmp_path_factory.mktemp("live"), model)
    yield running
    stop(running)


def generate(line: Any, max_tokens: int) -> None:
    line.client.generate(PROMPT, timeout=300, max_tokens=max_tokens, **OPTIONS)


@contextlib.contextmanager
def load(line: Any) -> Iterator[None]:
    """One request after the other meanwhile."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            generate(line, 300)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def owned(view: LiveView) -> int:
    return sum(block[0] > 0 for block in view.blocks.values())


def cached(view: LiveView) -> int:
    return sum(block[0] == 0 and block[1] != "" for block in view.blocks.values())


def incarnation(view: LiveView, role: str) -> str | None:
    service = view.service(role)
    return service["incarnation"] if service and service["ready"] else None


def test_what_is_seen_of_a_request(line: Any) -> None:
    with LiveClient(line.http_address, "?interval_ms=50&level=trace") as live:
        live.until(lambda view: view.state["pool"] and incarnation(view, "executor"))
        assert [s["role"] for s in live.view.state["services"]] == ["gateway", "tokenizer", "scheduler", "executor"]
        assert live.view.state["pool"]["num_blocks"] == NUM_BLOCKS
        with load(line):
            live.until(lambda view: owned(view) >= 8 and any(view.tables.values()))
        live.until(lambda view: view.ended and not view.requests and owned(view) == 0)
        assert cached(live.view) >= len(PROMPT) // 16
        ended = list(live.view.ended.values())
        assert {(e["state"], e["num_output_tokens"], e["num_prompt_tokens"]) for e in ended} == {
            ("finished", 300, ended[0]["num_prompt_tokens"])
        }
        steps = [step for step in live.view.steps.values() if step["executor"]]
        assert sum(step["num_decode_tokens"] for step in steps) >= 200
        for step in steps:
            assert 0 < step["executor_ms"] <= step["total_ms"] + 1 and not step["lost"]
            names = {name for name, _, _ in step["executor"]["phases"]}
            assert {"forward", "logits", "sampling"} <= names <= {"host", "forward", "logits", "sampling"}
        key = ended[0]["key"]
        whats = [what for _, told, what in live.view.request_events if told == key]
        assert whats == ["queued", "admitted", "first_token", "finished"]
        request_id = ended[0]["request_id"]

        def of_stream(view: LiveView) -> list[str]:
            return [what for _, told, what in view.stream_events if told == request_id]

        live.until(lambda view: of_stream(view)[-1:] == ["finished"])
        assert of_stream(live.view) == ["opened", "accepted", "first_token", "finished"]
        live.until(lambda view: {span[2] for span in view.spans} == {"tokenize", "detokenize", "deltas"})
        at = {what: t for t, told, what in live.view.stream_events if told == request_id}
        (encoded,) = [span for span in live.view.spans if span[6] == request_id]
        assert encoded[:3] == ["tokenizer", live.view.service("tokenizer")["name"], "tokenize"]
        # Two processes on one host, each with one look at the wall clock.
        assert at["opened"] - 0.1 < encoded[3] < at["accepted"] + 0.1 and 0 < encoded[4] < 10_000
        assert sum(span[5] for span in live.view.spans if span[2] == "deltas") >= 200
        generate(line, 2)
        live.until(lambda view: max(block[3] for block in view.blocks.values()) >= 1)
        live.until(lambda view: view.state["counters"]["prefix_cache_hits"] > 0)
        generate(line, 30)
        live.until(lambda view: view.state["latency"]["itl"]["count"] >= 20 and view.state["latency"]["ttft"]["p50"])
        chains = {block_id: block[2] for block_id, block in live.view.blocks.items() if block[1]}
        assert 0 in chains.values() and set(chains.values()) <= {0, *chains}


def test_services_die_and_are_seen_to_come_back(line: Any) -> None:
    with LiveClient(line.http_address) as live, load(line):
        live.until(lambda view: all(incarnation(view, role) for role in ("tokenizer", "scheduler", "executor")))
        for role in ("tokenizer", "scheduler", "executor"):
            live.until(lambda view: any(r["num_output_tokens"] > 3 for r in view.requests.values()))
            before = incarnation(live.view, role)
            assert before is not None
            line.kill(role)
            live.until(lambda view, role=role: view.service(role) is None)
            line.start(role)
            live.until(lambda view, role=role, before=before: incarnation(view, role) not in (None, before))
            told = live.view.state["counters"]["output_tokens"]
            live.until(lambda view, told=told: view.state["counters"]["output_tokens"] not in range(told + 20))
        live.until(lambda view: all(service["alive"] for service in view.state["services"]))
        assert len(live.view.state["services"]) == 4


def test_who_comes_after_the_last_has_left_gets_a_new_account(line: Any) -> None:
    with load(line):
        for _ in range(2):
            with LiveClient(line.http_address) as live:
                live.until(lambda view: view.requests and view.steps)
                assert live.view.num_snapshots <= 2


def test_what_cannot_be_asked_for(line: Any) -> None:
    for query, field in (
        ("?interval_ms=5", "interval_ms"),
        ("?interval_ms=x", "interval_ms"),
        ("?interval_ms=99999999999999999999", "interval_ms"),
        ("?level=all", "level"),
        ("?nothing=1", "nothing"),
    ):
        reply = call(line.http_address, "GET", f"/live{query}")
        assert reply.status == 400 and reply.error["param"] == field
    assert call(line.http_address, "POST", "/live").status == 405


def test_a_gateway_that_stops_ends_the_stream(tmp_path: Any, model: Any) -> None:
    running = start(tmp_path, model)
    with LiveClient(running.http_address, "?interval_ms=10000") as live:
        live.until(lambda view: view.state["pool"])
        running.signal("gateway", 15)
        assert running.wait("gateway", 30) == 0
        eventually(lambda: live.closed, 10)
    stop(running)
