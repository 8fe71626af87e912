"""A network in virtual time, and ZeroMQ's sockets as far as links can see them.

Within one connection frames come in order and none is lost. When it breaks, what is under way in either
direction is lost, but for a dead sender's last frames that its kernel still delivers, and, now and then,
for stale ones that come late, to whoever is there then. Each end learns of the break in its own time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quartet.shared.link import BinderLink, DialerLink, Handler, Identity, Peer, Status
from quartet.shared.messages import Hello

if TYPE_CHECKING:
    from simulation.world import Process, World

PROBE_DELAYS = (0.0, 0.01, 0.05, 0.25)


class Connection:
    """`up` is what the dialer sends, `down` what the binder sends."""

    def __init__(self, dialer: SimDialer, binder: SimBinder) -> None:
        self.dialer = dialer
        self.binder = binder
        self.broken = False
        # A router forgets a lost connection when its own end has noticed.
        self.routed = True
        self.held: list[tuple[bool, bytes, bytes]] = []
        self.last_arrival = [0.0, 0.0]
        self.in_flight: tuple[list[Any], list[Any]] = ([], [])


class Network:
    """Who is connected to whom. `world` gives time and chance."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: dict[str, SimBinder] = {}
        self.dialers: list[SimDialer] = []
        self.connections: list[Connection] = []
        self.cuts: set[tuple[str, str]] = set()
        self.num_lost = 0
        self.num_stale = 0

    # --- connecting -------------------------------------------------------------------------------

    def dial(self, dialer: SimDialer) -> None:
        """Some time from now; a dialer that finds nobody waits until that may have changed."""
        if not dialer.dialling and not dialer.closed:
            dialer.dialling = True
            self.world.at(self.world.random.choice((0.0005, 0.01, 0.1, 0.25)), None, self._try, dialer)

    def try_all(self) -> None:
        """Somebody listens now, or a way is open again."""
        for dialer in self.dialers:
            if dialer.connection is None:
                self.dial(dialer)

    def _try(self, dialer: SimDialer) -> None:
        dialer.dialling = False
        binder = self.listeners.get(dialer.address)
        if dialer.closed or dialer.connection is not None or binder is None:
            return
        # A frozen process accepts no handshake, and does none.
        if binder.process.frozen or dialer.process.frozen or self._is_cut(dialer):
            return
        connection = Connection(dialer, binder)
        self.connections.append(connection)
        earlier = binder.routes.get(dialer.route)
        if earlier is not None:
            earlier.routed = False
            self.break_off(earlier)
        dialer.connection = connection
        binder.routes[dialer.route] = connection
        self.world.trace("connect", dialer.process.name, dialer.address)
        self.world.at(self._soon(), dialer.process, dialer.on_handshake, connection)

    # --- sending ----------------------------------------------------------------------------------

    def send(self, connection: Connection, is_up: bool, session: bytes, payload: bytes) -> None:
        world = self.world
        now, last = world.now, connection.last_arrival
        arrival = max(last[is_up] + 1e-6, now + world.latency())
        last[is_up] = arrival
        process = connection.binder.process if is_up else connection.dialer.process
        event = world.at(arrival - now, None, self._arrive, connection, is_up, session, payload, process)
        in_flight = connection.in_flight[is_up]
        in_flight.append(event)
        if len(in_flight) > 64:
            in_flight[:] = [event for event in in_flight if event.fn is not None and event.time >= now]

    def _arrive(self, connection: Connection, is_up: bool, session: bytes, payload: bytes, process: Process) -> None:
        if (connection.dialer.slot, connection.dialer.address) in self.cuts:
            connection.held.append((is_up, session, payload))
            return
        if is_up:
            self.world.post(process, connection.binder.on_frames, connection.dialer.route, session, payload)
        else:
            self.world.post(process, connection.dialer.on_frames, session, payload)

    # --- breaking ---------------------------------------------------------------------------------

    def break_off(self, connection: Connection, *, dead: Process | None = None, told: bool = True) -> None:
        """`dead`: the process that died with it. `told` False: its dialer closed it and knows."""
        if connection.broken:
            return
        connection.broken = True
        self.connections.remove(connection)
        dialer, binder = connection.dialer, connection.binder
        world = self.world
        world.trace("break", dialer.process.name, dialer.address)
        cut = self._is_cut(dialer)
        closed_by_dialer = dead is dialer.process or not told
        for is_up in (True, False):
            pending = [
                event for event in connection.in_flight[is_up] if event.fn is not None and event.time > world.now
            ]
            sender_closed = closed_by_dialer if is_up else dead is binder.process
            num_kept = world.random.randint(0, len(pending)) if sender_closed and not cut else 0
            lost = pending[num_kept:]
            self._lose(connection, is_up, [event.args[2:4] for event in lost])
            for event in lost:
                event.fn = None
            delay = self._soon()
            if num_kept:
                delay = max(delay, pending[num_kept - 1].time - world.now)
            if is_up:
                # A binder beyond a cut hears nothing until the way is open again.
                if cut and dead is not binder.process:
                    world.on_heal.append(lambda: world.at(self._soon(), None, self._unroute, connection))
                else:
                    world.at(delay, None, self._unroute, connection)
            elif told and dead is not dialer.process:
                if cut and dead is binder.process:
                    world.on_heal.append(
                        lambda: world.at(self._soon(), dialer.process, dialer.on_disconnected, connection)
                    )
                else:
                    world.at(delay, dialer.process, dialer.on_disconnected, connection)
        for is_up in (True, False):
            self._lose(connection, is_up, [frame[1:] for frame in connection.held if frame[0] == is_up])
        connection.held.clear()
        if not told:
            dialer.connection = None
            self.dial(dialer)

    def _lose(self, connection: Connection, is_up: bool, frames: list[Any]) -> None:
        world = self.world
        self.num_lost += len(frames)
        for session, payload in frames:
            if world.random.random() < world.profile.p_stale:
                connection.dialer.stale.append((connection.dialer, is_up, session, payload))

    def _arrive_stale(self, dialer: SimDialer, is_up: bool, session: bytes, payload: bytes) -> None:
        """To whoever serves that address now, or to the dialer's present connection."""
        self.num_stale += 1
        if not is_up:
            self.world.post(dialer.process, dialer.on_frames, session, payload)
        elif (binder := self.listeners.get(dialer.address)) is not None:
            self.world.post(binder.process, binder.on_frames, dialer.route, session, payload)

    def _unroute(self, connection: Connection) -> None:
        binder = connection.binder
        if connection.routed:
            connection.routed = False
            if binder.routes.get(connection.dialer.route) is connection:
                del binder.routes[connection.dialer.route]
        self.world.at(0.0, binder.process, binder.on_lost)

    # --- cuts -------------------------------------------------------------------------------------

    def heal(self, slot: str, address: str) -> None:
        self.cuts.discard((slot, address))
        for connection in list(self.connections):
            if connection.dialer.slot == slot and connection.dialer.address == address:
                held, connection.held = connection.held, []
                for is_up, session, payload in held:
                    process = connection.binder.process if is_up else connection.dialer.process
                    self._arrive(connection, is_up, session, payload, process)
        if not self.cuts:
            todo, self.world.on_heal[:] = list(self.world.on_heal), []
            for fn in todo:
                fn()
        self.try_all()

    def process_died(self, process: Process) -> None:
        for connection in list(self.connections):
            if process in (connection.dialer.process, connection.binder.process):
                self.break_off(connection, dead=process)
        for address, binder in list(self.listeners.items()):
            if binder.process is process:
                del self.listeners[address]
        for dialer in self.dialers:
            dialer.closed = dialer.closed or dialer.process is process
        self.dialers = [dialer for dialer in self.dialers if not dialer.closed]

    def _is_cut(self, dialer: SimDialer) -> bool:
        return (dialer.slot, dialer.address) in self.cuts

    def _soon(self) -> float:
        return self.world.random.choice((0.0002, 0.001, 0.005, 0.03))


