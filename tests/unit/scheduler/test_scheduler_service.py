"""The glue: real links to a fake executor and a fake tokenizer, in one event loop."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from quartet.services.scheduler.service import SchedulerService
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.shared.link import Identity, Peer, Status
from quartet.shared.messages import (
    ChoicePast,
    Failed,
    FinishReason,
    ModelInfo,
    NewRequest,
    Outputs,
    Role,
    StepPlan,
    Takeover,
)
from quartet.shared.sampling_params import SamplingParams
from quartet.shared.transport import Dialer

MODEL = ModelInfo("fake", "f", 1000, 256, 64, 4, 8, 32, "float32", "cpu")


@pytest.fixture
def run_dir() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="quartet")
    yield path
    shutil.rmtree(path)


class Side:
    """A dialer that notes what it sees; `changed` is set at each event."""

    def __init__(self, address: str, identity: Identity) -> None:
        self.messages: list[Any] = []
        self.changed = asyncio.Event()
        self.answer: Callable[[Any], Any] = lambda message: None
        self.status = Status(0, 0, True)
        self.link = Dialer(address, identity, self, lambda: self.status)
        self.link.start()

    def on_up(self, peer: Peer) -> None:
        self.changed.set()

    def on_down(self, peer: Peer, reason: str) -> None:
        self.changed.set()

    def on_status(self, peer: Peer) -> None:
        self.changed.set()

    def on_message(self, peer: Peer, message: Any) -> None:
        self.messages.append(message)
        answer = self.answer(message)
        if answer is not None:
            peer.send(answer)
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await self.changed.wait()
                self.changed.clear()

    @property
    def ready(self) -> bool:
        return self.link.peer is not None and self.link.peer.ready


class Line:
    def __init__(self, run_dir: str, fake_executor: Any) -> None:
        self.settings = SchedulerSettings(run_dir=run_dir)
        self.service = SchedulerService(self.settings)
        self.sides: list[Side] = []
        self._fake_executor = fake_executor

    def executor(self, name: str = "e", answers: bool = True) -> Side:
        side = Side(self.settings.executor_address, Identity(Role.EXECUTOR, name, model=MODEL))
        fake = self._fake_executor(MODEL)

        def answer(message: Any) -> Any:
            if isinstance(message, Takeover):
                return fake.take_over()
            if answers:
                fake.receive(message)
                result = fake.step()
                fake.delivered()
                return result
            return None

        side.answer = answer
        self.sides.append(side)
        return side

    def tokenizer(self, model: ModelInfo | None = None, role: Role = Role.TOKENIZER) -> Side:
        side = Side(self.settings.tokenizer_address, Identity(role, "t", model=model))
        self.sides.append(side)
        return side


def with_line(run_dir: str, fake_executor: Any, body: Callable[[Line], Awaitable[None]]) -> None:
    async def main() -> None:
        line = Line(run_dir, fake_executor)
        await line.service.start()
        try:
            await body(line)
        finally:
            for side in line.sides:
                side.link.close()
            line.service.close()

    asyncio.run(main())


def a_request(request_id: int = 5, max_tokens: int = 9) -> NewRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return NewRequest(request_id, 1, list(range(3, 40)), sampling, [2], [ChoicePast(0)])


def outputs(side: Side) -> list[Any]:
    return [item for message in side.messages if isinstance(message, Outputs) for item in message.items]


def test_a_request_runs_and_the_model_goes_left(run_dir: str, fake_executor: Any) -> None:
    async def body(line: Line) -> None:
        tokenizer = line.tokenizer()
        await tokenizer.until(lambda: tokenizer.link.peer)
        assert not tokenizer.ready
        tokenizer.link.peer.send(a_request())  # waits for an executor
        line.executor()
        await tokenizer.until(lambda: tokenizer.ready and tokenizer.link.peer.model == MODEL)
        await tokenizer.until(lambda: outputs(tokenizer) and outputs(tokenizer)[-1].finish_reason)
        assert sum(len(item.token_ids) for item in outputs(tokenizer)) == 9
        assert outputs(tokenizer)[-1].finish_reason is FinishReason.LENGTH

    with_line(run_dir, fake_executor, body)


def test_a_second_executor_waits_until_the_first_is_gone(run_dir: str, fake_executor: Any) -> None:
    async def body(line: Line) -> None:
        first = line.executor("first", answers=False)
        await first.until(lambda: first.messages)
        second, tokenizer = line.executor("second"), line.tokenizer()
        await second.until(lambda: second.link.peer)
        await tokenizer.until(lambda: tokenizer.ready)
        tokenizer.link.peer.send(a_request())
        await first.until(lambda: sum(isinstance(m, StepPlan) for m in first.messages) == 2)
        assert not second.messages
        line.sides.remove(first)
        first.link.close()
        await tokenizer.until(lambda: outputs(tokenizer) and outputs(tokenizer)[-1].finish_reason)
        assert isinstance(second.messages[0], Takeover)

    with_line(run_dir, fake_executor, body)


def test_an_executor_may_lay_its_model_down_and_take_it_up_again(run_dir: str, fake_executor: Any) -> None:
    async def body(line: Line) -> None:
        executor, tokenizer = line.executor(), line.tokenizer()
        await tokenizer.until(lambda: tokenizer.ready)
        for model in (None, MODEL, None):
            executor.link.link.identity.model = model
            executor.link.announce_model()
            await tokenizer.until(lambda wanted=model is not None: tokenizer.ready is wanted)
        assert sum(isinstance(message, Takeover) for message in executor.messages) == 2
        line.sides.remove(executor)
        executor.link.close()
        while line.service.executor_link.peers:
            await asyncio.sleep(0)
        line.executor("next")
        await tokenizer.until(lambda: tokenizer.ready)

    with_line(run_dir, fake_executor, body)


def test_neighbours_of_the_wrong_kind_are_refused(run_dir: str, fake_executor: Any) -> None:
    async def body(line: Line) -> None:
        executor = line.executor()
        await executor.until(lambda: executor.messages)
        other = msgspec.structs.replace(MODEL, name="other", model_fingerprint="g")
        right, wrong, gateway = line.tokenizer(MODEL), line.tokenizer(other), line.tokenizer(role=Role.GATEWAY)
        await right.until(lambda: right.ready)
        assert {peer.name for peer in line.service.tokenizer_link.peers.values()} == {"t"}
        assert len(line.service.tokenizer_link.peers) == 1
        assert wrong.link.peer is None and gateway.link.peer is None

    with_line(run_dir, fake_executor, body)


def test_it_leaves_at_once_where_a_tokenizer_stays(
    run_dir: str, fake_executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quartet.services.scheduler.service.DRAIN_DECISION", 0.0)

    async def body(line: Line) -> None:
        tokenizer = line.tokenizer()
        line.executor()
        await tokenizer.until(lambda: tokenizer.ready)
        tokenizer.link.peer.send(a_request(5, max_tokens=200))
        await tokenizer.until(lambda: outputs(tokenizer))
        line.service.drain()
        async with asyncio.timeout(5):
            await line.service.drained.wait()
        assert line.service.core.num_unfinished and not line.service.core.num_in_flight
        known = len(next(iter(line.service.core.ledger.groups.values())).choices[0].token_ids)
        await tokenizer.until(lambda: outputs(tokenizer)[-1].start == known - 37 - 1)

    with_line(run_dir, fake_executor, body)


def test_an_executor_that_leaves_gets_no_more_plans_and_is_not_counted_as_dead(
    run_dir: str, fake_executor: Any
) -> None:
    async def body(line: Line) -> None:
        executor, tokenizer = line.executor(), line.tokenizer()
        await tokenizer.until(lambda: tokenizer.ready)
        tokenizer.link.peer.send(a_request(max_tokens=200))
        await tokenizer.until(lambda: outputs(tokenizer))
        executor.status = Status(0, 0, False, draining=True)
        executor.link.announce()
        core = line.service.core
        async with asyncio.timeout(5):
            while core.num_in_flight or not next(iter(line.service.executor_link.peers.values())).draining:
                await asyncio.sleep(0)
        seen = len(executor.messages)
        second = line.executor("second")
        await tokenizer.until(lambda: outputs(tokenizer)[-1].finish_reason)
        assert len(executor.messages) == seen and len(second.messages) > 3 and not core.state.died

    with_line(run_dir, fake_executor, body)


def test_a_line_that_is_stopped_as_a_whole_ends_its_requests_first(run_dir: str, fake_executor: Any) -> None:
    async def body(line: Line) -> None:
        tokenizer = line.tokenizer()
        await tokenizer.until(lambda: tokenizer.link.peer)
        tokenizer.link.peer.send(a_request(5))
        while not line.service.core.num_unfinished:
            await asyncio.sleep(0)
        line.service.drain()
        tokenizer.status = Status(0, 0, True, draining=True)
        tokenizer.link.announce()
        assert not line.service.drained.is_set()
        await tokenizer.until(lambda: tokenizer.link.peer.draining)
        async with asyncio.timeout(5):
            while not line.service.core.draining:
                await asyncio.sleep(0)
        tokenizer.link.peer.send(a_request(6))
        await tokenizer.until(lambda: any(isinstance(m, Failed) for m in tokenizer.messages))
        line.executor()
        async with asyncio.timeout(10):
            await line.service.drained.wait()
        await tokenizer.until(lambda: outputs(tokenizer) and outputs(tokenizer)[-1].finish_reason)

    with_line(run_dir, fake_executor, body)
