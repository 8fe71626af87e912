"""Lines of real processes that a test may break, and streams that run on them meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.client import Client as PlainClient
from support.stack import Stack, eventually

from quartet.shared.client import Client

PROMPTS = (
    "Once upon a time",
    "The history of Rome began when",
    "def quicksort(array):",
    "My dear friend, I must tell you",
    "Ingredients: two eggs and",
    "The mitochondria are",
)


class Stream:
    """One stream of the shipped client, followed in a thread. `times` are those of its chunks."""

    def __init__(self, address: str, prompt: str, options: dict[str, Any]) -> None:
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.text = ""
        self.times: list[float] = []
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self._address = address
        self._options = options
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            with Client(self._address) as client:
                self.generation = client.generate(self.prompt, **self._options)
                for chunk in self.generation:
                    assert chunk.start == len(self.token_ids), "a gap, or a token told again"
                    self.token_ids += chunk.token_ids
                    self.text += chunk.text
                    self.times.append(time.monotonic())
                    self.finish_reason = chunk.finish_reason
                self.usage = self.generation.usage
        except Exception as error:
            self.error = error

    def join(self, timeout: float = 120.0) -> None:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"{self.prompt!r} never ended: {len(self.token_ids)} tokens"

    def longest_pause(self, since: float) -> float:
        """Of those that ended after `since`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((b - max(a, since) for a, b in pairs if b > since), default=0.0)


class Streams:
    """The same greedy streams for all: what they say is what an undisturbed run says."""

    def __init__(self, stack: Stack, num: int, **options: Any) -> None:
        self.stack = stack
        options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 120} | options
        self.options = options
        self.all = [Stream(stack.address, PROMPTS[i % len(PROMPTS)], options) for i in range(num)]

    def begun(self, num_tokens: int = 5) -> Streams:
        eventually(
            lambda: all(s.error or len(s.token_ids) >= num_tokens for s in self.all), 60, "the streams never began"
        )
        return self

    def check(self) -> None:
        """Every stream has ended well, and says what it says when nothing happens."""
        for stream in self.all:
            stream.join()
        errors = [stream.error for stream in self.all if stream.error]
        assert not errors, f"{errors}\n{self.stack.tail()}"
        undisturbed: dict[str, Stream] = {}
        for stream in self.all:
            if stream.prompt not in undisturbed:
                undisturbed[stream.prompt] = Stream(self.stack.address, stream.prompt, self.options)
        for stream in self.all:
            expected = undisturbed[stream.prompt]
            expected.join()
            assert stream.token_ids == expected.token_ids and stream.text == expected.text
            assert stream.finish_reason == expected.finish_reason


@pytest.fixture
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Stack]]:
    """`line(section_field=value)` starts a line; `without` names services that the test starts itself."""
    stacks: list[Stack] = []

    def start(*, without: tuple[str, ...] = (), **settings: Any) -> Stack:
        defaults = {"executor_dtype": "float32", "executor_max_model_len": 1024, "executor_num_blocks": 512}
        stack = Stack(tmp_path_factory.mktemp("line"), **(defaults | settings))
        stacks.append(stack)
        stack.start(*(role for role in ("gateway", "tokenizer", "scheduler", "executor") if role not in without))
        stack.client = PlainClient(stack.address)
        if not without:
            stack.client.wait_ready(90)
        return stack

    yield start
    for stack in stacks:
        stack.client.close()
        stack.stop()


@pytest.fixture
def streams() -> Callable[..., Streams]:
    return Streams