class _Socket:
    """What SimBinder and SimDialer have in common with transport's classes."""

    link: BinderLink | DialerLink

    def __init__(self, world: World, address: str) -> None:
        assert world.current is not None
        self.world = world
        self.network = world.network
        self.process: Process = world.current
        self.slot = self.process.slot
        self.address = address
        self.closed = False
        self._timer: Any = None
        self._woken = False

    @property
    def peers(self) -> dict[bytes, Peer]:
        return self.link.peers

    def announce(self) -> None:
        self.link.announce()

    def announce_model(self) -> None:
        self.link.announce_model()

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.world.at(0.0, self.process, self._run_pending)

    def close(self) -> None:
        """The process ends itself with its sockets; see World.kill."""

    def _run_pending(self) -> None:
        self._woken = False
        self.link.run_pending()
        self._tick()

    def _tick(self) -> None:
        if self._timer is not None:
            self._timer.fn = None
        self._timer = self.world.at(self.link.tick(), self.process, self._tick)


class SimBinder(_Socket):
    link: BinderLink

    def __init__(
        self,
        address: str,
        identity: Identity,
        handler: Handler,
        status: Callable[[], Status],
        *,
        accept: Callable[[Hello], str | None] = lambda hello: None,
        **_: Any,
    ) -> None:
        super().__init__(_world(), address)
        self.routes: dict[bytes, Connection] = {}
        self.link = BinderLink(identity, handler, status, self, self.world.clock, accept=accept)

    def start(self) -> None:
        assert self.address not in self.network.listeners, "the address is taken"
        self.network.listeners[self.address] = self
        self.network.try_all()
        self._tick()

    def send(self, route: bytes, session: bytes, payload: bytes) -> bool:
        connection = self.routes.get(route)
        if connection is None:
            return False
        if not connection.broken:
            self.network.send(connection, False, session, payload)
        return True

    def reconnect(self) -> None:
        """A binder cannot dial."""

    def on_frames(self, route: bytes, session: bytes, payload: bytes) -> None:
        self.link.on_frame(route, session, payload)

    def on_lost(self) -> None:
        for delay in PROBE_DELAYS:
            self.world.at(delay, self.process, self.link.probe)


