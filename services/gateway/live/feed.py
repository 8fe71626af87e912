"""The one account of what happens: asked for while there are viewers, from one of the tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quartet.services.gateway.events import StreamError, unavailable
from quartet.services.gateway.live.account import Account, Contradiction
from quartet.services.gateway.live.latency import Latencies
from quartet.services.gateway.live.roster import Roster
from quartet.services.gateway.live.trace_log import TraceLog
from quartet.services.gateway.live.viewer import Viewer
from quartet.services.gateway.tokenizer import Peer
from quartet.shared.log import get_logger
from quartet.shared.messages import ErrorCode, Role, Watch, WatchedService, WatchedSpans, WatchEnded, WatchEvents

if TYPE_CHECKING:
    from quartet.services.gateway.stream_table import StreamTable

MAX_VIEWERS = 32
# Seconds between two requests for a new account where events do not fit.
ASK_AGAIN = 1.0

_log = get_logger()


class LiveFeed:
    """Part of the stream table, whose `latencies` are there exactly while somebody looks, and whose metrics'
    `trace_log` while somebody traces. `gateway` tells of this process; without it the gateway is not listed."""

    def __init__(self, table: StreamTable, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self.account = Account()
        self.wall_clock = wall_clock
        self.gateway: Callable[[], WatchedService] | None = None
        self._table = table
        self._clock = clock
        self._viewers: list[Viewer] = []
        self._peer: Peer | None = None
        self._interval_ms = 0
        self._asked_at = 0.0
        self._roster = Roster(clock)

    @property
    def has_account(self) -> bool:
        """A scheduler has told what is so."""
        return self.account.members["queue"] is not None

    # --- viewers ------------------------------------------------------------------------------------

    def open(self, interval_ms: int, trace: bool) -> Viewer:
        """Raises StreamError when there are too many."""
        if self._table.draining:
            raise unavailable("the gateway is shutting down")
        if len(self._viewers) >= MAX_VIEWERS:
            message = f"{MAX_VIEWERS} viewers are looking already"
            raise StreamError(ErrorCode.RESOURCE_EXHAUSTED, message, retry_after_ms=1000)
        viewer = Viewer(self, interval_ms, trace)
        self._viewers.append(viewer)
        try:
            if len(self._viewers) == 1:
                self._table.latencies = Latencies(self._clock)
                self._list_tokenizers()
            self._watch()
            if trace:
                self._trace(viewer)
        except BaseException:
            self.close(viewer)
            raise
        return viewer

    def close(self, viewer: Viewer) -> None:
        if viewer in self._viewers:
            self._viewers.remove(viewer)
        trace_log = self._table.metrics.trace_log
        if trace_log is not None and viewer in trace_log.viewers:
            trace_log.viewers.remove(viewer)
            if not trace_log.viewers:
                self._table.metrics.trace_log = None
                trace_log.leave()
        if not self._viewers:
            self._table.latencies = None
            self._leave()
            self.account = Account()
            self._roster = Roster(self._clock)

    def end_all(self) -> None:
        """The gateway stops."""
        for viewer in self._viewers:
            viewer.over.set()
            viewer.changed.set()

    def member(self, name: str) -> Any:
        """What replaces as a whole, as viewers get it."""
        if name == "services":
            return self._roster.listed()
        if name == "latency":
            return None if self._table.latencies is None else self._table.latencies.percentiles()
        if name == "model":
            return self._model()
        return self.account.members[name]

    # --- the tokenizers -----------------------------------------------------------------------------

    def peers_changed(self) -> None:
        """One came or went, or is another now."""
        if self._viewers:
            self._list_tokenizers()
            self._watch()
            if self._table.metrics.trace_log is not None:
                self._table.metrics.trace_log.ask(self._table.tokenizers)
            self._wake()

    def on_message(self, peer: Peer, message: WatchEvents | WatchEnded | WatchedSpans) -> None:
        if isinstance(message, WatchedSpans):
            if self._table.metrics.trace_log is not None:
                self._table.metrics.trace_log.on_message(peer, message)
            return
        if peer is not self._peer:
            return
        if isinstance(message, WatchEnded):
            self._roster.set([], (Role.SCHEDULER,))
            self._wake()
            return
        try:
            changes = self.account.apply(message)
        except Contradiction as error:
            if self._clock() - self._asked_at >= ASK_AGAIN:
                _log.warning("the live account starts over", reason=str(error))
                self._ask(peer)
            return
        self._roster.set(message.services, (Role.SCHEDULER, Role.EXECUTOR))
        for viewer in self._viewers:
            viewer.merge(changes)
        self._wake()

    # --- inside -------------------------------------------------------------------------------------

    def _trace(self, viewer: Viewer) -> None:
        trace_log = self._table.metrics.trace_log
        if trace_log is None:
            name = "gateway" if self.gateway is None else self.gateway().name
            trace_log = TraceLog(name, self._clock, self.wall_clock() - self._clock())
            self._table.metrics.trace_log = trace_log
        trace_log.begin(viewer, self._table.open_streams)
        trace_log.ask(self._table.tokenizers)

    def _watch(self) -> None:
        """Asks the best of the tokenizers, where it is another one now, or more often."""
        tokenizers = self._table.tokenizers.values()
        best = min(
            (t for t in tokenizers if t.peer.alive),
            key=lambda t: (not t.usable, t.peer.draining, t.peer is not self._peer),
            default=None,
        )
        peer = None if best is None else best.peer
        interval_ms = min(viewer.interval_ms for viewer in self._viewers)
        if peer is not self._peer:
            self._leave()
            self._roster.set([], (Role.SCHEDULER,))
            self._peer = peer
        elif interval_ms >= self._interval_ms:
            return
        self._interval_ms = interval_ms
        if peer is not None:
            self._ask(peer)

    def _ask(self, peer: Peer) -> None:
        self._asked_at = self._clock()
        peer.send(Watch(self._interval_ms))

    def _leave(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None and peer.alive:
            peer.send(Watch(0))

    def _wake(self) -> None:
        for viewer in self._viewers:
            viewer.changed.set()

    def _list_tokenizers(self) -> None:
        services = [
            WatchedService(
                Role.TOKENIZER, peer.name, peer.incarnation, peer.version, peer.ready, peer.draining, peer.stalled
            )
            for peer in (tokenizer.peer for tokenizer in self._table.tokenizers.values())
            if peer.alive
        ]
        if self.gateway is not None:
            services.append(self.gateway())
        self._roster.set(services, (Role.GATEWAY, Role.TOKENIZER))

    def _model(self) -> dict[str, Any] | None:
        try:
            model, _ = self._table.model()
        except StreamError:
            return None
        names = ("name", "max_model_len", "vocab_size", "dtype", "device")
        return {name: getattr(model, name) for name in names}
