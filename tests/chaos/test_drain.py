"""SIGTERM lets running streams end, refuses new ones, and nothing waits for somebody who is gone."""

import signal
import threading
import time
from typing import Any

import grpc
import pytest
from support.stack import eventually


@pytest.mark.slow
def test_the_gateway_refuses_new_work_and_lets_streams_end(line: Any, streams: Any) -> None:
    stack = line()
    running = streams(stack, 3, max_tokens=60).begun()
    stack.signal("gateway", signal.SIGTERM)
    eventually(lambda: b"draining" in stack.log("gateway").read_bytes(), 10)
    assert "shutting down" in stack.client.refused("Hello", grpc.StatusCode.UNAVAILABLE, max_tokens=2)
    for stream in running.all:
        stream.join()
        assert not stream.error and len(stream.token_ids) == 60
    assert stack.processes.pop("gateway").wait(10) == 0
    started = time.monotonic()
    for name in ("tokenizer", "scheduler", "executor"):
        stack.signal(name, signal.SIGTERM)
        assert stack.processes.pop(name).wait(10) == 0
    assert time.monotonic() - started < 5.0, "they waited for a gateway that is gone"


@pytest.mark.slow
def test_a_bound_ends_the_drain(line: Any, streams: Any) -> None:
    stack = line(gateway_drain_timeout=1.0)
    stream = stack.client.stream("Once upon a time", temperature=0.0, max_tokens=900, ignore_eos=True)
    next(stream)
    stack.signal("gateway", signal.SIGTERM)
    with pytest.raises(grpc.RpcError) as error:
        for _ in stream:
            pass
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert stack.processes.pop("gateway").wait(10) == 0
    # The request lives on in the tokenizer for whoever attaches, but nobody drains for it.
    codes = stack.stop()
    assert set(codes.values()) == {0}, codes


@pytest.mark.slow
def test_all_are_stopped_at_once_and_streams_end_first(line: Any, streams: Any) -> None:
    stack = line()
    running = streams(stack, 3, max_tokens=80).begun()
    for process in stack.processes.values():
        process.send_signal(signal.SIGTERM)
    for stream in running.all:
        stream.join()
        assert not stream.error and len(stream.token_ids) == 80, stack.tail()
    assert {name: process.wait(20) for name, process in stack.processes.items()} == dict.fromkeys(stack.processes, 0)
    left = [p.name for p in stack.run_dir.iterdir() if not p.name.endswith(".lock")]
    assert not left, f"left behind: {left}"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["gateway", "tokenizer"])
def test_a_second_signal_forces(line: Any, victim: str) -> None:
    stack = line()
    stream = stack.client.stream("Once upon a time", temperature=0.0, max_tokens=900, ignore_eos=True)
    next(stream)
    reader = threading.Thread(target=lambda: exhaust(stream))
    reader.start()
    stack.signal(victim, signal.SIGTERM)
    eventually(lambda: b"draining" in stack.log(victim).read_bytes(), 10)
    assert stack.processes[victim].poll() is None
    stack.signal(victim, signal.SIGTERM)
    assert stack.processes.pop(victim).wait(5) != 0
    stream.cancel()
    reader.join(10)


def exhaust(stream: Any) -> None:
    try:
        for _ in stream:
            pass
    except grpc.RpcError:
        pass
