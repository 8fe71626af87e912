"""Services are replaced one by one under load, by SIGTERM and by death, and no stream fails."""

import itertools
import signal
import time
from typing import Any

import pytest
from support.stack import eventually

# Generous: a busy machine takes seconds to start a process, but none is started between leaving and going on.
MAX_STALL = 5.0


def num_tokenizers(stack: Any) -> int:
    from quartet.shared.pb import inference_pb2 as pb

    info = stack.client.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
    return sum(t.ready and not t.draining for t in info.tokenizers)


def test_tokenizer_and_scheduler_are_upgraded_under_load(line: Any, streams: Any) -> None:
    stack = line()
    running = streams(stack, 6, max_tokens=160).begun()

    stack.start("tokenizer-2")
    eventually(lambda: num_tokenizers(stack) == 2, 30)
    at = time.monotonic()
    stack.signal("tokenizer", signal.SIGTERM)
    assert stack.processes.pop("tokenizer").wait(20) == 0
    assert max(s.longest_pause(at) for s in running.all) < MAX_STALL
    assert any(s.finish_reason is None for s in running.all), "it waited for the streams to end"

    stack.start("scheduler-2")
    eventually(lambda: b"waiting for the other scheduler" in stack.log("scheduler-2").read_bytes(), 30)
    at = time.monotonic()
    stack.signal("scheduler", signal.SIGTERM)
    assert stack.processes.pop("scheduler").wait(20) == 0
    eventually(lambda: all(s.error or s.times[-1] > at + 0.5 or s.finish_reason for s in running.all), 30)
    assert max(s.longest_pause(at) for s in running.all) < MAX_STALL
    running.check()


@pytest.mark.slow
def test_two_tokenizers_share_load_and_a_death_moves_streams(line: Any, streams: Any) -> None:
    from quartet.shared.pb import inference_pb2 as pb

    stack = line()
    stack.start("tokenizer-2")
    eventually(lambda: num_tokenizers(stack) == 2, 30)
    running = streams(stack, 6, max_tokens=200).begun()
    info = stack.client.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
    assert sorted(t.num_open_streams for t in info.tokenizers) == [3, 3]
    stack.kill("tokenizer")
    running.check()
    assert num_tokenizers(stack) == 1


@pytest.mark.slow
def test_an_executor_is_upgraded_under_load_without_a_death(line: Any, streams: Any) -> None:
    stack = line()
    running = streams(stack, 4, max_tokens=150).begun()
    stack.start("executor-2")
    eventually(lambda: b"a second executor" in stack.log("scheduler").read_bytes(), 60)
    at = time.monotonic()
    stack.signal("executor", signal.SIGTERM)
    assert stack.processes.pop("executor").wait(20) == 0
    running.check()
    assert max(s.longest_pause(at) for s in running.all) < MAX_STALL


@pytest.mark.slow
def test_the_scheduler_hands_over_again_and_again(line: Any, streams: Any) -> None:
    stack = line()
    running = streams(stack, 4, max_tokens=300).begun()
    names = ["scheduler", *(f"scheduler-{i}" for i in range(2, 7))]
    for old, new in itertools.pairwise(names):
        stack.start(new)
        eventually(lambda new=new: b"waiting for the other scheduler" in stack.log(new).read_bytes(), 30)
        at = time.monotonic()
        stack.signal(old, signal.SIGTERM)
        assert stack.processes.pop(old).wait(20) == 0
        eventually(lambda at=at: all(s.error or s.times[-1] > at + 0.3 or s.finish_reason for s in running.all), 30)
    running.check()
