"""One run: virtual time, chance from a seed, the line of services, clients, faults, and what must hold.

World(seed).run()      raises Violation, with the trace of what happened
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog
from simulation.loop import Dies, SimLoop, installed
from simulation.network import Network
from simulation.processes import NODES
from simulation.profile import Profile, make_clients

from quartet.shared.messages import Role

if TYPE_CHECKING:
    from simulation.client import Client

    from quartet.shared.link import Peer
    from quartet.shared.messages import AnyMessage

# Virtual seconds in which all streams must end once faults have ceased, and then nothing be left.
LIVENESS = 300.0
QUIET = 60.0
# And so soon after the last fault no client is turned away any more.
RECOVERED = 15.0
MAX_EVENTS = 200_000


class Violation(AssertionError):
    """Something that must never be."""


class Event:
    """`fn` None: cancelled."""

    __slots__ = ("args", "fn", "process", "time")

    def __init__(self, time: float, process: Process | None, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.time = time
        self.process = process
        self.fn: Callable[..., Any] | None = fn
        self.args = args


class Process:
    """One life of a service; a restart is another Process. While frozen, what happens to it waits."""

    def __init__(self, world: World, slot: str, number: int) -> None:
        self.slot = slot
        self.name = f"{slot}#{number}"
        self.alive = True
        self.frozen = False
        self.leaving = False
        self.backlog: deque[Event] = deque()
        self.loop = SimLoop(world, self)
        self.check: Callable[[], None] | None = None
        self.node: Any = None


@dataclass
class Slot:
    """A service's place in the line, whoever fills it. `due`: a restart is under way."""

    name: str
    role: Role
    process: Process | None = None
    lives: int = 0
    due: bool = False


