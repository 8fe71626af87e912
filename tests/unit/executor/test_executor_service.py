"""The shell with real sockets: takeover, steps, a new scheduler, signals."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from quartet.services.executor.loop import ExecutorLoop
from quartet.services.executor.service import ExecutorService
from quartet.services.executor.step_times import StepTimes
from quartet.shared.link import Identity, Peer, Status
from quartet.shared.liveness import StatusFile
from quartet.shared.messages import AnyMessage, Granted, Role, StepPlan, StepResult, Takeover
from quartet.shared.transport import Binder


class FakeRunner:
    def reset(self) -> None: ...

    def offers(self) -> tuple[bytes, bytes]:
        return b"", b""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.epoch, plan.step_id, b"")


class FakeScheduler:
    """Takes over, sends two plans with SIGUSR1 between them, and ends the process with SIGTERM when both are back."""

    def __init__(self, plans: Any) -> None:
        self.plans = plans
        self.seen: list[str] = []
        self.epoch = 0
        self.done = asyncio.Event()
        self.draining = asyncio.Event()

    def on_up(self, peer: Peer) -> None:
        peer.send(Takeover(1))

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        self.seen.append(type(message).__name__)
        if isinstance(message, Granted):
            self.epoch = message.epoch
            peer.send(self.plans.plan(0, epoch=self.epoch))
        elif isinstance(message, StepResult) and message.step_id == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            peer.send(self.plans.plan(1, epoch=self.epoch))
        elif isinstance(message, StepResult) and message.step_id == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_down(self, peer: Peer, reason: str) -> None:
        self.done.set()

    def on_status(self, peer: Peer) -> None: ...


@pytest.fixture
def keep_signals() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.timeout(30)
def test_steps_run_and_sigterm_ends_the_service(tmp_path: Path, plans: Any, keep_signals: None) -> None:
    address = f"ipc://{tmp_path}/x.sock"
    bound = threading.Event()
    seen: list[str] = []

    async def scheduler() -> None:
        fake = FakeScheduler(plans)
        binder = Binder(address, Identity(Role.SCHEDULER, "s"), fake, lambda: Status(0, 0, True))
        binder.start()
        bound.set()
        await fake.done.wait()
        seen.extend(fake.seen)
        binder.close()

    thread = threading.Thread(target=lambda: asyncio.run(scheduler()))
    thread.start()
    bound.wait()
    status_file = StatusFile(tmp_path / "executor.status")
    loop = ExecutorLoop(FakeRunner(), first_epoch=5)
    times = StepTimes()
    with structlog.testing.capture_logs() as lines:
        ExecutorService(loop, address, Identity(Role.EXECUTOR, "e"), status_file, times=times).run()
    thread.join()
    assert seen == ["Granted", "StepResult", "StepResult"]
    assert loop.num_steps == 2
    assert not status_file.path.exists()
    reports = [line for line in lines if line["event"] == "steps"]
    # One that SIGUSR1 asked for between the steps, one at the end.
    assert len(reports) == 2
    assert 0 < reports[0]["seconds"]["host"] <= reports[1]["seconds"]["host"]
    assert reports[1]["seconds"]["idle"] > 0