class SimDialer(_Socket):
    link: DialerLink

    def __init__(
        self, address: str, identity: Identity, handler: Handler, status: Callable[[], Status], **_: Any
    ) -> None:
        super().__init__(_world(), address)
        self.route = f"{identity.name}.{identity.incarnation:016x}".encode()
        self.connection: Connection | None = None
        self.dialling = False
        # What an earlier connection has lost and the next one brings.
        self.stale: list[Any] = []
        self.link = DialerLink(identity, handler, status, self, self.world.clock)

    @property
    def peer(self) -> Peer | None:
        return self.link.peer

    def start(self) -> None:
        self.network.dialers.append(self)
        self.network.dial(self)
        self._tick()

    def send(self, route: bytes, session: bytes, payload: bytes) -> bool:
        connection = self.connection
        if connection is None:
            return False
        if not connection.broken:
            self.network.send(connection, True, session, payload)
        return True

    def reconnect(self) -> None:
        if self.connection is not None and not self.connection.broken:
            self.network.break_off(self.connection, told=False)
        else:
            self.connection = None
            self.network.dial(self)

    def on_frames(self, session: bytes, payload: bytes) -> None:
        self.link.on_frame(session, payload)

    def on_handshake(self, connection: Connection) -> None:
        if connection is self.connection:
            self.link.on_connected()
            for stale in self.stale:
                delay = self.world.random.choice((0.001, 0.02, 0.1, 0.3, 2.0))
                self.world.at(delay, None, self.network._arrive_stale, *stale)
            self.stale.clear()

    def on_disconnected(self, connection: Connection) -> None:
        if connection is self.connection:
            self.connection = None
            self.network.dial(self)
            self.link.on_disconnected()


_current_world: World | None = None


def _world() -> World:
    assert _current_world is not None
    return _current_world


def set_world(world: World | None) -> World | None:
    """The world that services built from now on live in; gives the one before."""
    global _current_world
    before, _current_world = _current_world, world
    return before
