"""The executor's shell: the main thread takes plans and runs steps, the link's beats meanwhile, signals end it."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

from quartet.services.executor.loop import ExecutorLoop
from quartet.services.executor.step_times import StepTimes
from quartet.services.executor.step_timing import StepTiming
from quartet.services.executor.step_waiter import StepWaiter
from quartet.shared.link import Identity, Link, Peer, Status
from quartet.shared.liveness import StatusFile
from quartet.shared.log import get_logger
from quartet.shared.messages import AnyMessage, Message, Role, StepPlan, StepResult, Takeover, WatchSteps
from quartet.shared.thread_dialer import ThreadDialer

DRAIN_DECISION = 0.3
LEAVE_POLL = 0.02
# After so many seconds without a plan no traced row is decoding any more.
REST = 0.5
# After so many the time may be used for something else.
QUIET = 0.03

_log = get_logger()


class ExecutorService:
    """Serves the scheduler at `address` until SIGTERM or SIGINT; a second signal ends it at once.

    Where the time of its steps went is logged at the end, and whenever SIGUSR1 asks.
    """

    def __init__(
        self,
        loop: ExecutorLoop,
        address: str,
        identity: Identity,
        status_file: StatusFile | None,
        curve_keys: str = "",
        drain_timeout: float = 30.0,
        times: StepTimes | None = None,
        use_idle_time: Callable[[], bool] = lambda: False,
    ) -> None:
        """`use_idle_time` is called while nothing comes, for some milliseconds' work each time, until it says that
        there is no more to do."""
        self._loop = loop
        self._times = StepTimes() if times is None else times
        self._timing = StepTiming(self._times)
        self._use_idle_time = use_idle_time
        # How long nothing must come until it is; None: there is nothing to do.
        self._rest_after: float | None = QUIET
        self._report_due = False
        # Who waits for the answers of loop.in_flight, in its order.
        self._askers: deque[Peer] = deque()
        self._waiter = StepWaiter(lambda: self._link.wake())
        self._inbox: deque[tuple[Peer, AnyMessage]] = deque()
        # Written under the link's lock, and by the main thread.
        self._num_received = 0
        self._num_handled = 0
        self._stopping = False
        self._stopped_at = 0.0
        self._drain_timeout = drain_timeout
        self._address = address
        self._link = ThreadDialer(
            address,
            identity,
            self,
            self._status,
            expect=Role.SCHEDULER,
            status_file=status_file,
            curve_keys=curve_keys,
            attended=True,
        )
        self._status_file = status_file

    def run(self) -> None:
        """Blocks in the main thread; returns soon after the first signal, with the plans that had come run to
        their end. Where the scheduler is draining too, the line is being stopped: then it serves until that
        one has gone, for at most `drain_timeout` seconds."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_report_signal)
        self._link.start()
        _log.info("ready", scheduler_link=self._address)
        while not self._may_leave():
            if not self._inbox:
                self._link.read()
            if self._inbox:
                self._handle(*self._inbox.popleft())
            else:
                self._times.spent("host")
                if not self._link.wait(self._patience()) and not self._loop.in_flight:
                    self._rest()
                self._times.spent("idle")
            if self._report_due:
                self._report_due = False
                self._report()
            self._answer_finished()
            self._times.spent("host")
        self._waiter.close()
        self._link.close()
        if self._status_file is not None:
            self._status_file.remove()
        self._report()
        _log.info("stopped", num_steps=self._loop.num_steps)

    def _patience(self) -> float | None:
        if self._stopping:
            return LEAVE_POLL
        spans = self._loop.spans
        if spans is not None and spans.any:
            return REST
        return None if self._loop.in_flight else self._rest_after

    def _rest(self) -> None:
        spans = self._loop.spans
        if spans is not None and spans.any:
            spans.end_all()
        elif self._rest_after is not None and not self._stopping:
            self._rest_after = 0.0 if self._use_idle_time() else None

    def _handle(self, peer: Peer, message: AnyMessage) -> None:
        if not peer.alive:
            self._num_handled += 1
            return
        if isinstance(message, WatchSteps):
            self._timing.enable(message.enabled)
            self._num_handled += 1
            return
        if isinstance(message, StepPlan):
            self._timing.begin(message)
            self._rest_after = QUIET
        answer = self._loop.handle(message)
        self._timing.pause()
        if isinstance(message, Takeover):
            self._timing.enable(False)
            self._num_handled += len(self._askers)
            self._askers.clear()
        if answer is None and len(self._loop.in_flight) > len(self._askers):
            self._askers.append(peer)
            self._waiter.wait_for(self._loop.in_flight[-1][1])
            return
        if answer is not None:
            self._send(answer, peer)
        self._num_handled += 1

    def _answer_finished(self) -> None:
        """Of the steps in flight, in order."""
        while self._askers and (not self._loop.in_flight or self._loop.in_flight[0][1].is_ready):
            peer = self._askers.popleft()
            # A failure takes with it what was in flight after it.
            if self._loop.in_flight:
                self._timing.resume(self._loop.in_flight[0][0])
                answer = self._loop.finish()
                self._timing.pause()
                if peer.alive:
                    self._send(answer, peer)
            self._num_handled += 1

    def _send(self, answer: Message, peer: Peer) -> None:
        if isinstance(answer, StepResult) and (timed := self._timing.end(answer.epoch, answer.step_id)) is not None:
            self._link.send(timed, peer)
        self._link.send(answer, peer)

    def _status(self) -> Status:
        # handled first: read the other way round, outstanding could come out negative.
        handled = self._num_handled
        return Status(
            progress=handled,
            outstanding=self._num_received - handled,
            ready=not self._stopping,
            draining=self._stopping,
        )

    def _may_leave(self) -> bool:
        if self._stopping and not self._inbox:
            # Plans that came during the last step are to be run.
            self._link.read()
        if not self._stopping or self._inbox or self._askers:
            return False
        waited, scheduler = time.monotonic() - self._stopped_at, self._link.peer
        if scheduler is None or not scheduler.alive or waited > self._drain_timeout:
            return True
        # Who was stopped together with this process has said so by then.
        return waited > DRAIN_DECISION and not scheduler.draining

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._stopping:
            os._exit(128 + signum)
        self._stopping = True
        self._stopped_at = time.monotonic()
        self._link.wake()
        self._link.announce()

    def _on_report_signal(self, signum: int, frame: FrameType | None) -> None:
        # Not logged here: the line that the signal interrupts may be half written.
        self._report_due = True
        self._link.wake()

    @property
    def link(self) -> Link:
        return self._link.link

    def _report(self) -> None:
        _log.info("steps", **self._times.totals())

    # --- called in whichever thread reads ---------------------------------------------------------

    def on_up(self, peer: Peer) -> None:
        _log.info("scheduler connected", peer=peer.name)

    def on_down(self, peer: Peer, reason: str) -> None:
        _log.info("scheduler gone", peer=peer.name, reason=reason)

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        self._num_received += 1
        self._inbox.append((peer, message))

    def on_status(self, peer: Peer) -> None:
        pass


def first_epoch() -> int:
    """Larger than any that a process started earlier on this machine can have reached by takeovers."""
    return time.time_ns() // 1000
