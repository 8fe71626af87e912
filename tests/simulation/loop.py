"""An event loop in virtual time, and what makes services live in it: `installed` gives their modules a
loop, a clock, chance and sockets of a simulated world."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import structlog
from simulation.network import SimBinder, SimDialer, set_world

from quartet.services.gateway import convert, stream_table
from quartet.services.scheduler import service as scheduler_service
from quartet.services.tokenizer import service as tokenizer_service
from quartet.shared import link as link_module
from quartet.shared.client import state as client_state

if TYPE_CHECKING:
    from simulation.world import Process, World


class Dies(BaseException):
    """The process that raises it is gone, as by a signal."""


class SimLoop:
    """What services use of an event loop; each process has its own."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    def time(self) -> float:
        return self._world.now

    def call_soon(self, fn: Callable[..., Any], *args: Any) -> SimHandle:
        return SimHandle(self._world.at(0.0, self._process, fn, *args))

    def call_later(self, delay: float, fn: Callable[..., Any], *args: Any) -> SimHandle:
        return SimHandle(self._world.at(delay, self._process, fn, *args))

    def run_in_executor(self, pool: Any, work: Callable[[], Any]) -> SimFuture:
        future = SimFuture(work)
        delay = self._world.random.choice((0.0002, 0.002, 0.002, 0.2))
        self._world.at(delay, self._process, future.run)
        return future


class SimHandle:
    def __init__(self, event: Any) -> None:
        self._event = event

    def cancel(self) -> None:
        self._event.fn = None


class SimFuture:
    """The work is done by a thread when `run` is called, and its callbacks called in the loop."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._callbacks: list[Callable[[SimFuture], None]] = []
        self._result: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[SimFuture], None]) -> None:
        self._callbacks.append(callback)

    def cancelled(self) -> bool:
        return False

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> Any:
        return self._result


@contextlib.contextmanager
def installed(world: World) -> Iterator[None]:
    """While it lasts, services built and run live in this world, and everything random is drawn from its seed."""
    time = SimpleNamespace(monotonic=world.clock, time=world.wall_clock, time_ns=lambda: int(world.wall_clock() * 1e9))
    secrets = _Secrets(world.random)
    loop = _Asyncio(world)
    changes: list[tuple[Any, str, Any]] = [
        (tokenizer_service, "time", time),
        (tokenizer_service, "asyncio", loop),
        (tokenizer_service, "Dialer", SimDialer),
        (scheduler_service, "time", time),
        (scheduler_service, "asyncio", loop),
        (scheduler_service, "Binder", SimBinder),
        (client_state, "time", time),
        (link_module, "secrets", secrets),
        (stream_table, "secrets", secrets),
        (convert, "secrets", secrets),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    world_before = set_world(world)
    logging_before = structlog.get_config()
    structlog.configure(
        processors=[world.log], wrapper_class=structlog.make_filtering_bound_logger(0), cache_logger_on_first_use=False
    )
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        set_world(world_before)
        structlog.configure(**logging_before)


class _Secrets:
    def __init__(self, source: random.Random) -> None:
        self.randbits = source.getrandbits
        self.token_bytes = source.randbytes


class _Asyncio:
    """asyncio with the simulated loop of whichever process runs."""

    def __init__(self, world: World) -> None:
        self._world = world

    def get_running_loop(self) -> SimLoop:
        assert self._world.current is not None
        return self._world.current.loop

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)
