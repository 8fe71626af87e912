"""The four services as simulated processes: their own glue, over a simulated event loop and sockets.

The tokenizer's and the scheduler's service classes are the real ones; `installed` gives their modules a
loop, a clock and sockets that live in virtual time. The gateway's and the executor's glue, which real
gRPC and a real thread hold together, is written again here in a few lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from simulation.network import SimBinder, SimDialer, set_world
from simulation.vocabulary import LOADED, POISON
from support.fake_executor import FakeRunner, Row, next_token

from quartet.services.executor.loop import ExecutorLoop
from quartet.services.gateway import convert, stream_table
from quartet.services.gateway.events import StreamError
from quartet.services.gateway.stream_table import StreamTable, TableLimits
from quartet.services.gateway.subscription import Subscription
from quartet.services.scheduler import service as scheduler_service
from quartet.services.scheduler.invariants import check_invariants
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.services.tokenizer import service as tokenizer_service
from quartet.services.tokenizer.settings import TokenizerSettings
from quartet.shared import link as link_module
from quartet.shared.client import state as client_state
from quartet.shared.client.state import InferenceError
from quartet.shared.link import Identity, Peer, Status
from quartet.shared.messages import AnyMessage, ModelInfo, Role, StepPlan, StepResult
from quartet.shared.sampling_params import InvalidField, RequestLimits

if TYPE_CHECKING:
    from simulation.world import Process, World

GATEWAY_TICK = 0.2
DRAIN_DECISION = 0.1
# Responses that a client may leave unread before its connection is full.
WINDOW = 4
STATUS = {code.value[0]: code for code in grpc.StatusCode}


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


# --- gateway --------------------------------------------------------------------------------------


class GatewayNode:
    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        profile = world.profile
        self.table = StreamTable(
            TableLimits(
                max_unread_bytes=profile.max_unread_bytes,
                attach_grace=profile.grace,
                attach_timeout=1.0,
                recovery_deadline=profile.recovery_deadline,
            ),
            world.clock,
            world.wall_clock,
        )
        self.calls: list[ServerCall] = []
        self.limits = RequestLimits()
        identity = Identity(Role.GATEWAY, process.slot)
        self.link = SimBinder("gateway", identity, self, self._status, accept=self.table.refuse)
        self.link.start()
        process.loop.call_later(GATEWAY_TICK, self._tick)

    def _status(self) -> Status:
        return Status(self.table.progress, 0, self.table.ready, self.table.draining)

    def _tick(self) -> None:
        self.table.tick()
        self.process.loop.call_later(GATEWAY_TICK, self._tick)

    def on_up(self, peer: Peer) -> None:
        self.table.on_up(peer)

    def on_down(self, peer: Peer, reason: str) -> None:
        self.table.on_down(peer, reason)

    def on_status(self, peer: Peer) -> None:
        self.table.on_status(peer)

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        self.world.trace_message(self.process.name, peer, message)
        self.table.on_message(peer, message)

    def generate(self, call: ServerCall, request: Any) -> None:
        call.start(lambda: self.table.open(lambda i: convert.stream_from(request, i, self.limits, 1e9), call.wake))

    def attach(self, call: ServerCall, request: Any) -> None:
        call.start(
            lambda: self.table.attach(
                convert.request_id_from(request.request_id),
                convert.positions_from(request),
                request.prompt_logprobs_start,
                convert.detach_grace(request, 1e9),
                call.wake,
            )
        )

    def abort(self, request_id: str) -> None:
        self.table.abort(convert.request_id_from(request_id))

    def drain(self) -> None:
        self.table.draining = True
        self.link.announce()

    def has_drained(self) -> bool:
        return not self.table.num_attached_streams

    def leave(self) -> None:
        self.table.end_all("the gateway has been stopped; attach again to go on")
        for call in list(self.calls):
            call.pump()

    def left_over(self) -> list[str]:
        table = self.table
        counts = {
            "open": table.num_open_streams,
            "retained": table.num_retained_streams,
            "searches": len(table._searches),
            "waiting": len(table._waiting),
            "detached": len(table._detached),
            "of tokenizers": sum(len(tokenizer.streams) for tokenizer in table.tokenizers.values()),
        }
        return [f"gateway: {count} {name}" for name, count in counts.items() if count]


class ServerCall:
    """The server's end of a client's call: what GrpcFace's _follow does. Responses come to the client in
    order, and no more than WINDOW of them lie unread."""

    def __init__(self, node: GatewayNode, client: Any) -> None:
        self.node = node
        self.client = client
        self.closed = False
        self.unread = 0
        self.subscription: Subscription | None = None
        self._scheduled = False
        self._ended = False
        self._last_arrival = 0.0
        self.in_flight: list[Any] = []
        node.calls.append(self)

    def start(self, open_: Callable[[], Subscription]) -> None:
        if self.closed:
            return
        try:
            self.subscription = open_()
        except InvalidField as error:
            self._end(InferenceError(grpc.StatusCode.INVALID_ARGUMENT, str(error)))
            return
        except StreamError as error:
            self._end(_status_of(error))
            return
        self.wake()

    def wake(self) -> None:
        if not self._scheduled and not self.closed:
            self._scheduled = True
            self.node.process.loop.call_soon(self.pump)

    def pump(self) -> None:
        self._scheduled = False
        subscription = self.subscription
        while not self.closed and subscription is not None and self.unread < WINDOW:
            try:
                events = subscription.pull()
            except StreamError as error:
                self._end(_status_of(error))
                return
            for event in events:
                self.unread += 1
                self._deliver(self.client.on_response, convert.response_from(event))
            if subscription.done:
                self._end(None)
            if not events:
                return

    def read(self) -> None:
        """The client has taken a response."""
        self.unread -= 1
        self.wake()

    def cancel(self) -> None:
        """The client's end is closed."""
        if not self.closed:
            self.closed = True
            self.node.calls.remove(self)
            if self.subscription is not None:
                self.subscription.close()

    def break_off(self, *, keep: bool) -> None:
        """The connection is gone; the client has what was under way (`keep`) or some of it."""
        world = self.node.world
        pending = [event for event in self.in_flight if event.fn is not None and event.time > world.now]
        num_kept = world.random.randint(0, len(pending)) if keep else 0
        for event in pending[num_kept:]:
            event.fn = None
        delay = max(world.latency(), pending[num_kept - 1].time - world.now + 1e-6 if num_kept else 0.0)
        if not self._ended:
            error = InferenceError(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            world.at(delay, None, self.client.on_status, self, error)
        elif pending[num_kept:]:
            error = InferenceError(grpc.StatusCode.UNAVAILABLE, "the connection broke at the end")
            world.at(delay, None, self.client.on_status, self, error)
        self._ended = True

    def _end(self, error: InferenceError | None) -> None:
        self._deliver(self.client.on_status, error)
        self._ended = True
        self.cancel()

    def _deliver(self, fn: Callable[..., None], *args: Any) -> None:
        if not self._ended:
            world = self.node.world
            self._last_arrival = max(self._last_arrival + 1e-6, world.now + world.latency())
            self.in_flight.append(world.at(self._last_arrival - world.now, None, fn, self, *args))


def _status_of(error: StreamError) -> InferenceError:
    return InferenceError(STATUS[int(error.code)], error.message, error.retry_after_ms)


# --- tokenizer ------------------------------------------------------------------------------------


class TokenizerNode:
    def __init__(self, world: World, process: Process) -> None:
        settings = TokenizerSettings(
            name=process.slot,
            gateway_links=["gateway"],
            scheduler_link="scheduler-tokenizer",
            attach_grace=world.profile.grace,
            recovery_deadline=world.profile.recovery_deadline,
            run_dir="/nowhere",
        )
        self.service = tokenizer_service.TokenizerService(settings, LOADED, None)  # type: ignore[arg-type]
        for link in (self.service._scheduler, *self.service._gateways):
            _traced(world, process, link.link._handler)
        self.service.start()

    def drain(self) -> None:
        service = self.service
        service.core.draining = True
        for link in (service._scheduler, *service._gateways):
            link.announce()

    def has_drained(self) -> bool:
        return not self.service.core.num_owed

    def leave(self) -> None:
        pass

    def left_over(self) -> list[str]:
        core = self.service.core
        counts = {"requests": len(core._requests), "pending": len(core._pending), "calls": len(core._calls)}
        return [f"tokenizer: {count} {name}" for name, count in counts.items() if count]


def _traced(world: World, process: Process, handler: Any) -> None:
    inner = handler.on_message

    def on_message(peer: Peer, message: AnyMessage) -> None:
        world.trace_message(process.name, peer, message)
        inner(peer, message)

    handler.on_message = on_message


# --- scheduler ------------------------------------------------------------------------------------


class SchedulerNode:
    def __init__(self, world: World, process: Process) -> None:
        profile = world.profile
        settings = SchedulerSettings(
            name=process.slot,
            tokenizer_link="scheduler-tokenizer",
            executor_link="scheduler-executor",
            owner_grace=profile.grace,
            policy=profile.policy,
            enable_prefix_caching=profile.prefix_caching,
            short_prompt_share=profile.short_prompt_share,
            run_dir="/nowhere",
        )
        self.service = scheduler_service.SchedulerService(settings)
        self.service._loop = process.loop  # type: ignore[assignment]
        for link in (self.service.executor_link, self.service.tokenizer_link):
            _traced(world, process, link.link._handler)
            link.start()
        process.check = self.check
        self._checked = (-1, -1)

    def check(self) -> None:
        # Beats leave the core as it was.
        seen = self.service._progress, self.service.core.state.last_plan
        if seen != self._checked:
            self._checked = seen
            check_invariants(self.service.core)

    def drain(self) -> None:
        self.service.drain()

    def has_drained(self) -> bool:
        return self.service.drained.is_set()

    def leave(self) -> None:
        pass

    def left_over(self) -> list[str]:
        core = self.service.core
        state = core.state
        counts = {
            "requests": len(core.ledger.groups),
            "unfinished": state.num_unfinished,
            "plans in flight": len(state.in_flight),
            "blocks taken": state.kv.pool.num_blocks - state.kv.num_free_blocks,
            "rows taken": state.max_num_seqs - state.rows.num_free - state.rows.num_left,
            "owners gone": sum(owner.down_since is not None for owner in core.ledger.owners.values()),
            "died": len(state.died) + len(state.suspects),
        }
        return [f"scheduler: {count} {name}" for name, count in counts.items() if count]


# --- executor -------------------------------------------------------------------------------------


class SimRunner(FakeRunner):
    """Dies of a poisoned prompt, and fails a step when it is told to. Where numerics diverge, a row may
    go on otherwise than an earlier one with the same tokens; all that was ever sampled is known."""

    def __init__(self, model: ModelInfo, world: World, process: Process) -> None:
        super().__init__(model)
        self._world = world
        self._process = process
        self.fails_next = False
        self._salts: dict[int, int] = {}
        self._kept: list[Any] = []

    def execute(self, plan: StepPlan) -> StepResult:
        try:
            if self.fails_next:
                self.fails_next = False
                self.fail(plan)
                raise RuntimeError("the device failed")
            return super().execute(plan)
        except AssertionError as error:
            # The loop would take it for a failed step.
            self._world.verdict = f"the executor was told what cannot be: {error!r}"
            raise Dies from error

    def _next_token(self, row: Row, chain: int, banned: frozenset[int]) -> int:
        world = self._world
        if not world.profile.diverges:
            return super()._next_token(row, chain, banned)
        salt = self._salts.get(id(row.new))
        if salt is None:
            salt = self._salts[id(row.new)] = world.random.choice((0, 0, 1, 2))
            self._kept.append(row.new)
        seed, choice = row.new.sampling.seed, row.new.choice_index
        token_id = next_token(hash((chain, salt)) if salt else chain, seed, choice, self.model.vocab_size, banned)
        world.sampled.add((seed, choice, chain, token_id))
        return token_id

    def _write(self, index: int, row: Any, position: int) -> None:
        if row.tokens[position] == POISON and position < row.num_prompt:
            self._world.num_deaths += 1
            raise Dies
        super()._write(index, row, position)


class ExecutorNode:
    """A thread moves messages (it lives while a step runs), the main thread runs steps."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.runner = SimRunner(world.profile.model, world, process)
        self.loop = ExecutorLoop(self.runner, int(world.wall_clock() * 1e6))
        self.inbox: deque[tuple[Peer, AnyMessage]] = deque()
        self.num_received = self.num_handled = 0
        self.busy = False
        self.hangs_for = 0.0
        self.draining = False
        self.draining_since = 0.0
        identity = Identity(Role.EXECUTOR, process.slot, model=world.profile.model)
        self.link = SimDialer("scheduler-executor", identity, self, self._status)
        self.link.start()

    def _status(self) -> Status:
        outstanding = self.num_received - self.num_handled
        return Status(self.num_handled, outstanding, not self.draining, self.draining)

    def on_up(self, peer: Peer) -> None:
        pass

    def on_down(self, peer: Peer, reason: str) -> None:
        pass

    def on_status(self, peer: Peer) -> None:
        pass

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        self.world.trace_message(self.process.name, peer, message)
        self.num_received += 1
        self.inbox.append((peer, message))
        self._next()

    def _next(self) -> None:
        if self.inbox and not self.busy:
            self.busy = True
            peer, message = self.inbox.popleft()
            duration = self.hangs_for or (
                self.world.random.choice(self.world.profile.step_times) if isinstance(message, StepPlan) else 0.0005
            )
            self.hangs_for = 0.0
            self.process.loop.call_later(duration, self._handle, peer, message, peer.alive)

    def _handle(self, peer: Peer, message: AnyMessage, alive: bool) -> None:
        if alive:
            answer = self.loop.handle(message)
            if answer is not None:
                peer.send(answer)
        self.num_handled += 1
        self.busy = False
        self._next()

    def drain(self) -> None:
        self.draining = True
        self.draining_since = self.world.now
        self.link.announce()

    def has_drained(self) -> bool:
        if self.busy or self.inbox:
            return False
        scheduler = self.link.peer
        if scheduler is None or not scheduler.alive:
            return True
        return self.world.now - self.draining_since > DRAIN_DECISION and not scheduler.draining

    def leave(self) -> None:
        pass

    def left_over(self) -> list[str]:
        return [f"executor: {len(self.inbox)} messages"] if self.inbox or self.busy else []


NODES: dict[Role, Callable[[World, Process], Any]] = {
    Role.GATEWAY: GatewayNode,
    Role.TOKENIZER: TokenizerNode,
    Role.SCHEDULER: SchedulerNode,
    Role.EXECUTOR: ExecutorNode,
}
