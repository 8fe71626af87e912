"""A frame that is too long cuts its sender off, and nobody else; the link heals by itself."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest
from support.links import Recorder, ready

from quartet.shared import link as link_module
from quartet.shared import transport
from quartet.shared.link import BinderLink, DialerLink, Identity
from quartet.shared.messages import Encoded, GetLoads, ModelChanged, ModelInfo, Role, encode
from quartet.shared.thread_dialer import ThreadDialer
from quartet.shared.transport import Binder, Dialer, ipc_address

LIMIT = 10_000
TOO_LONG = b"x" * (LIMIT + 1)
MODEL = ModelInfo("m", "f", 1000, 256, 64, 16, 8, 32, "float32", "cpu")


@pytest.fixture(autouse=True)
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", LIMIT)
    monkeypatch.setattr(link_module, "MAX_FRAME_BYTES", LIMIT)


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Any) -> str:
    if request.param == "ipc":
        return ipc_address(tmp_path, "link")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def make(address: str, recorder: Recorder, kind: type = Dialer, name: str = "t") -> Any:
    return kind(address, Identity(Role.TOKENIZER, name), recorder, ready)


@pytest.mark.parametrize("kind", [Dialer, ThreadDialer])
def test_a_dialer_that_is_sent_too_much_comes_back(address: str, kind: type) -> None:
    async def scenario() -> None:
        left, right = Recorder(), Recorder()
        b = Binder(address, Identity(Role.SCHEDULER, "s"), right, ready)
        d = make(address, left, kind)
        b.start()
        d.start()
        peer = await right.expect("up")
        await left.expect("up")
        assert b.send(peer.route, peer.session, TOO_LONG)
        await left.expect("down")
        await right.expect("down")
        again = await right.expect("up")
        await left.expect("up")
        assert again is not peer and again.send(GetLoads(1))
        assert await left.expect("message") == GetLoads(1)
        d.close()
        b.close()

    asyncio.run(scenario())


def test_a_binder_that_is_sent_too_much_loses_that_peer_alone(address: str) -> None:
    async def scenario() -> None:
        good_side, bad_side, right = Recorder(), Recorder(), Recorder()
        b = Binder(address, Identity(Role.SCHEDULER, "s"), right, ready)
        b.start()
        good, bad = make(address, good_side, name="good"), make(address, bad_side, name="bad")
        good.start()
        to_right = await good_side.expect("up")
        await right.expect("up")
        bad.start()
        peer = await right.expect("up")
        await bad_side.expect("up")
        bad.send(b"", peer.session, TOO_LONG)
        assert await right.expect("down") is peer
        for i in range(100):
            assert to_right.send(GetLoads(i))
        assert [await right.expect("message") for _ in range(100)] == [GetLoads(i) for i in range(100)]
        assert to_right.alive
        await bad_side.expect("up")  # and it may come back
        for each in (good, bad, b):
            each.close()

    asyncio.run(scenario())


class Wire:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.reconnects = 0

    def send(self, route: bytes, session: bytes, payload: bytes) -> bool:
        self.sent.append(payload)
        return True

    def wake(self) -> None: ...

    def reconnect(self) -> None:
        self.reconnects += 1


def session(recorder: Recorder, wire: Wire) -> tuple[BinderLink, Any]:
    link = BinderLink(Identity(Role.SCHEDULER, "s"), recorder, ready, wire, lambda: 0.0)
    link.on_frame(b"r", b"12345678", encode(Identity(Role.TOKENIZER, "t").hello()))
    return link, link.peers[b"r"]


def test_a_message_that_is_too_long_is_not_sent() -> None:
    recorder, wire = Recorder(), Wire()
    _, peer = session(recorder, wire)
    del wire.sent[:]
    assert peer.send(Encoded(1, [1] * (LIMIT + 1), []))
    assert not wire.sent and peer.alive
    assert peer.send(Encoded(1, [1] * (LIMIT - 100), [])) and len(wire.sent) == 1


def test_a_dialer_dials_again_where_zeromq_has_given_up() -> None:
    now = 0.0
    wire = Wire()
    link = DialerLink(Identity(Role.TOKENIZER, "t"), Recorder(), ready, wire, lambda: now, heartbeat_interval=0.8)
    link.on_connected()
    link.on_disconnected()
    now = 2.0
    link.tick()
    assert not wire.reconnects
    now = 2.5
    link.tick()
    link.tick()
    assert wire.reconnects == 1
    link.on_connected()
    now = 4.0
    link.tick()
    assert wire.reconnects == 1


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 1_000_000,  # nested deeper than any stack
        b"\x92\x05" + b"\x91" * 1_000_000,
        b"\x92\x14" + b"\x91" * 5_000_000,
        b"\x92\x14\xdd\xff\xff\xff\xff",  # four billion items announced, none there
        b"\x93\x19\x01\xdb\xff\xff\xff\xff",
        b"\x94\x11\x01\x01\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"",
    ],
)
def test_what_is_nested_or_announces_too_much_is_dropped_at_once(payload: bytes) -> None:
    recorder, wire = Recorder(), Wire()
    link, peer = session(recorder, wire)
    link.on_frame(b"r", peer.session, payload)
    assert link.frames_dropped == 1 and peer.alive


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0},
        {"block_size": -16},
        {"num_blocks": 0},
        {"num_blocks": 2**62},
        {"max_num_seqs": 2**63},
        {"max_num_batched_tokens": 0},
        {"vocab_size": -1},
        {"max_model_len": 0},
        {"name": "x" * 100_000},
        {"model_fingerprint": "x" * 100_000},
    ],
)
def test_a_model_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    impossible = msgspec.structs.replace(MODEL, **change)
    recorder, wire = Recorder(), Wire()
    link = BinderLink(Identity(Role.SCHEDULER, "s"), recorder, ready, wire, lambda: 0.0)
    link.on_frame(b"r", b"12345678", encode(Identity(Role.EXECUTOR, "e", model=impossible).hello()))
    assert not link.peers
    assert b"which is not between" in wire.sent[-1] or b"characters, more than" in wire.sent[-1]

    link.on_frame(b"r", b"12345678", encode(Identity(Role.EXECUTOR, "e", model=MODEL).hello()))
    link.on_frame(b"r", b"12345678", encode(ModelChanged(impossible)))
    assert link.peers[b"r"].model == MODEL and link.frames_dropped == 1

    dialer = DialerLink(Identity(Role.TOKENIZER, "t"), recorder, ready, wire, lambda: 0.0)
    dialer.on_connected()
    dialer.on_frame(dialer._session, encode(Identity(Role.SCHEDULER, "s", model=impossible).hello()))
    assert dialer.peer is None


def test_a_handler_that_raises_does_not_end_the_reading(address: str) -> None:
    class Raising(Recorder):
        def on_message(self, peer: Any, message: Any) -> None:
            super().on_message(peer, message)
            if message == GetLoads(0):
                raise RuntimeError("cannot handle this")

    async def scenario() -> None:
        left, right = Recorder(), Raising()
        b = Binder(address, Identity(Role.SCHEDULER, "s"), right, ready)
        d = make(address, left)
        b.start()
        d.start()
        to_right = await left.expect("up")
        for i in range(10):
            to_right.send(GetLoads(i))
        assert [await right.expect("message") for _ in range(10)] == [GetLoads(i) for i in range(10)]
        assert b.frames_dropped == 1
        d.close()
        b.close()

    asyncio.run(scenario())
