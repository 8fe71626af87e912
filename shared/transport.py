"""Links over ZeroMQ in an event loop: a ROUTER that binds, a DEALER that dials (in threads: thread_dialer.py).

Frames are [session][payload] (see link.py); nothing is ever unpickled. Sockets are read through
their file descriptor instead of zmq.asyncio, whose futures cost several times a frame's own price.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from quartet.shared.curve import BinderKeys, DialerKeys, answer_zap, read_binder_keys, read_dialer_keys
from quartet.shared.frames import can_receive, receive, send
from quartet.shared.link import (
    HEARTBEAT_INTERVAL,
    MAX_FRAME_BYTES,
    BinderLink,
    DialerLink,
    Handler,
    Identity,
    Link,
    Peer,
    Status,
    next_beat,
)
from quartet.shared.liveness import StatusFile
from quartet.shared.log import get_logger
from quartet.shared.messages import Hello, Role

__all__ = ["AddressInUse", "Binder", "Dialer", "Handler", "Identity", "Peer", "Status", "ipc_address"]

QUEUE_FRAMES = 100_000
LINGER_MS = 200
RECONNECT_MS = 10
RECONNECT_MAX_MS = 250
# A connection that says nothing for so long is cut, before it has shown its key too.
HANDSHAKE_MS = 5_000
READ_BATCH = 256
# A ROUTER forgets a lost connection a moment before or after its monitor tells of it.
PROBE_DELAYS = (0.0, 0.01, 0.05, 0.25)
COMPLAIN_EVERY = 10.0
# Loops count in milliseconds, and a tick that comes too early has to come again.
TIMER_SLACK = 0.002

HANDSHAKE_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)
MONITORED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | HANDSHAKE_FAILED

_log = get_logger()


def until_beat(now: float) -> float:
    """Seconds from `now`, by the monotonic clock, to the next beat of all services here; see next_beat."""
    return next_beat(now) - now + TIMER_SLACK


def flush() -> None:
    """Sends what closed links still hold, for at most LINGER_MS. For the end of a process: its exit would drop it."""
    zmq.Context.instance().destroy(linger=LINGER_MS)


class AddressInUse(OSError):
    """Another process serves this address."""


def ipc_address(run_dir: str | Path, link_name: str) -> str:
    """The default address of a link on one host, the same for both of its ends."""
    path = Path(run_dir) / f"{link_name}.sock"
    if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
        raise ValueError(f"run_dir: the socket path {path} is longer than {zmq.IPC_PATH_MAX_LEN} bytes")
    return f"ipc://{path}"


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def dealer(context: zmq.Context[zmq.Socket[bytes]], identity: Identity, keys: DialerKeys | None) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    _configure(socket)
    if keys is not None:
        keys.apply(socket)
    # Unique per process, so that two services of one name never take each other's place.
    socket.setsockopt(zmq.ROUTING_ID, f"{identity.name[:200]}.{identity.incarnation:016x}".encode()[:255])
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    return socket


def _is_local(address: str) -> bool:
    """Whether only processes of this host can reach a socket that is bound to this address."""
    if not address.startswith("tcp://"):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


def dialer_keys(address: str, folder: str) -> DialerKeys | None:
    return read_dialer_keys(folder) if folder and address.startswith("tcp://") else None


class Complaints:
    """Failed handshakes in the log: the first at once, then at most one line every COMPLAIN_EVERY seconds."""

    def __init__(self, address: str, clock: Callable[[], float]) -> None:
        self._address = address
        self._clock = clock
        self._next_at = float("-inf")
        self._untold = 0

    def tell(self, reason: str, **details: str) -> None:
        self._untold += 1
        if self._clock() >= self._next_at:
            self._next_at = self._clock() + COMPLAIN_EVERY
            _log.warning("connection refused", link=self._address, reason=reason, times=self._untold, **details)
            self._untold = 0


def why_not_welcome(event: int, keys: DialerKeys | None) -> str:
    if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
        return "the other side does not know this side's key: it needs its client.key (curve_keys)"
    if keys is None:
        return "the other side asks for a key, or is no Quartet: set curve_keys as it is set there"
    return "the other side has no keys, or another key than server.key here says (curve_keys)"


class _BindLock:
    """ZeroMQ's bind steals a live ipc path; this lock, which dies with its process, prevents it."""

    def __init__(self, address: str) -> None:
        self._fd = -1
        if not address.startswith("ipc://"):
            return
        self._path = address.removeprefix("ipc://")
        fd = os.open(self._path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise AddressInUse(f"{address} is served by another process") from error
        self._fd = fd

    def release(self) -> None:
        """Removes the socket's file too: nobody else binds it before the lock is free."""
        if self._fd >= 0:
            Path(self._path).unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


class _LoopSocket:
    """Reads a ZeroMQ socket in an event loop. Its descriptor is edge-triggered, and a send may
    swallow the edge, so both ends of every drain look at the socket's own events again."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled = False
        self._reading = False
        self._closed = False
        self._loop.add_reader(self._fd, self._drain)
        self._schedule()

    def send(self, frames: list[bytes]) -> bool:
        if self._closed:
            return False
        sent = send(self.socket, frames)
        if not (self._reading or self._scheduled) and can_receive(self.socket):
            self._schedule()
        return sent

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self.socket.close()

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if self._read(READ_BATCH):
            self._schedule()

    def read_rest(self) -> None:
        """Everything that has arrived, before a word of the connection's end is believed."""
        self._read(QUEUE_FRAMES)

    def _read(self, limit: int) -> bool:
        """Whether there may be more than `limit` frames."""
        self._reading = True
        try:
            for _ in range(limit):
                if self._closed or not can_receive(self.socket):
                    return False
                self._on_frames(receive(self.socket))
            return True
        except BaseException:
            self._schedule()  # what is behind it is still to be read
            raise
        finally:
            self._reading = False


def take(link: BinderLink | DialerLink, frames: list[bytes], num_frames: int) -> None:
    """No frame may end the reading of those behind it, whatever a service makes of it."""
    if len(frames) != num_frames:
        link.frames_dropped += 1
        return
    try:
        link.on_frame(*frames)
    except Exception:
        link.frames_dropped += 1
        _log.exception("a frame could not be handled")


class _LoopLink:
    """What Binder and Dialer share: the socket, its monitor, and the timer."""

    link: Link

    def __init__(
        self,
        address: str,
        status_file: StatusFile | None,
        status: Callable[[], Status],
        clock: Callable[[], float],
    ) -> None:
        self.address = address
        self._complaints = Complaints(address, clock)
        self._status_file = status_file
        self._status = status
        self._socket: _LoopSocket | None = None
        self._monitor: _LoopSocket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = False

    @property
    def peers(self) -> dict[bytes, Peer]:
        return self.link.peers

    @property
    def frames_dropped(self) -> int:
        return self.link.frames_dropped

    def announce(self) -> None:
        """The service's status has changed: tell every peer now."""
        self.link.announce()

    def announce_model(self) -> None:
        """identity.model has changed: tell every peer."""
        self.link.announce_model()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self._socket.socket.disable_monitor()
            self._socket.close()
        if self._monitor is not None:
            self._monitor.close()
        self._socket = self._monitor = None

    def wake(self) -> None:
        if self._loop is not None and not self._woken:
            self._woken = True
            self._loop.call_soon(self._run_pending)

    def _run_pending(self) -> None:
        self._woken = False
        self.link.run_pending()
        self._tick()

    def _watch(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._monitor = _LoopSocket(socket.get_monitor_socket(MONITORED), self._on_monitor)
        self._socket = _LoopSocket(socket, on_frames)

    def _on_monitor(self, frames: list[bytes]) -> None:
        self._on_connection(int.from_bytes(frames[0][:2], "little"))

    def _on_connection(self, event: int) -> None:
        raise NotImplementedError

    def _tick(self) -> None:
        assert self._loop is not None
        if self._socket is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        try:
            # A beat that finds nobody ends the session, and silence too: not before what has arrived is read.
            self._socket.read_rest()
            delay = self.link.tick()
            if self._status_file is not None:
                self._status_file.write(self._status())
        except Exception:
            # Without the next tick there would be no more heartbeats.
            _log.exception("a tick failed")
            delay = HEARTBEAT_INTERVAL
        self._timer = self._loop.call_later(delay + TIMER_SLACK, self._tick)


class Binder(_LoopLink):
    """A bound ROUTER. `accept` gives a reason to refuse a dialer, or None.

    `curve_keys`, a folder, lets only known keys in over tcp; raises KeysError when it cannot be used.
    """

    link: BinderLink

    def __init__(
        self,
        address: str,
        identity: Identity,
        handler: Handler,
        status: Callable[[], Status],
        *,
        accept: Callable[[Hello], str | None] = lambda hello: None,
        status_file: StatusFile | None = None,
        clock: Callable[[], float] = time.monotonic,
        curve_keys: str = "",
    ) -> None:
        super().__init__(address, status_file, status, clock)
        self._lock: _BindLock | None = None
        self._keys: BinderKeys | None = None
        if curve_keys and address.startswith("tcp://"):
            self._keys = read_binder_keys(curve_keys)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._zap: _LoopSocket | None = None
        self.link = BinderLink(identity, handler, status, self, clock, accept=accept)

    def start(self) -> None:
        """Raises AddressInUse, or OSError when the address cannot be bound."""
        self._lock = _BindLock(self.address)
        socket = self._secured_socket(self._keys) if self._keys is not None else _router(zmq.Context.instance())
        try:
            socket.bind(self.address)
        except zmq.ZMQError as error:
            socket.close()
            self._end_security()
            self._lock.release()
            kind = AddressInUse if error.errno == zmq.EADDRINUSE else OSError
            raise kind(f"cannot bind {self.address}: {error.strerror}") from error
        if self._keys is None and not _is_local(self.address):
            _log.warning(
                "anybody who reaches this address can take the place of a service: set curve_keys", link=self.address
            )
        self._watch(socket, self._on_frames)
        self._tick()

    async def start_when_free(self, poll: float = 0.02) -> None:
        """Like start, but waits while another process serves the address (a rolling upgrade)."""
        while True:
            try:
                return self.start()
            except AddressInUse:
                await asyncio.sleep(poll)

    def close(self) -> None:
        super().close()
        self._end_security()
        if self._lock is not None:
            self._lock.release()

    def _secured_socket(self, keys: BinderKeys) -> zmq.Socket[bytes]:
        # ZAP is asked at an address that there is once in a context, so each secured link has its own.
        context = self._context = zmq.Context()
        zap = context.socket(zmq.ROUTER)
        zap.setsockopt(zmq.LINGER, 0)
        zap.bind("inproc://zeromq.zap.01")
        self._zap = _LoopSocket(zap, self._on_zap)
        socket = _router(context)
        keys.apply(socket)
        return socket

    def _end_security(self) -> None:
        if self._zap is not None:
            self._zap.close()
            self._zap = None
        if self._context is not None:
            self._context.term()
            self._context = None

    def _on_zap(self, frames: list[bytes]) -> None:
        if self._zap is None or self._keys is None:
            return
        reply, refused = answer_zap(frames, self._keys.clients)
        if refused is not None:
            self._complaints.tell("its key is none of the client*.key here (curve_keys)", peer=refused)
        if reply:
            self._zap.send(reply)

    def send(self, route: bytes, session: bytes, payload: bytes) -> bool:
        return self._socket is not None and self._socket.send([route, session, payload])

    def reconnect(self) -> None:
        """A binder cannot dial."""

    def _on_frames(self, frames: list[bytes]) -> None:
        take(self.link, frames, 3)

    def _on_connection(self, event: int) -> None:
        if event & HANDSHAKE_FAILED and event != zmq.Event.HANDSHAKE_FAILED_AUTH:
            if self._keys is None:
                self._complaints.tell("the other side speaks with keys (curve_keys), this link has none")
            else:
                self._complaints.tell("the other side has no key, or another server.key than this link's")
        if event == zmq.Event.DISCONNECTED and self._loop is not None:
            for delay in PROBE_DELAYS:
                self._loop.call_later(delay, self._probe)

    def _probe(self) -> None:
        if self._socket is not None:
            self._socket.read_rest()
        if self._socket is not None:
            self.link.probe()


class Dialer(_LoopLink):
    """A DEALER that dials one binder and keeps dialling. `curve_keys` as for Binder."""

    link: DialerLink

    def __init__(
        self,
        address: str,
        identity: Identity,
        handler: Handler,
        status: Callable[[], Status],
        *,
        expect: Role | None = None,
        status_file: StatusFile | None = None,
        clock: Callable[[], float] = time.monotonic,
        curve_keys: str = "",
    ) -> None:
        super().__init__(address, status_file, status, clock)
        self._keys = dialer_keys(address, curve_keys)
        self.link = DialerLink(identity, handler, status, self, clock, expect=expect)

    @property
    def peer(self) -> Peer | None:
        return self.link.peer

    def start(self) -> None:
        socket = dealer(zmq.Context.instance(), self.link.identity, self._keys)
        self._watch(socket, self._on_frames)
        socket.connect(self.address)
        self._tick()

    def send(self, route: bytes, session: bytes, payload: bytes) -> bool:
        return self._socket is not None and self._socket.send([session, payload])

    def reconnect(self) -> None:
        if self._socket is not None:
            redial(self._socket.socket, self.address)

    def _on_frames(self, frames: list[bytes]) -> None:
        take(self.link, frames, 2)

    def _on_connection(self, event: int) -> None:
        if event & HANDSHAKE_FAILED and self._socket is not None:
            self._complaints.tell(why_not_welcome(event, self._keys))
            hang_up(self._socket.socket, self.address)
        if event == zmq.Event.DISCONNECTED and self._socket is not None:
            self._socket.read_rest()
        tell(self.link, event)


def _router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    _configure(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return socket


def tell(link: DialerLink, event: int) -> None:
    if event == zmq.Event.HANDSHAKE_SUCCEEDED:
        link.on_connected()
    elif event == zmq.Event.DISCONNECTED or event & HANDSHAKE_FAILED:
        link.on_disconnected()


def hang_up(socket: zmq.Socket[bytes], address: str) -> None:
    """ZeroMQ gives up for good after some failures and tries again a hundred times a second after
    others: from here on the link decides when to dial."""
    with contextlib.suppress(zmq.ZMQError):  # it has hung up already
        socket.disconnect(address)


def redial(socket: zmq.Socket[bytes], address: str) -> None:
    hang_up(socket, address)
    socket.connect(address)
