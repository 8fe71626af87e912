"""A dialer for a service whose main thread computes: it needs no event loop."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

import zmq

from quartet.shared.frames import can_receive, receive, send
from quartet.shared.link import DialerLink, Handler, Identity, Peer, Status
from quartet.shared.liveness import StatusFile
from quartet.shared.messages import Message, Role
from quartet.shared.transport import (
    HANDSHAKE_FAILED,
    MONITORED,
    READ_BATCH,
    Complaints,
    dealer,
    dialer_keys,
    hang_up,
    redial,
    take,
    tell,
    why_not_welcome,
)


class ThreadDialer:
    """A Dialer with a thread of its own, which beats while the main one computes.

    Frames are read in that thread; or, `attended`, by the owner: it calls `read` and `wait` between its steps, and
    the thread reads only when a beat is due. So a step costs no switch between threads. The handler and `status` are
    called in whichever thread reads or beats, one at a time. `send`, `announce` and `wake` may be called from any.
    """

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
        attended: bool = False,
    ) -> None:
        self.address = address
        self._keys = dialer_keys(address, curve_keys)
        self._complaints = Complaints(address, clock)
        self._status = status
        self._status_file = status_file
        self._attended = attended
        # Whoever holds it may touch the socket and the link.
        self._lock = threading.RLock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._num_read = 0
        # What ends the thread's wait, and the owner's.
        self._thread_wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._owner_wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._owner_poll = select.poll()
        self._owner_poll.register(self._owner_wakeup, select.POLLIN)
        self._closing = False
        self._announcing = False
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self.link = DialerLink(identity, handler, status, _ThreadWire(self), clock, expect=expect)

    @property
    def peer(self) -> Peer | None:
        return self.link.peer

    @property
    def frames_dropped(self) -> int:
        return self.link.frames_dropped

    def start(self) -> None:
        self._context = zmq.Context()
        socket = self._socket = dealer(self._context, self.link.identity, self._keys)
        self._owner_poll.register(int(socket.getsockopt(zmq.FD)), select.POLLIN)
        self._thread.start()

    def send(self, message: Message, peer: Peer | None = None) -> None:
        """Sends to `peer`, or to whoever is there; to nobody when that peer is gone."""
        with self._lock:
            target = peer or self.link.peer
            if target is not None and not self._closing:
                target.send(message)

    def read(self) -> None:
        """Gives what has arrived to the handler."""
        with self._lock:
            for _ in range(READ_BATCH):
                if self._socket is None or not can_receive(self._socket):
                    return
                self._num_read += 1
                take(self.link, receive(self._socket), 2)
            # The descriptor tells of what comes, not of what is left.
            os.eventfd_write(self._owner_wakeup if self._attended else self._thread_wakeup, 1)

    def wait(self, timeout: float | None = None) -> bool:
        """Until something may have arrived since the last `read`, or `wake` was called; False when `timeout`
        seconds have passed before."""
        woken_by = self._owner_poll.poll(None if timeout is None else timeout * 1000)
        for fd, _ in woken_by:
            if fd == self._owner_wakeup:
                os.eventfd_read(fd)
        return bool(woken_by)

    def wake(self) -> None:
        """Ends the owner's wait. May be called in a signal's handler."""
        os.eventfd_write(self._owner_wakeup, 1)

    def announce(self) -> None:
        """The service's status has changed: tell the peer now. May be called in a signal's handler."""
        self._announcing = True
        os.eventfd_write(self._thread_wakeup, 1)

    def close(self) -> None:
        """Ends the thread; what was sent goes out."""
        self._closing = True
        if self._thread.is_alive():
            os.eventfd_write(self._thread_wakeup, 1)
            self._thread.join()

    def _run(self) -> None:
        socket, context = self._socket, self._context
        assert socket is not None and context is not None
        with self._lock:
            monitor = socket.get_monitor_socket(MONITORED)
            socket.connect(self.address)
        poller = select.poll()
        poller.register(self._thread_wakeup, select.POLLIN)
        poller.register(int(monitor.getsockopt(zmq.FD)), select.POLLIN)
        if not self._attended:
            poller.register(int(socket.getsockopt(zmq.FD)), select.POLLIN)
        tick_at = 0.0
        try:
            while not self._closing:
                with self._lock:
                    tick_at = self._turn(monitor, tick_at)
                delay = max(0.001, tick_at - time.monotonic())
                for fd, _ in poller.poll(int(delay * 1000) + 1):
                    if fd == self._thread_wakeup:
                        os.eventfd_read(fd)
        finally:
            with self._lock:
                self._socket = None
                socket.disable_monitor()
                monitor.close()
                socket.close()
            context.term()

    def _turn(self, monitor: zmq.Socket[bytes], tick_at: float) -> float:
        """What is due now; returns when the next beat is."""
        assert self._socket is not None
        num_read = self._num_read
        has_changed = self._read_monitor(monitor, self._socket)
        if self._announcing:
            self._announcing = False
            self.link.announce()
        self.link.run_pending()
        now = time.monotonic()
        is_due = now >= tick_at or has_changed
        if is_due or not self._attended:
            # Before the tick: what has come while the owner computed is a sign of life.
            self.read()
        if is_due:
            tick_at = now + self.link.tick()
            if self._status_file is not None:
                self._status_file.write(self._status())
        # A send may have swallowed the descriptor's edge.
        if can_receive(self._socket):
            if self._attended:
                self.wake()
            else:
                self.read()
        if self._num_read != num_read and self._attended:
            self.wake()
        return tick_at

    def _read_monitor(self, monitor: zmq.Socket[bytes], socket: zmq.Socket[bytes]) -> bool:
        """Whether it told anything."""
        told = False
        while can_receive(monitor):
            event = int.from_bytes(receive(monitor)[0][:2], "little")
            if event & HANDSHAKE_FAILED:
                self._complaints.tell(why_not_welcome(event, self._keys))
                hang_up(socket, self.address)
            if event == zmq.Event.DISCONNECTED:
                # Everything that has arrived, before a word of the connection's end is believed.
                self.read()
            tell(self.link, event)
            told = True
        return told


class _ThreadWire:
    """The link's side of a ThreadDialer's socket; called by whoever holds its lock."""

    def __init__(self, owner: ThreadDialer) -> None:
        self._owner = owner

    def send(self, route: bytes, session: bytes, payload: bytes) -> bool:
        socket = self._owner._socket
        return socket is not None and send(socket, (session, payload))

    def wake(self) -> None:
        os.eventfd_write(self._owner._thread_wakeup, 1)

    def reconnect(self) -> None:
        if self._owner._socket is not None:
            redial(self._owner._socket, self._owner.address)
