"""Calls to a tokenizer that are answered once (GetLoads, Encode, Decode, ResetPrefixCache)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from quartet.services.gateway.events import StreamError, unavailable
from quartet.services.gateway.tokenizer import Peer
from quartet.shared.messages import CallFailed, Decoded, Encoded, Loads, Message, PrefixCacheReset

MAX_TRIES = 3

Answer = Loads | Encoded | Decoded | PrefixCacheReset
Done = Callable[[Answer | StreamError], None]


class _Call(NamedTuple):
    make: Callable[[int], Message]
    done: Done
    peer: Peer
    tried: set[Peer]


class Calls:
    """Open calls. They may be made twice, so one whose tokenizer goes is made again to another."""

    def __init__(self, pick: Callable[[Iterable[Peer]], Peer | None]) -> None:
        self._pick = pick
        self._ids = itertools.count(1)
        self._open: dict[int, _Call] = {}

    def start(self, make: Callable[[int], Message], done: Done) -> int:
        """Sends make(call_id); `done` is called once with the answer, unless the call is dropped."""
        call_id = next(self._ids)
        self._send(call_id, make, done, set())
        return call_id

    def drop(self, call_id: int) -> None:
        self._open.pop(call_id, None)

    def on_answer(self, peer: Peer, message: Answer | CallFailed) -> None:
        call = self._open.get(message.call_id)
        if call is None or call.peer is not peer:
            return
        del self._open[message.call_id]
        if isinstance(message, CallFailed):
            call.done(StreamError(message.code, message.message, field=message.field))
        else:
            call.done(message)

    def on_down(self, peer: Peer) -> None:
        for call_id, call in list(self._open.items()):
            if call.peer is peer:
                self._send(call_id, call.make, call.done, call.tried)

    def _send(self, call_id: int, make: Callable[[int], Message], done: Done, tried: set[Peer]) -> None:
        while len(tried) < MAX_TRIES and (peer := self._pick(tried)) is not None:
            tried.add(peer)
            self._open[call_id] = _Call(make, done, peer, tried)
            if peer.send(make(call_id)):
                return
        self._open.pop(call_id, None)
        done(unavailable("no tokenizer can answer"))
