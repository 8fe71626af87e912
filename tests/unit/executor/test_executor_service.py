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

from quartet.services.executor.loop import AnsweredStep, ExecutorLoop
from quartet.services.executor.service import QUIET, ExecutorService
from quartet.services.executor.step_times import StepTimes
from quartet.shared.link import Identity, Peer, Status
from quartet.shared.liveness import StatusFile
from quartet.shared.messages import AnyMessage, Granted, Role, StepPlan, StepResult, Takeover, Vocabulary
from quartet.shared.thread_dialer import ThreadDialer
from quartet.shared.transport import Binder


class FakeRunner:
    def reset(self) -> None: ...

    def offers(self) -> tuple[bytes, bytes]:
        return b"", b""

    def add_vocabulary(self, part: Vocabulary) -> None: ...

    def erase_hashes(self) -> None: ...

    def launch(self, plan: StepPlan) -> AnsweredStep:
        return AnsweredStep(StepResult(plan.epoch, plan.step_id, b""))


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


def serve(tmp_path: Path, fake: FakeScheduler, runner: Any, **arguments: Any) -> ExecutorLoop:
    """Runs the service in this thread until `fake` has ended it."""
    address = f"ipc://{tmp_path}/x.sock"
    bound = threading.Event()

    async def scheduler() -> None:
        binder = Binder(address, Identity(Role.SCHEDULER, "s"), fake, lambda: Status(0, 0, True))
        binder.start()
        bound.set()
        await fake.done.wait()
        binder.close()

    thread = threading.Thread(target=lambda: asyncio.run(scheduler()))
    thread.start()
    bound.wait()
    loop = ExecutorLoop(runner, first_epoch=5)
    ExecutorService(loop, address, Identity(Role.EXECUTOR, "e"), **arguments).run()
    thread.join()
    return loop


@pytest.mark.timeout(30)
def test_steps_run_and_sigterm_ends_the_service(tmp_path: Path, plans: Any, keep_signals: None) -> None:
    fake, times = FakeScheduler(plans), StepTimes()
    status_file = StatusFile(tmp_path / "executor.status")
    with structlog.testing.capture_logs() as lines:
        loop = serve(tmp_path, fake, FakeRunner(), status_file=status_file, times=times)
    assert fake.seen == ["Granted", "StepResult", "StepResult"]
    assert loop.num_steps == 2
    assert not status_file.path.exists()
    reports = [line for line in lines if line["event"] == "steps"]
    # One that SIGUSR1 asked for between the steps, one at the end.
    assert len(reports) == 2
    assert 0 < reports[0]["seconds"]["host"] <= reports[1]["seconds"]["host"]
    assert reports[1]["seconds"]["idle"] > 0


class OverlappingRunner(FakeRunner):
    """The first step ends only when the second one has been launched."""

    def __init__(self) -> None:
        self.launched = [threading.Event(), threading.Event()]

    def launch(self, plan: StepPlan) -> Any:
        self.launched[plan.step_id].set()
        return OverlappingStep(self.launched[1], super().launch(plan).answer)


class OverlappingStep:
    def __init__(self, until: threading.Event, answer: Any) -> None:
        self.until, self.answer, self.is_ready = until, answer, False

    def wait(self) -> None:
        self.until.wait()
        self.is_ready = True

    def result(self) -> Any:
        assert self.is_ready
        return self.answer


class HastyScheduler(FakeScheduler):
    """Sends both plans at once."""

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        self.seen.append(type(message).__name__)
        if isinstance(message, Granted):
            for step_id in (0, 1):
                peer.send(self.plans.plan(step_id, epoch=message.epoch))
        elif isinstance(message, StepResult):
            self.seen.append(str(message.step_id))
            if message.step_id == 1:
                os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.timeout(30)
def test_a_plan_is_launched_while_the_one_before_is_computed(tmp_path: Path, plans: Any, keep_signals: None) -> None:
    fake = HastyScheduler(plans)
    loop = serve(tmp_path, fake, OverlappingRunner(), status_file=None)
    assert fake.seen == ["Granted", "StepResult", "0", "StepResult", "1"]
    assert loop.num_steps == 2


class PatientScheduler(FakeScheduler):
    """Sends one plan when it is told to go on, and ends the process when it is told so again."""

    def __init__(self, plans: Any) -> None:
        super().__init__(plans)
        self.at_rest = threading.Event()

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        self.seen.append(type(message).__name__)
        if isinstance(message, Granted):
            self.peer, self.epoch, self.loop = peer, message.epoch, asyncio.get_running_loop()
        self.at_rest.set()

    def go_on(self) -> None:
        self.at_rest.clear()
        if "StepResult" in self.seen:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.loop.call_soon_threadsafe(lambda: self.peer.send(self.plans.plan(0, epoch=self.epoch)))


class IdleTime:
    """Three pieces of work once the service is taken over, and one after a step; each time all is done the scheduler
    goes on."""

    def __init__(self, fake: PatientScheduler) -> None:
        self.fake = fake
        self.left = 3
        self.answers: list[bool] = []

    def use(self) -> bool:
        if not self.fake.at_rest.is_set():
            return True
        self.left -= 1
        self.answers.append(self.left > 0)
        if self.left <= 0:
            self.left = 1
            self.fake.go_on()
        return self.answers[-1]


@pytest.mark.timeout(30)
def test_time_in_which_nothing_comes_is_used_again_after_each_step(
    tmp_path: Path, plans: Any, keep_signals: None
) -> None:
    fake = PatientScheduler(plans)
    idle_time = IdleTime(fake)
    loop = serve(tmp_path, fake, FakeRunner(), status_file=None, use_idle_time=idle_time.use)
    assert fake.seen == ["Granted", "StepResult"]
    assert loop.num_steps == 1
    assert idle_time.answers == [True, True, False, False]


class EndlessIdleTime(IdleTime):
    """There is always more to do; the scheduler goes on while some of it is done."""

    def use(self) -> bool:
        super().use()
        return True


@pytest.mark.timeout(30)
def test_what_comes_meanwhile_puts_off_the_rest_of_it(
    tmp_path: Path, plans: Any, keep_signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []
    wait, handle = ThreadDialer.wait, ExecutorLoop.handle

    def logged_wait(self: ThreadDialer, timeout: float | None = None) -> bool:
        events.append(timeout)
        return wait(self, timeout)

    def logged_handle(self: ExecutorLoop, message: Any) -> Any:
        events.append(type(message).__name__)
        return handle(self, message)

    monkeypatch.setattr(ThreadDialer, "wait", logged_wait)
    monkeypatch.setattr(ExecutorLoop, "handle", logged_handle)
    fake = PatientScheduler(plans)
    serve(tmp_path, fake, FakeRunner(), status_file=None, use_idle_time=EndlessIdleTime(fake).use)
    assert fake.seen == ["Granted", "StepResult"]
    assert 0.0 in events[: events.index("StepPlan")]
    assert events[events.index("StepPlan") + 1] == QUIET
