"""What becomes of streams here and where the time goes, noted for viewers that trace. There is none without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from quartet.services.gateway.tokenizer import Peer
from quartet.shared.messages import Role, WatchedSpan, WatchedSpans, WatchSpans

if TYPE_CHECKING:
    from quartet.services.gateway.live.viewer import Viewer
    from quartet.services.gateway.stream import Stream


class TraceLog:
    """`clock` is monotonic, in seconds; `wall` is what to add to it for the wall clock."""

    def __init__(self, name: str, clock: Callable[[], float], wall: float) -> None:
        self.viewers: list[Viewer] = []
        self._name = name
        self._clock = clock
        self._wall = wall
        self._asked: set[Peer] = set()

    # --- the gateway's own part ---------------------------------------------------------------------

    def begin(self, viewer: Viewer, streams: Iterable[Stream]) -> None:
        """The viewer is told what open streams do already."""
        self.viewers.append(viewer)
        now = self._wall + self._clock()
        for stream in streams:
            begun = "opened" if not stream.accepted else "accepted"
            what = "first_token" if stream.num_cached_tokens is not None else begun
            viewer.stream_events.append((now, f"{stream.request_id:016x}", what))

    def happened(self, stream: Stream, what: str) -> None:
        event = (self._wall + self._clock(), f"{stream.request_id:016x}", what)
        for viewer in self.viewers:
            viewer.stream_events.append(event)
            viewer.changed.set()

    def passed_on(self, began: float, num_tokens: int) -> None:
        """So many tokens of one step; `began` is by the clock."""
        duration_us = round(1e6 * (self._clock() - began))
        self._note(Role.GATEWAY, self._name, [WatchedSpan("deltas", self._wall + began, duration_us, num_tokens)])

    # --- the tokenizers' part -----------------------------------------------------------------------

    def ask(self, peers: Iterable[Peer]) -> None:
        """All tokenizers that are there."""
        there = {peer for peer in peers if peer.alive}
        for peer in there - self._asked:
            peer.send(WatchSpans(enabled=True))
        self._asked = there

    def leave(self) -> None:
        for peer in self._asked:
            if peer.alive:
                peer.send(WatchSpans(enabled=False))

    def on_message(self, peer: Peer, message: WatchedSpans) -> None:
        if peer in self._asked:
            self._note(Role.TOKENIZER, peer.name, message.spans)

    # --- inside -------------------------------------------------------------------------------------

    def _note(self, role: Role, name: str, spans: Iterable[WatchedSpan]) -> None:
        told = [
            (
                role.name.lower(),
                name,
                span.name,
                span.at,
                span.duration_us / 1000,
                span.num_tokens,
                None if span.request_id is None else f"{span.request_id:016x}",
            )
            for span in spans
        ]
        for viewer in self.viewers:
            viewer.spans.extend(told)
            viewer.changed.set()
