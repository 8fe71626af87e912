"""The gateway as a simulated process: the glue that gRPC is in reality, around the real stream table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
from simulation.network import SimBinder

from quartet.services.gateway import convert
from quartet.services.gateway.events import StreamError
from quartet.services.gateway.stream_table import StreamTable, TableLimits
from quartet.services.gateway.subscription import Subscription
from quartet.shared.client.state import InferenceError
from quartet.shared.link import Identity, Peer, Status
from quartet.shared.messages import AnyMessage, Role
from quartet.shared.sampling_params import InvalidField, RequestLimits

if TYPE_CHECKING:
    from simulation.world import Process, World

GATEWAY_TICK = 0.2
# Responses that a client may leave unread before its connection is full.
WINDOW = 4
STATUS = {code.value[0]: code for code in grpc.StatusCode}


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