@dataclass
class World:
    seed: int
    now: float = 0.0
    current: Process | None = None
    num_events: int = 0
    num_deaths: int = 0
    num_faults: int = 0
    healed_at: float | None = None
    # What a service's own handling of errors must not hide.
    verdict: str = ""
    slots: dict[str, Slot] = field(default_factory=dict)
    clients: list[Client] = field(default_factory=list)
    on_heal: list[Callable[[], None]] = field(default_factory=list)
    lines: list[tuple[Any, ...]] = field(default_factory=list)
    # (seed, choice, chain of all tokens before, token) that an executor has sampled, where they diverge.
    sampled: set[tuple[int, int, int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.profile = Profile.draw(self.random)
        self.network = Network(self)
        self._heap: list[tuple[float, int, Event]] = []
        self._sequence = itertools.count()
        self._faulty = True
        self._next_fault = self._draw_next_fault()
        for name, role in self.profile.slots:
            self.slots[name] = Slot(name, role)

    # --- time -------------------------------------------------------------------------------------

    def clock(self) -> float:
        return 1000.0 + self.now

    def wall_clock(self) -> float:
        return 1.7e9 + self.now

    def latency(self) -> float:
        spread = self.random.random()
        return self.profile.latency * (1.0 + 10.0 * spread**4) + (self.profile.slow_by if spread > 0.98 else 0.0)

    def at(self, delay: float, process: Process | None, fn: Callable[..., Any], *args: Any) -> Event:
        """In `process`, unless it has died by then."""
        event = Event(self.now + delay, process, fn, args)
        heapq.heappush(self._heap, (event.time, next(self._sequence), event))
        return event

    def post(self, process: Process, fn: Callable[..., Any], *args: Any) -> None:
        self._happen(Event(self.now, process, fn, args))

    def _step(self) -> None:
        self.now, _, event = heapq.heappop(self._heap)
        self._happen(event)

    def _happen(self, event: Event) -> None:
        process, fn = event.process, event.fn
        if fn is None:
            return
        if process is None:
            fn(*event.args)
            return
        if not process.alive:
            return
        if process.frozen:
            process.backlog.append(event)
            return
        outer, self.current = self.current, process
        self.num_events += 1
        try:
            fn(*event.args)
            if process.check is not None:
                process.check()
        except Dies:
            if self.verdict:
                self.violation(self.verdict)
            self.kill(process)
        finally:
            self.current = outer
        if self._faulty and self.num_events >= self._next_fault:
            self._next_fault = self._draw_next_fault()
            if outer is None:
                self.profile.inject(self)

    def _draw_next_fault(self) -> float:
        return self.num_events + 1 + self.random.expovariate(1.0) * self.profile.events_per_fault

    # --- a run ------------------------------------------------------------------------------------

    def run(self) -> World:
        with installed(self):
            try:
                self._run()
            except Violation:
                raise
            except Exception as error:
                raise Violation(f"{type(error).__name__}: {error}\n{self.report()}") from error
        return self

    def _run(self) -> None:
        for slot in self.slots.values():
            self.at(self.random.choice((0.0, 0.0, 0.3)), None, self.restart, slot)
        self.clients = make_clients(self)
        while self.now < self.profile.faults_until and not self._all_done():
            self._step()
        self.heal()
        assert self.healed_at is not None
        while not self._all_done():
            if self.now - self.healed_at > LIVENESS or self.num_events > MAX_EVENTS:
                names = [client.name for client in self.clients if not client.done]
                self.violation(f"{', '.join(names)} never came to an end")
            self._step()
        self._check_released()
        quiet_from = self.now
        while left := self.left_over():
            if self.now - quiet_from > QUIET:
                self.violation(f"left over: {'; '.join(left)}")
            until = self.now + 0.5
            while self.now < until:
                self._step()

    def _check_released(self) -> None:
        """Nothing need wait for a grace when nothing went wrong: the final token's Release frees all."""
        if self.num_faults or any(client.error or client.left for client in self.clients):
            return
        until = self.now + 3.0
        while self.now < until:
            self._step()
        left = [line for line in self.left_over() if not line.startswith("gateway")]
        if left:
            self.violation(f"not released: {'; '.join(left)}")

    def _all_done(self) -> bool:
        return all(client.done for client in self.clients)

    def left_over(self) -> list[str]:
        return [
            line for slot in self.slots.values() if slot.process is not None for line in slot.process.node.left_over()
        ]

    def heal(self) -> None:
        """No more faults: all that is dead, frozen or cut comes back."""
        self.trace("heal")
        self._faulty = False
        self.healed_at = self.now
        for slot, address in list(self.network.cuts):
            self.network.heal(slot, address)
        for slot in self.slots.values():
            if slot.process is None:
                self.restart(slot)
            else:
                self.thaw(slot.process)

    # --- what may happen to a process -------------------------------------------------------------

    def restart(self, slot: Slot) -> None:
        slot.due = False
        if slot.process is not None:
            return
        slot.lives += 1
        process = slot.process = Process(self, slot.name, slot.lives)
        self.trace("start", process.name)
        self.current = process
        try:
            process.node = NODES[slot.role](self, process)
        finally:
            self.current = None

    def kill(self, process: Process) -> None:
        if not process.alive:
            return
        self.trace("die", process.name)
        process.alive = False
        process.backlog.clear()
        slot = self.slots[process.slot]
        slot.process = None
        if slot.role is Role.GATEWAY:
            for call in list(process.node.calls):
                call.break_off(keep=True)
        self.network.process_died(process)
        self._restart_later(slot)

    def _restart_later(self, slot: Slot) -> None:
        if not slot.due:
            slot.due = True
            delay = self.random.choice((0.01, 0.1, 0.3, 1.0, 4.0)) if self._faulty else 0.1
            self.at(delay, None, self.restart, slot)

    def freeze(self, process: Process, seconds: float) -> None:
        if process.alive and not process.frozen:
            self.trace("freeze", process.name, seconds)
            process.frozen = True
            self.at(seconds, None, self.thaw, process)

    def thaw(self, process: Process) -> None:
        if not process.alive or not process.frozen:
            return
        self.trace("thaw", process.name)
        process.frozen = False
        backlog, process.backlog = list(process.backlog), deque()
        if self.random.random() < 0.5:
            # Its timers may come before what its sockets hold.
            backlog.sort(key=lambda event: getattr(event.fn, "__name__", "") != "_tick")
        for event in backlog:
            # The event itself, since its timer may yet be cancelled.
            heapq.heappush(self._heap, (self.now, next(self._sequence), event))
        self.network.try_all()

    def terminate(self, process: Process) -> None:
        """SIGTERM: it drains, and leaves when it has, or after some time."""
        if process.leaving or not process.alive:
            return
        self.trace("terminate", process.name)
        process.leaving = True
        deadline = self.now + 3.0

        def look() -> None:
            if process.node.has_drained() or self.now >= deadline:
                process.node.leave()
                self.at(0.05, process, self.kill, process)
            else:
                process.loop.call_later(0.05, look)

        def begin() -> None:
            process.node.drain()
            look()

        self.post(process, begin)

    # --- what must hold ---------------------------------------------------------------------------

    def check_error(self, client: Client, error: Any) -> None:
        self.profile.check_error(self, client, error)

    def check_turned_away(self, client: Client, error: Any) -> None:
        """While something is broken a client may have to come again; afterwards nobody has to."""
        healed_at = self.healed_at if self.num_faults else 0.0
        if healed_at is not None and self.now > healed_at + RECOVERED and "hang" not in self.profile.faults:
            self.violation(f"{client.name}: still turned away: {error}")

    def violation(self, message: str) -> None:
        raise Violation(f"{message}\n{self.report()}")

    # --- the trace --------------------------------------------------------------------------------

    def trace(self, *parts: Any) -> None:
        self.lines.append((self.now, *parts))

    def trace_message(self, process: str, peer: Peer, message: AnyMessage) -> None:
        self.lines.append((self.now, process, "<-", peer.name, message))

    def log(self, _: Any, method: str, event: dict[str, Any]) -> str:
        self.lines.append((self.now, self.current.name if self.current else "", method, event))
        raise structlog.DropEvent

    def report(self, last: int = 400) -> str:
        head = f"seed {self.seed}: {self.profile}\n"
        lines = [f"{line[0]:9.4f} {' '.join(map(str, line[1:]))}" for line in self.lines[-last:]]
        skipped = f"... {len(self.lines) - last} lines before\n" if len(self.lines) > last else ""
        return head + skipped + "\n".join(lines)
