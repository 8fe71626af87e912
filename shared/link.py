"""One link between two services, without I/O: sessions, heartbeats, progress, and who is there.

A dialer opens a session with a random id (a new one for every connection) and a `Hello`; the binder
answers in the same session. Frames of any other session are dropped and counted, so what was queued
for a dead process cannot confuse its successor. A reconnect or a restart is a new `Peer`: whoever
owns the ledger submits again when it comes up.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from quartet.shared import messages
from quartet.shared.handshake import MAX_TEXT, malformed_hello, malformed_model
from quartet.shared.log import get_logger
from quartet.shared.messages import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    AnyMessage,
    Heartbeat,
    Hello,
    Message,
    ModelChanged,
    ModelInfo,
    Refused,
    Reset,
    Role,
)

SESSION_BYTES = 8
# A longer one is not sent, and cuts the connection of whoever sends it.
MAX_FRAME_BYTES = 64 * 2**20
HEARTBEAT_INTERVAL = 0.8
SILENT_BEATS = 3
STALL_AFTER = 30.0
GREETING_RETRY = 0.02
REFUSED_RETRY = 5.0
# How many of them are known again when they open another session.
MAX_INCARNATIONS = 4096

_log = get_logger()


def next_beat(now: float, interval: float = HEARTBEAT_INTERVAL) -> float:
    """When the services of a host beat next by its monotonic clock. They do it at the same time, and what else is due
    about every second then too: a process that rests is woken once for all, and finds what it shares with the others
    in the caches."""
    return (now // interval + 1) * interval


class Status(NamedTuple):
    """What a service says of itself with each beat; see `Heartbeat`."""

    progress: int
    outstanding: int
    ready: bool
    draining: bool = False


@dataclass
class Identity:
    """What a service says of itself when it opens or answers a session."""

    role: Role
    name: str
    incarnation: int = field(default_factory=lambda: secrets.randbits(63))
    model: ModelInfo | None = None
    tokenizer_fingerprint: str = ""
    version: str = ""

    def hello(self) -> Hello:
        return Hello(
            PROTOCOL_VERSION,
            MIN_PROTOCOL_VERSION,
            self.role,
            self.name,
            self.incarnation,
            self.model,
            self.tokenizer_fingerprint,
            self.version,
        )


class Peer:
    """One live session with one remote process."""

    def __init__(self, link: Link, route: bytes, session: bytes, hello: Hello, now: float) -> None:
        self._link = link
        self.route = route
        self.session = session
        self.role = hello.role
        self.name = hello.name
        self.incarnation = hello.incarnation
        self.version = hello.version
        self.model = hello.model
        self.tokenizer_fingerprint = hello.tokenizer_fingerprint
        self.protocol_version = min(hello.protocol_version, PROTOCOL_VERSION)
        self.alive = True
        self.ready = False
        self.draining = False
        self.stalled = False
        self.outstanding = 0
        self.progress = -1
        self.progress_at = now
        self.seen_at = now

    def send(self, message: Message) -> bool:
        """False when it could not be sent: the session is over and on_down follows. A message of more than
        MAX_FRAME_BYTES is dropped."""
        return self._link.send(self, message)

    def __repr__(self) -> str:
        return f"Peer({self.role.name.lower()} {self.name} {self.incarnation:016x})"


class Handler(Protocol):
    """What a service does with a link. Called synchronously, never from within Peer.send."""

    def on_up(self, peer: Peer) -> None: ...
    def on_down(self, peer: Peer, reason: str) -> None: ...
    def on_message(self, peer: Peer, message: AnyMessage) -> None: ...
    def on_status(self, peer: Peer) -> None: ...


class Wire(Protocol):
    """What a link needs of its socket."""

    def send(self, route: bytes, session: bytes, payload: bytes) -> bool:
        """False when the frame cannot be taken (nobody there, or its queue is full)."""

    def wake(self) -> None:
        """Have `run_pending` called soon, outside the current call."""

    def reconnect(self) -> None:
        """Give up the present connection, where there is one, and dial anew."""


class LinkTotals:
    """Counters that only rise, for metrics."""

    def __init__(self) -> None:
        self.sessions = 0
        self.losses = 0
        self.incarnations = 0
        self._seen: set[int] = set()

    def opened(self, incarnation: int) -> None:
        self.sessions += 1
        if incarnation not in self._seen:
            self.incarnations += 1
            if len(self._seen) >= MAX_INCARNATIONS:
                self._seen.clear()
            self._seen.add(incarnation)


class Link:
    """What binder and dialer have in common. `clock` gives seconds, monotonic."""

    def __init__(
        self,
        identity: Identity,
        handler: Handler,
        status: Callable[[], Status],
        wire: Wire,
        clock: Callable[[], float],
        *,
        heartbeat_interval: float = HEARTBEAT_INTERVAL,
        stall_after: float = STALL_AFTER,
    ) -> None:
        self.identity = identity
        self.peers: dict[bytes, Peer] = {}
        self.frames_dropped = 0
        self.totals = LinkTotals()
        self._handler = handler
        self._status = status
        self._wire = wire
        self._clock = clock
        self._interval = heartbeat_interval
        self._silent_after = SILENT_BEATS * heartbeat_interval
        self._stall_after = stall_after
        self._beat_at = clock()
        self._broken: list[tuple[Peer, str]] = []

    def send(self, peer: Peer, message: Message) -> bool:
        if not peer.alive:
            return False
        payload = messages.encode(message)
        if len(payload) > MAX_FRAME_BYTES:
            # It would cut the connection, be submitted again, and cut it again.
            _log.error("a message is too long to be sent", message=type(message).__name__, num_bytes=len(payload))
            return True
        if self._wire.send(peer.route, peer.session, payload):
            return True
        self._break(peer, "a message could not be sent")
        return False

    def announce(self) -> None:
        """Tells every peer the present status at once."""
        self._beat_at = next_beat(self._clock(), self._interval)
        status = self._status()
        beat = messages.encode(Heartbeat(status.progress, status.outstanding, status.ready, status.draining))
        for peer in list(self.peers.values()):
            if peer.alive and not self._wire.send(peer.route, peer.session, beat):
                self._break(peer, "unroutable")

    def announce_model(self) -> None:
        """Tells every peer that identity.model has changed."""
        for peer in list(self.peers.values()):
            self.send(peer, ModelChanged(self.identity.model))

    def run_pending(self) -> None:
        """Reports sessions that broke during a send."""
        broken, self._broken = self._broken, []
        for peer, reason in broken:
            self._down(peer, reason)

    def tick(self) -> float:
        """Beats, and looks for silence and standstill; returns the seconds until it wants to run again."""
        now = self._clock()
        for peer in list(self.peers.values()):
            if now - peer.seen_at > self._silent_after:
                self._silent(peer)
                continue
            stalled = peer.outstanding > 0 and now - peer.progress_at > self._stall_after
            if stalled != peer.stalled:
                peer.stalled = stalled
                self._handler.on_status(peer)
        if now >= self._beat_at:
            self.announce()
        self.run_pending()
        # A little late, so that the silence is too long by then; not up to a beat later.
        silence = (peer.seen_at + self._silent_after + 0.01 for peer in self.peers.values())
        return max(0.001, min([self._beat_at, *silence]) - now)

    def _break(self, peer: Peer, reason: str) -> None:
        peer.alive = False
        self._broken.append((peer, reason))
        self._wire.wake()

    def _silent(self, peer: Peer) -> None:
        self._down(peer, f"silent for {self._silent_after:.1f} s")

    def _down(self, peer: Peer, reason: str) -> None:
        peer.alive = False
        if self.peers.get(peer.route) is peer:
            del self.peers[peer.route]
            self.totals.losses += 1
            _log.info("peer down", peer=repr(peer), reason=reason)
            self._handler.on_down(peer, reason)

    def _up(self, peer: Peer) -> None:
        self.peers[peer.route] = peer
        self.totals.opened(peer.incarnation)
        _log.info("peer up", peer=repr(peer))
        status = self._status()
        self.send(peer, Heartbeat(status.progress, status.outstanding, status.ready, status.draining))
        self._handler.on_up(peer)

    def _decode(self, payload: bytes) -> AnyMessage | None:
        try:
            return messages.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.frames_dropped += 1
            return None

    def _receive(self, peer: Peer, message: AnyMessage) -> None:
        now = self._clock()
        peer.seen_at = now
        if isinstance(message, Heartbeat):
            if message.progress != peer.progress or message.outstanding == 0:
                peer.progress_at = now
            peer.progress = message.progress
            peer.outstanding = message.outstanding
            stalled = peer.stalled and message.outstanding > 0 and peer.progress_at != now
            if (message.ready, message.draining, stalled) != (peer.ready, peer.draining, peer.stalled):
                peer.ready, peer.draining, peer.stalled = message.ready, message.draining, stalled
                self._handler.on_status(peer)
        elif isinstance(message, ModelChanged):
            reason = malformed_model(message.model) if message.model is not None else None
            if reason is not None:
                self.frames_dropped += 1
                _log.warning("a model that cannot be is ignored", peer=repr(peer), reason=reason)
                return
            peer.model = message.model
            self._handler.on_status(peer)
        else:
            self._handler.on_message(peer, message)


def incompatible(hello: Hello) -> str | None:
    """Why no session can be had with a peer of that protocol version; None when one can."""
    if hello.protocol_version < MIN_PROTOCOL_VERSION or hello.min_protocol_version > PROTOCOL_VERSION:
        return (
            f"protocol versions do not meet: {hello.name} speaks {hello.min_protocol_version} to "
            f"{hello.protocol_version}, this side {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
        )
    return None


class BinderLink(Link):
    """The side that is dialled: one peer per route (the dialer's ZeroMQ routing id)."""

    def __init__(
        self,
        identity: Identity,
        handler: Handler,
        status: Callable[[], Status],
        wire: Wire,
        clock: Callable[[], float],
        *,
        accept: Callable[[Hello], str | None] = lambda hello: None,
        heartbeat_interval: float = HEARTBEAT_INTERVAL,
        stall_after: float = STALL_AFTER,
    ) -> None:
        super().__init__(
            identity, handler, status, wire, clock, heartbeat_interval=heartbeat_interval, stall_after=stall_after
        )
        self._accept = accept

    def on_frame(self, route: bytes, session: bytes, payload: bytes) -> None:
        message = self._decode(payload)
        if message is None:
            return
        peer = self.peers.get(route)
        if isinstance(message, Hello):
            self._greeted(route, session, message, peer)
        elif peer is not None and peer.session == session and peer.alive:
            self._receive(peer, message)
        else:
            self.frames_dropped += 1
            if not isinstance(message, Reset):
                self._wire.send(route, session, messages.encode(Reset()))

    def probe(self) -> None:
        """A connection was lost: ZeroMQ does not say whose, but a beat to a lost one cannot be routed."""
        self.announce()
        self.run_pending()

    def _greeted(self, route: bytes, session: bytes, hello: Hello, peer: Peer | None) -> None:
        if len(session) != SESSION_BYTES:
            self.frames_dropped += 1
            return
        if peer is not None and peer.alive and peer.session == session:
            self._wire.send(route, session, messages.encode(self.identity.hello()))
            return
        reason = incompatible(hello) or malformed_hello(hello) or self._accept(hello)
        if reason is not None:
            _log.warning("peer refused", peer=hello.name[:MAX_TEXT], role=hello.role.name.lower(), reason=reason)
            self._wire.send(route, session, messages.encode(Refused(reason)))
            return
        if peer is not None:
            self._down(peer, "opened a new session")
        if self._wire.send(route, session, messages.encode(self.identity.hello())):
            self._up(Peer(self, route, session, hello, self._clock()))


class DialerLink(Link):
    """The side that dials: at most one peer, under the empty route. A binder of another role than
    `expect` is not spoken to."""

    def __init__(
        self,
        identity: Identity,
        handler: Handler,
        status: Callable[[], Status],
        wire: Wire,
        clock: Callable[[], float],
        *,
        expect: Role | None = None,
        heartbeat_interval: float = HEARTBEAT_INTERVAL,
        stall_after: float = STALL_AFTER,
    ) -> None:
        super().__init__(
            identity, handler, status, wire, clock, heartbeat_interval=heartbeat_interval, stall_after=stall_after
        )
        self._expect = expect
        self._session = b""
        self._told_model: ModelInfo | None = None
        self._greet_at: float | None = None
        self._greeting_since = 0.0
        self._lost_at = clock()

    @property
    def peer(self) -> Peer | None:
        return self.peers.get(b"")

    def on_connected(self) -> None:
        self._open("reconnected")

    def on_disconnected(self) -> None:
        self._lost_at = self._clock()
        self._close("disconnected")

    def on_frame(self, session: bytes, payload: bytes) -> None:
        message = self._decode(payload)
        if message is None:
            return
        if session != self._session:
            self.frames_dropped += 1
            return
        peer = self.peer
        if isinstance(message, Hello):
            reason = incompatible(message) or malformed_hello(message) or self._wrong_role(message)
            if reason is not None:
                self._wait_refused(reason)
            elif peer is None and self._greet_at is not None:
                self._greet_at = None
                peer = Peer(self, b"", session, message, self._clock())
                if self._told_model != self.identity.model:
                    # The first Hello counts, and the model has changed since it was sent.
                    self.send(peer, ModelChanged(self.identity.model))
                self._up(peer)
        elif isinstance(message, Refused):
            self._wait_refused(message.reason)
        elif isinstance(message, Reset):
            if self._greet_at is None:
                self._open("the other side does not know this session")
        elif peer is not None and peer.alive:
            self._receive(peer, message)
        else:
            self.frames_dropped += 1

    def run_pending(self) -> None:
        broken = bool(self._broken)
        super().run_pending()
        if broken and self.peer is None and self._session:
            self._open("a message could not be sent")

    def tick(self) -> float:
        wait = super().tick()
        now = self._clock()
        if self._greet_at is None:
            if not self._session and now - self._lost_at > self._silent_after:
                # ZeroMQ does not dial again by itself after a frame that is too long or a refused key.
                self._lost_at = now
                self._wire.reconnect()
            return wait
        if now - self._greeting_since > self._silent_after and now >= self._greet_at:
            # Nobody answers on this connection; it may be one that a cut network left half open.
            self._greeting_since = now
            self._wire.reconnect()
        elif now >= self._greet_at:
            self._greet(now)
        return max(0.001, min(wait, self._greet_at - now))

    def _open(self, reason: str) -> None:
        self._close(reason)
        self._session = secrets.token_bytes(SESSION_BYTES)
        self._told_model = self.identity.model
        self._greeting_since = self._clock()
        self._greet(self._greeting_since)
        self._wire.wake()

    def _close(self, reason: str) -> None:
        self._session, self._greet_at = b"", None
        if self.peer is not None:
            self._down(self.peer, reason)

    def _wrong_role(self, hello: Hello) -> str | None:
        if self._expect is None or hello.role is self._expect:
            return None
        return f"{hello.name} is a {hello.role.name.lower()}, not a {self._expect.name.lower()}: check the address"

    def _greet(self, now: float) -> None:
        # The Hello is repeated in the same session until answered: a duplicate is harmless.
        sent = self._wire.send(b"", self._session, messages.encode(self.identity.hello()))
        self._greet_at = now + (self._interval if sent else GREETING_RETRY)

    def _silent(self, peer: Peer) -> None:
        self._close(f"silent for {self._silent_after:.1f} s")
        self._wire.reconnect()

    def _wait_refused(self, reason: str) -> None:
        _log.warning("refused by peer", reason=reason)
        self._close("refused")
        self._session = secrets.token_bytes(SESSION_BYTES)
        self._told_model = None
        self._greeting_since = self._greet_at = self._clock() + REFUSED_RETRY
