"""The kit's ends of links: raw sockets, so that it can say anything, in any session, at any time.

Written apart from the link layer that the services use: what it does not know of a service it cannot excuse.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq

from quartet.shared import messages
from quartet.shared.conformance.report import Report
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

BEAT_INTERVAL = 0.5
# Three missed beats are a death; twice that is allowed, since the kit and the service may share a busy machine.
SILENT_AFTER = 4.8
# A longer pause between two turns was the kit's own: the machine gave it no time.
LONGEST_TURN = 1.0
BIND_PATIENCE = 5.0
# A service that has just been started may load a model before it dials or binds.
START_PATIENCE = 120.0

T = TypeVar("T")


class Loop:
    """Polls the kit's sockets in the calling thread and beats for them. `timeout`: how long to wait for
    what a service owes; `gone` says why the service is no more, where that can be known."""

    def __init__(self, report: Report, timeout: float = 10.0, gone: Callable[[], str] | None = None) -> None:
        self.report = report
        self.gone = gone
        self.timeout = timeout
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoints: list[Endpoint] = []
        self.idle: list[Callable[[], bool]] = []
        self._poller = zmq.Poller()
        self._busy = False
        self._time = 0.0
        self._turned_at = time.monotonic()

    def now(self) -> float:
        """Seconds that the kit has been looking: when it was stopped itself, no service owed it anything."""
        at = time.monotonic()
        self._time += min(at - self._turned_at, LONGEST_TURN)
        self._turned_at = at
        return self._time

    def until(self, condition: Callable[[], object], timeout: float | None = None) -> bool:
        """Runs until the condition holds (True) or the time is over."""
        deadline = self.now() + (self.timeout if timeout is None else timeout)
        while not condition():
            now = self.now()
            if now >= deadline:
                return False
            self._turn(min(deadline - now, 0.1))
        return True

    def expect(self, rule: str, condition: Callable[[], object], what: str, timeout: float | None = None) -> None:
        """The rule is broken when `what` does not happen in time."""
        self.report.check(rule, self.until(condition, timeout), f"{what}: not within the time allowed")

    def run_for(self, seconds: float) -> None:
        self.until(lambda: False, seconds)

    def close(self) -> None:
        for endpoint in list(self.endpoints):
            endpoint.close()
        self.context.destroy(linger=0)

    def attach(self, endpoint: Endpoint) -> None:
        self.endpoints.append(endpoint)
        self._poller.register(endpoint.socket, zmq.POLLIN)

    def detach(self, endpoint: Endpoint) -> None:
        self.endpoints.remove(endpoint)
        self._poller.unregister(endpoint.socket)

    def _turn(self, wait: float) -> None:
        if self.gone is not None:
            reason = self.gone()
            self.report.check("link.alive", not reason, reason)
        ready = dict(self._poller.poll(0 if self._busy else int(wait * 1000) + 1))
        for endpoint in list(self.endpoints):
            if endpoint.socket in ready:
                endpoint.drain()
        # Work is done only once all that has arrived is read, one piece a turn.
        self._busy = bool(ready)
        if not ready:
            for work in list(self.idle):
                self._busy |= work()
        for endpoint in list(self.endpoints):
            endpoint.tick()


class Endpoint:
    """One end of a link, and what has been heard on it. `hello` is the service's, in the present session."""

    socket: zmq.Socket[bytes]

    def __init__(self, loop: Loop, address: str, role: Role, name: str, model: ModelInfo | None = None) -> None:
        self.loop = loop
        self.report = loop.report
        self.address = address
        self.role = role
        self.name = name
        self.model = model
        self.tokenizer_fingerprint = ""
        self.incarnation = secrets.randbits(63)
        self.status = Heartbeat(0, 0, True)
        self.session = b""
        self.hello: Hello | None = None
        self.model_told: ModelInfo | None = None
        self.refused: str | None = None
        self.beats: list[Heartbeat] = []
        self.inbox: list[AnyMessage] = []
        self.foreign: list[tuple[bytes, AnyMessage]] = []
        self.on_message: Callable[[AnyMessage], None] = self.inbox.append
        self._beat_at = 0.0
        self._heard_at = 0.0

    @property
    def is_open(self) -> bool:
        return self.hello is not None

    def send(self, message: Message) -> None:
        self.send_frames(self.session, messages.encode(message))

    def send_in(self, session: bytes, message: Message) -> None:
        """In another session than the present one."""
        self.send_frames(session, messages.encode(message))

    def send_frames(self, *frames: bytes) -> None:
        raise NotImplementedError

    def own_hello(self, protocol_version: int = PROTOCOL_VERSION, lowest: int = MIN_PROTOCOL_VERSION) -> Hello:
        return Hello(
            protocol_version,
            lowest,
            self.role,
            self.name,
            self.incarnation,
            self.model,
            self.tokenizer_fingerprint,
            "conformance kit",
        )

    def of(self, kind: type[T]) -> list[T]:
        """All messages of a kind that have come and were not taken."""
        return [message for message in self.inbox if isinstance(message, kind)]

    def take(self, rule: str, kind: type[T], what: str = "") -> T:
        """Waits for a message of that kind; those of other kinds before it stay."""
        self.loop.expect(rule, lambda: self.of(kind), what or f"no {kind.__name__} came")
        place = next(i for i, message in enumerate(self.inbox) if isinstance(message, kind))
        taken = self.inbox.pop(place)
        assert isinstance(taken, kind)
        return taken

    def drain(self) -> None:
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            self._on_frames(frames)

    def tick(self) -> None:
        now = self.loop.now()
        if self.is_open and now >= self._beat_at:
            self._beat_at = now + BEAT_INTERVAL
            self.send(self.status)
        if self.is_open:
            silent = now - self._heard_at
            self.report.check("link.heartbeat", silent < SILENT_AFTER, f"{self.name} heard nothing for {silent:.1f} s")

    def close(self) -> None:
        """As a death is: nothing more is sent."""
        if self in self.loop.endpoints:
            self.loop.detach(self)
            self.socket.close(linger=0)
        self.hello = None

    def _on_frames(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _decode(self, frames: list[bytes], num_frames: int) -> AnyMessage:
        self.report.check("link.frames", len(frames) == num_frames, f"a message of {len(frames)} frames")
        try:
            message = messages.decode(frames[-1])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.report.check("link.frames", False, f"a payload does not decode: {error}")
            raise AssertionError from error
        self.report.check("link.frames", True, "")
        return message

    def _greeted(self, hello: Hello) -> None:
        self.hello, self.model_told = hello, hello.model
        self.beats = []
        self._heard_at = self.loop.now()
        self._beat_at = 0.0

    def _receive(self, message: AnyMessage) -> None:
        self._heard_at = self.loop.now()
        if isinstance(message, Heartbeat):
            before = self.beats[-1].progress if self.beats else message.progress
            self.report.check(
                "link.progress", message.progress >= before, f"progress fell from {before} to {message.progress}"
            )
            self.beats.append(message)
        elif isinstance(message, ModelChanged):
            self.model_told = message.model
        else:
            self.on_message(message)


class Dialled(Endpoint):
    """An end that dials a service, as tokenizers and executors do."""

    def __init__(self, loop: Loop, address: str, role: Role, name: str, model: ModelInfo | None = None) -> None:
        super().__init__(loop, address, role, name, model)
        self.reset_sessions: list[bytes] = []
        self.num_greetings = 0
        self._connect()

    def _connect(self) -> None:
        self.socket = self.loop.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self.socket.connect(self.address)
        self.loop.attach(self)

    def greet(self, hello: Hello | None = None) -> bytes:
        """Sends a Hello in a new session, which is the present one from now on."""
        self.hello, self.refused = None, None
        self.session = secrets.token_bytes(8)
        payload = messages.encode(hello or self.own_hello())
        what = f"{self.address} is not served"
        self.loop.expect("link.hello", lambda: self._try_send([self.session, payload]), what, START_PATIENCE)
        return self.session

    def open(self) -> None:
        """Opens a session; anything but the service's Hello breaks a rule."""
        self.greet()
        self.loop.expect("link.hello", lambda: self.hello or self.refused, f"no answer to the Hello of {self.name}")
        self.report.check("link.hello", self.refused is None, f"the Hello of {self.name} was refused: {self.refused}")

    def reopen(self) -> None:
        """Dies and comes again as another process would."""
        self.close()
        self.incarnation = secrets.randbits(63)
        self._connect()
        self.open()

    def send_frames(self, *frames: bytes) -> None:
        what = f"{self.address} is not served any more"
        self.loop.expect("link.hello", lambda: self._try_send(list(frames)), what)

    def _try_send(self, frames: list[bytes]) -> bool:
        """False while there is no connection."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _on_frames(self, frames: list[bytes]) -> None:
        message = self._decode(frames, 2)
        session = frames[0]
        if isinstance(message, Reset):
            self.reset_sessions.append(session)
        elif session != self.session:
            self.foreign.append((session, message))
        elif isinstance(message, Hello):
            self.num_greetings += 1
            if self.hello is None:
                self._greeted(message)
        elif isinstance(message, Refused):
            self.refused = message.reason
        elif self.is_open:
            self._receive(message)


class Bound(Endpoint):
    """An end that a service dials, as gateways and schedulers have."""

    def __init__(self, loop: Loop, address: str, role: Role, name: str, model: ModelInfo | None = None) -> None:
        super().__init__(loop, address, role, name, model)
        self.expected_role = Role.TOKENIZER
        self.answer: Callable[[], Message | None] = self.own_hello
        self.hellos: list[tuple[bytes, Hello]] = []
        self.unopened: list[AnyMessage] = []
        self._route = b""
        self.bind()

    def bind(self) -> None:
        deadline = time.monotonic() + BIND_PATIENCE
        while True:
            self.socket = self.loop.context.socket(zmq.ROUTER)
            self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            try:
                self.socket.bind(self.address)
                break
            except zmq.ZMQError as error:
                # The port of a socket just closed is free a moment later.
                self.socket.close(linger=0)
                if time.monotonic() > deadline:
                    raise OSError(f"cannot bind {self.address}: {error.strerror}") from error
                time.sleep(0.02)
        self.loop.attach(self)

    def wait_open(self, what: str = "") -> None:
        self.loop.expect(
            "link.hello", lambda: self.is_open, what or f"nobody dials {self.name} at {self.address}", START_PATIENCE
        )

    def restart(self, pause: float = 0.0) -> None:
        """Dies and comes again as another process would, with a new incarnation."""
        self.close()
        if pause:
            self.loop.run_for(pause)
        self.incarnation = secrets.randbits(63)
        self.bind()

    def close(self) -> None:
        super().close()
        self.session = b""

    def send_frames(self, *frames: bytes) -> None:
        if self._route:
            self.socket.send_multipart([self._route, *frames])

    def _on_frames(self, frames: list[bytes]) -> None:
        message = self._decode(frames, 3)
        route, session = frames[0], frames[1]
        if isinstance(message, Hello):
            self._on_hello(route, session, message)
        elif session != self.session:
            self.foreign.append((session, message))
            self.socket.send_multipart([route, session, messages.encode(Reset())])
        elif self.is_open:
            self._receive(message)
        else:
            self.unopened.append(message)
            if not isinstance(message, (Heartbeat, ModelChanged)):
                self.on_message(message)

    def _on_hello(self, route: bytes, session: bytes, hello: Hello) -> None:
        self.hellos.append((session, hello))
        self.report.check("link.hello", len(session) == 8, f"a session id of {len(session)} bytes")
        self.report.check(
            "link.hello",
            hello.role is self.expected_role,
            f"its Hello says that it is a {hello.role.name.lower()}",
        )
        if session != self.session:
            self.hello = None
        self._route, self.session = route, session
        answer = self.answer()
        if answer is not None:
            self.send(answer)
            usable = isinstance(answer, Hello) and answer.min_protocol_version <= PROTOCOL_VERSION
            if self.hello is None and usable:
                self._greeted(hello)
