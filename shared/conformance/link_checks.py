"""What holds on every link: greeting, fencing, garbage, beats."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

from quartet.shared.conformance.report import Violation
from quartet.shared.conformance.wire import SILENT_AFTER, Bound, Dialled, Loop
from quartet.shared.messages import Message, Refused, Reset, Role, encode

_RULES = {
    "link.alive": "the service does not end by itself, whatever it is sent (with --spawn)",
    "link.hello": "a session opens with a Hello of the right role in a fresh session id of 8 bytes",
    "link.version": "peers whose protocol versions do not meet, or one that was refused, get no session",
    "link.fencing": "a frame of another session than the present one changes nothing (a binder answers it with Reset)",
    "link.garbage": "frames that do not decode are dropped: the session goes on",
    "link.frames": "every frame sent is of the protocol: [session][one message]",
    "link.heartbeat": "every session is heard at least every three intervals (2.4 s), idle ones by heartbeats",
    "link.progress": "the heartbeat's progress never falls, and rises with work done",
}
BINDER_RULES = _RULES | {
    "link.role": "a Hello of a role that has no business on the link is refused with a reason",
    "link.repeated-hello": "a Hello repeated in its session is answered again and resets nothing",
}
DIALLER_RULES = _RULES | {"link.reset": "a dialer that is told Reset opens a new session"}

_GARBAGE = (b"", b"\xc1", b"\x91", b"\x92\x01", b"\xdd\xff\xff\xff\xff\x50", b"\x92\x50\xa1x", b"\x91\xcd\x7f\xff")


def garbage(message: Message) -> list[bytes]:
    """Payloads that are none: random bytes, wrong types, and a real message cut short."""
    whole = encode(message)
    return [*_GARBAGE, whole[:-1], whole[: len(whole) // 2], whole + b"\0", secrets.token_bytes(200)]


def binder(
    loop: Loop,
    dial: Callable[[Role], Dialled],
    role: Role,
    wrong: Role,
    works: Callable[[Dialled], None],
    probe: Message,
    answered: type,
) -> None:
    """Checks a bound link. `works` shows that an open session does; `probe` is a message that would be
    `answered` with a message of that type in it."""
    check = loop.report.check
    peer = dial(role)
    for versions in ((99, 99), (0, 0)):
        peer.greet(peer.own_hello(*versions))
        loop.expect("link.version", lambda: peer.refused, f"a Hello of protocol version {versions[0]} was not refused")
        check("link.version", peer.refused, "a refusal without a reason")
    peer.greet(peer.own_hello(99, 1))
    loop.expect("link.version", lambda: peer.is_open, "a higher version that speaks ours too was not let in")
    works(peer)
    peer.close()

    peer = dial(wrong)
    peer.greet()
    loop.expect("link.role", lambda: peer.refused, f"a {wrong.name.lower()} was not refused")
    check("link.role", not peer.is_open, "a session was opened")
    peer.close()

    peer = dial(role)
    peer.greet()
    loop.expect("link.hello", lambda: peer.is_open, "no answer to a Hello")
    hello = peer.hello
    first = peer.session
    strange = {secrets.token_bytes(8), b"", b"xxx"}
    for session in strange:
        peer.send_in(session, probe)
    loop.expect("link.fencing", lambda: strange <= set(peer.reset_sessions), "a frame of no session was not Reset")
    before = peer.num_greetings
    peer.send(peer.own_hello())
    loop.expect("link.repeated-hello", lambda: peer.num_greetings > before, "a repeated Hello was not answered")
    works(peer)
    for payload in garbage(probe):
        peer.send_frames(peer.session, payload)
    peer.send_frames(peer.session)
    peer.send_frames(peer.session, b"\x90", b"one too many")
    works_or(loop, "link.garbage", peer, works)

    peer.open()
    check("link.hello", peer.hello == hello, "two answers to Hello from one process differ")
    peer.send_in(first, probe)
    loop.expect("link.fencing", lambda: first in peer.reset_sessions, "a frame of a session that is over was not Reset")
    works(peer)
    check(
        "link.fencing",
        not [m for s, m in peer.foreign if isinstance(m, answered)],
        "a frame of another session was answered as if it belonged to this one",
    )
    peer.close()


def works_or(loop: Loop, rule: str, peer: Dialled, works: Callable[[Dialled], None]) -> None:
    """`works`, with its failure held against `rule`."""
    resets = len(peer.reset_sessions)
    try:
        works(peer)
    except Violation as violation:
        loop.report.check(rule, False, violation.detail)
    loop.report.check(rule, len(peer.reset_sessions) == resets, "the session was reset")


def dialler(loop: Loop, bound: Bound, probe: Callable[[], Message], answers: Callable[[], int]) -> None:
    """Checks a link that the service dials; `bound` is open. Each `probe` sent in a session is answered,
    in order, and raises `answers` by one."""
    check = loop.report.check

    # A binder that restarted, and is slow to answer.
    first = bound.session
    bound.answer = lambda: None
    bound.restart()
    loop.expect("link.hello", partial(_greeted, bound, first), "no Hello in a new session after a reconnect")
    loop.run_for(0.3)
    check("link.hello", not bound.unopened, "a message came before the Hello was answered")
    bound.answer = bound.own_hello
    bound.wait_open("its Hello was not sent again until it was answered")

    # Sessions of others.
    before = answers()
    for session in (secrets.token_bytes(8), first, b""):
        bound.send_in(session, probe())
    bound.send(probe())
    loop.expect("link.fencing", lambda: answers() > before, "no answer to a message after frames of other sessions")
    loop.run_for(0.1)
    check("link.fencing", answers() == before + 1, "a frame of another session was answered")

    # Garbage.
    before, session = answers(), bound.session
    for payload in garbage(probe()):
        bound.send_frames(session, payload)
    bound.send_frames(session)
    bound.send_frames(session, b"\x90", b"one too many")
    bound.send(probe())
    loop.expect("link.garbage", lambda: answers() > before, "no answer to a message after frames that do not decode")
    check("link.garbage", bound.session == session, "the session was given up")

    bound.send(Reset())
    loop.expect("link.reset", lambda: bound.session != session and bound.is_open, "no new session after Reset")

    # Versions.
    for answer in (bound.own_hello(99, 99), Refused("by the conformance kit")):
        before, session = answers(), bound.session
        bound.answer = partial(_same, answer)
        bound.restart()
        loop.expect("link.hello", partial(_greeted, bound, session), "no Hello after a reconnect")
        bound.send(probe())
        loop.run_for(0.5)
        check(
            "link.version",
            answers() == before,
            "it went on with a binder whose protocol versions do not meet its own, or that refused it",
        )
    bound.answer = bound.own_hello
    bound.restart()
    bound.wait_open("it did not come back once the binder was right again")


def beats(loop: Loop, *ends: Bound | Dialled) -> None:
    """Idle sessions beat."""
    loop.run_for(0.2)
    for end in ends:
        end.beats = end.beats[-1:]
    loop.expect(
        "link.heartbeat",
        lambda: all(len(end.beats) >= 3 for end in ends),
        "two further heartbeats of an idle session",
        2 * SILENT_AFTER,
    )


def moves(loop: Loop, end: Bound | Dialled, before: int) -> None:
    """Work has been done since progress was `before`."""
    loop.expect(
        "link.progress",
        lambda: end.beats and end.beats[-1].progress > before,
        "work was done and progress stood still",
        SILENT_AFTER,
    )


def progress(end: Bound | Dialled) -> int:
    return end.beats[-1].progress if end.beats else 0


def _same(message: Message) -> Message:
    return message


def _greeted(bound: Bound, session: bytes) -> bool:
    """Whether a Hello has come in a session after that one."""
    return bound.session not in (b"", session)
