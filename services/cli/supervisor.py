"""What to start, stop and restart, and when: a state machine without processes or clocks of its own.

The gateway starts first, with the model's download beside it, so that a taken port is told before
anything is loaded. Then tokenizer, scheduler and executor. A child that dies is started again, the
first time at once, then with back-off. On a signal the gateway drains first, then the rest leave.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Literal, NamedTuple

from quartet.shared.config import EXIT_SETTINGS_ERROR

GATEWAY = "gateway"
FETCH = "fetch"
BEHIND_GATEWAY = ("tokenizer", "scheduler", "executor")
SERVICES = (GATEWAY, *BEHIND_GATEWAY)

FIRST_DELAY = 0.25
MAX_DELAY = 10.0
# A life as long as the longest delay starts anew: restarts never come more often than that.
HEALTHY_AFTER = 10.0
# A gateway that leaves by itself this early could not bind; later it is a crash like any other.
GATEWAY_BIND_TIME = 15.0
# One stop often arrives twice: to the process and to its group (timeout, make, some init programs).
SAME_SIGNAL = 0.5


class Backoff:
    """Delay before each restart: 0, then 0.25 s doubling up to 10 s; a life of 10 s starts anew."""

    def __init__(self) -> None:
        self._next = 0.0

    def delay_after(self, lifetime: float) -> float:
        if lifetime >= HEALTHY_AFTER:
            self._next = 0.0
        delay = self._next
        self._next = min(MAX_DELAY, delay * 2) if delay else FIRST_DELAY
        return delay


class Action(NamedTuple):
    kind: Literal["start", "terminate", "kill"]
    name: str


class Phase(enum.Enum):
    STARTING = "starting"  # gateway and download only
    RUNNING = "running"
    DRAINING = "draining"  # the gateway was asked to leave; the others still serve its streams
    STOPPING = "stopping"
    DONE = "done"


class _Child:
    def __init__(self) -> None:
        self.alive = False
        self.lives = 0
        self.started_at = 0.0
        self.start_at: float | None = None
        self.backoff = Backoff()


class Supervisor:
    """Tell it what happened (`on_exit`, `on_signal`), then do what `poll` returns. Over when `phase` is DONE;
    `exit_code` and `message` then say how it ended."""

    def __init__(
        self, clock: Callable[[], float], drain_timeout: float = 60.0, stop_timeout: float = 5.0, fetch: bool = True
    ) -> None:
        self._clock = clock
        self._drain_timeout = drain_timeout
        self._stop_timeout = stop_timeout
        self._children = {name: _Child() for name in (*SERVICES, *((FETCH,) if fetch else ()))}
        self._fetched = not fetch
        self._signalled_at: float | None = None
        self._deadline: float | None = None
        self._actions: list[Action] = []
        self.phase = Phase.STARTING
        self.exit_code = 0
        self.message = ""
        for name in (GATEWAY, FETCH) if fetch else (GATEWAY,):
            self._children[name].start_at = clock()

    def alive(self, name: str) -> bool:
        return name in self._children and self._children[name].alive

    def poll(self, gateway_bound: bool = False) -> list[Action]:
        """What to do now. `gateway_bound`: the gateway's process is seen to listen."""
        now = self._clock()
        if self.phase is Phase.STARTING and self._fetched and gateway_bound:
            self.phase = Phase.RUNNING
            for name in BEHIND_GATEWAY:
                self._children[name].start_at = now
        if self.phase is Phase.DRAINING and not self.alive(GATEWAY):
            self._stop()
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._kill_all() if self.phase is Phase.STOPPING else self._do("kill", GATEWAY)
        if self.phase is Phase.STOPPING and not any(child.alive for child in self._children.values()):
            self.phase = Phase.DONE
        for name, child in self._children.items():
            if child.start_at is not None and child.start_at <= now:
                child.start_at, child.started_at, child.alive = None, now, True
                child.lives += 1
                self._do("start", name)
        actions, self._actions = self._actions, []
        return actions

    def next_poll(self) -> float | None:
        """Seconds until `poll` has something to do by itself; None when only an event can bring it."""
        times = [child.start_at for child in self._children.values() if child.start_at is not None]
        times += [self._deadline] if self._deadline is not None else []
        return max(0.0, min(times) - self._clock()) if times else None

    def on_exit(self, name: str, returncode: int) -> float | None:
        """A child is gone (negative `returncode`: by that signal). Returns the delay before its restart, if any."""
        child = self._children[name]
        child.alive = False
        lifetime = self._clock() - child.started_at
        if self.phase in (Phase.STOPPING, Phase.DONE) or (self.phase is Phase.DRAINING and name == GATEWAY):
            return None
        if name == FETCH:
            self._fetched = returncode == 0
            if returncode:
                self._fail(max(returncode, 1), "the model could not be fetched")
            return None
        if returncode == EXIT_SETTINGS_ERROR and child.lives == 1:
            self._fail(returncode, f"{name} does not accept its settings")
            return None
        if name == GATEWAY and child.lives == 1 and returncode > 0 and lifetime < GATEWAY_BIND_TIME:
            self._fail(returncode, "the gateway could not start")
            return None
        delay = child.backoff.delay_after(lifetime)
        child.start_at = self._clock() + delay
        return delay

    def on_signal(self) -> None:
        """The first one drains, a later one kills."""
        now = self._clock()
        if self.phase is Phase.DONE or (self._signalled_at is not None and now - self._signalled_at < SAME_SIGNAL):
            return
        again, self._signalled_at = self._signalled_at is not None, now
        if again:
            self.exit_code = self.exit_code or 1
            self.message = self.message or "forced by a second signal"
            self.phase = Phase.STOPPING
            self._cancel_starts()
            self._kill_all()
        elif self.phase is Phase.RUNNING and self.alive(GATEWAY):
            self.phase = Phase.DRAINING
            self._children[GATEWAY].start_at = None
            self._deadline = self._clock() + self._drain_timeout
            self._do("terminate", GATEWAY)
        elif self.phase in (Phase.STARTING, Phase.RUNNING):
            self._stop()

    def _fail(self, exit_code: int, message: str) -> None:
        self.exit_code, self.message = exit_code, message
        self._stop()

    def _stop(self) -> None:
        self.phase = Phase.STOPPING
        self._cancel_starts()
        self._deadline = self._clock() + self._stop_timeout
        for name, child in self._children.items():
            if child.alive:
                self._do("terminate", name)

    def _cancel_starts(self) -> None:
        for child in self._children.values():
            child.start_at = None

    def _kill_all(self) -> None:
        for name, child in self._children.items():
            if child.alive:
                self._do("kill", name)

    def _do(self, kind: Literal["start", "terminate", "kill"], name: str) -> None:
        self._actions.append(Action(kind, name))
