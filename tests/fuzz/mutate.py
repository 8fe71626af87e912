"""Frames made wrong: bit flips, cuts, wrong types, absurd numbers, fields and messages in wrong places."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from quartet.shared import messages

INTS = [0, -1, 1, 2, 3, 7, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1]
INTS += [2**63, 2**64 - 1, -(2**31), -(2**63)]
FLOATS = [float("nan"), float("inf"), float("-inf"), -0.0, 1e308, -1e308, 5e-324, 0.5, -1.0]
TEXTS = ["", "\0", "a" * 5000, "\U0010ffff", "\ud7ff", "%s{}", "\r\n", "é" * 300]
BYTES = [b"", b"\0", b"\xff" * 7, b"\xff" * 64, b"\1\0", bytes(4096), b"\xed\xa0\x80"]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [[[[[]]]]], "x", b"x", 0.5, 1, {"a": 1}, {1: 2}]
_encoder = msgspec.msgpack.Encoder()

Node = tuple[Any, Any]  # (container, key)


class Mutator:
    """All choices come from `rng`. `history` holds frames that went before, to be sent again."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.history: deque[bytes] = deque(maxlen=200)

    def frame(self, message: messages.Message, others: Callable[[], messages.Message]) -> bytes:
        """A frame made from a valid message; now and then the message itself, or one from before."""
        rng = self.rng
        payload = messages.encode(message)
        kind = rng.random()
        if kind < 0.05 and self.history:
            return rng.choice(self.history)
        self.history.append(payload)
        if kind < 0.12:
            return payload
        if kind < 0.20:
            return messages.encode(others())
        if kind < 0.45:
            return self._bytes(payload)
        tree = msgspec.msgpack.decode(payload, strict=False)
        for _ in range(1 if rng.random() < 0.7 else rng.randint(2, 5)):
            self._tree(tree)
            try:
                # Encoded in between, so that what was put in twice is two things and no loop.
                payload = _encoder.encode(tree)
            except (OverflowError, RecursionError):  # a number beyond the wire's, a list within itself
                return payload
            tree = msgspec.msgpack.decode(payload, strict=False)
        return payload

    def session(self, session: bytes, strange: list[bytes]) -> bytes:
        """Mostly the session itself, so that the frame is looked at."""
        if self.rng.random() < 0.9:
            return session
        return self.rng.choice([b"", session[:-1], session + b"\0", bytes(8), self.rng.randbytes(8), *strange])

    def _bytes(self, payload: bytes) -> bytes:
        rng, data = self.rng, bytearray(payload)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            place = rng.randrange(len(data)) if data else 0
            match rng.randrange(7):
                case 0 if data:
                    data[place] ^= 1 << rng.randrange(8)
                case 1:
                    del data[place:]
                case 2:
                    data[place:place] = rng.randbytes(rng.choice((1, 2, 9)))
                case 3 if data:
                    data[place] = rng.choice(
                        (0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xCB, 0xCF, 0xD3, 0xDB, 0xDD, 0xDF, 0xFF)
                    )
                case 4:
                    end = rng.randint(place, len(data))
                    data[place:place] = data[place:end] * rng.choice((1, 2, 50))
                case 5:
                    end = rng.randint(place, len(data))
                    del data[place:end]
                case 6:
                    data[place:place] = rng.choice((b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 3000))
        return bytes(data)

    def _tree(self, tree: Any) -> None:
        rng = self.rng
        nodes = list(_nodes(tree))
        if not nodes:
            return
        parent, key = rng.choice(nodes)
        value = parent[key]
        match rng.randrange(10):
            case 0:
                parent[key] = rng.choice(OTHERS)
            case 1:
                other, other_key = rng.choice(nodes)
                parent[key], other[other_key] = other[other_key], value
            case 2 if isinstance(parent, list):
                del parent[key]
            case 3 if isinstance(parent, list):
                parent.extend([parent[key]] * rng.choice((1, 2, 3, 300)))
            case _:
                parent[key] = self._like(value)

    def _like(self, value: Any) -> Any:
        """Another value of the same type, as a rule."""
        rng = self.rng
        match value:
            case bool():
                return not value
            case int():
                return rng.choice((*INTS, value + 1, value - 1, value ^ (1 << rng.randrange(40)), -value))
            case float():
                return rng.choice((*FLOATS, value * -2, value + 1))
            case str():
                return rng.choice((*TEXTS, value + value, value[: len(value) // 2]))
            case bytes():
                return rng.choice((*BYTES, value + value, value[:-1], value[::-1], self._bytes(value)))
            case list():
                copied = list(value)
                match rng.randrange(4):
                    case 0:
                        return []
                    case 1:
                        return copied * rng.choice((2, 3, 200))
                    case 2:
                        rng.shuffle(copied)
                        return copied
                    case _:
                        return copied[:-1]
            case dict():
                return {} if rng.random() < 0.5 else {**value, rng.choice(INTS): rng.choice((*FLOATS, *INTS))}
            case _:
                return rng.choice((*INTS, *FLOATS, *OTHERS))


def _nodes(tree: Any) -> Any:
    if isinstance(tree, (list, dict)):
        for key in range(len(tree)) if isinstance(tree, list) else list(tree):
            yield tree, key
            yield from _nodes(tree[key])
