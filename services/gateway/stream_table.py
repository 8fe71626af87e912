"""The gateway's ledger: every unfinished request, in a form that can be submitted again.

Without I/O: tokenizers are objects with `send`, time comes from a clock, clients are subscriptions.
A tokenizer may go at any time; its streams are submitted to another one, or wait until one comes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from quartet.services.gateway.attach_search import Search, Searches, taken_over
from quartet.services.gateway.calls import Calls
from quartet.services.gateway.choice import Gap, Position
from quartet.services.gateway.events import RETRY_AFTER_MS, StreamError, unavailable
from quartet.services.gateway.live.feed import LiveFeed
from quartet.services.gateway.live.latency import Latencies
from quartet.services.gateway.metrics import GatewayMetrics
from quartet.services.gateway.retained import Retained
from quartet.services.gateway.stream import Stream
from quartet.services.gateway.subscription import Subscription
from quartet.services.gateway.tokenizer import Peer, Tokenizer
from quartet.shared.log import get_logger
from quartet.shared.messages import (
    Abort,
    Accepted,
    AnyMessage,
    Attached,
    CallFailed,
    Decoded,
    Delta,
    Deltas,
    Encoded,
    ErrorCode,
    Failed,
    FinishReason,
    Hello,
    Loads,
    ModelInfo,
    PrefixCacheReset,
    PromptLogprobs,
    Release,
    Role,
    WatchedSpans,
    WatchEnded,
    WatchEvents,
)
from quartet.shared.trace_context import client_trace

MAX_GAPS = 3

_log = get_logger()


class TableLimits(NamedTuple):
    """Seconds and bytes; see the settings of the same names."""

    max_concurrent_requests: int = 1024
    max_unread_bytes: int = 2**20
    attach_grace: float = 30.0
    max_retained_bytes: int = 64 * 2**20
    attach_timeout: float = 3.0
    recovery_deadline: float = 60.0


class StreamTable:
    """Owns all streams. Not thread-safe; everything happens in one event loop."""

    def __init__(
        self,
        limits: TableLimits,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self.draining = False
        self.progress = 0
        self.tokenizers: dict[Peer, Tokenizer] = {}
        self.calls = Calls(self._call_peer)
        self.metrics = GatewayMetrics(clock)
        self.live = LiveFeed(self, clock, wall_clock)
        # There while somebody looks.
        self.latencies: Latencies | None = None
        self._clock = clock
        self._wall_clock = wall_clock
        self._attempt = 0
        self._open: dict[int, Stream] = {}
        self._waiting: dict[int, Stream] = {}
        self._detached: dict[int, Stream] = {}
        self._retained = Retained(limits.attach_grace, limits.max_retained_bytes)
        self._searches = Searches(limits.attach_timeout, clock, lambda: self._mint_attempt(0))

    # --- for the faces ---

    @property
    def ready(self) -> bool:
        return not self.draining and any(tokenizer.usable for tokenizer in self.tokenizers.values())

    @property
    def open_streams(self) -> Iterable[Stream]:
        return self._open.values()

    @property
    def num_open_streams(self) -> int:
        return len(self._open)

    @property
    def num_retained_streams(self) -> int:
        return len(self._retained)

    @property
    def num_attached_streams(self) -> int:
        """Streams and searches that a client waits for."""
        return len(self._open) - len(self._detached) + len(self._searches)

    @property
    def is_waiting(self) -> bool:
        """Whether `tick` may soon have something to end; what is retained can wait a second."""
        stalled = any(tokenizer.stalled_since is not None for tokenizer in self.tokenizers.values())
        return bool(self._waiting or self._detached or self._searches or stalled)

    def model(self) -> tuple[ModelInfo, str]:
        """The model served, and the tokenizer's fingerprint. Raises StreamError while there is none."""
        for tokenizer in sorted(self.tokenizers.values(), key=lambda tokenizer: not tokenizer.usable):
            if tokenizer.peer.model is not None:
                return tokenizer.peer.model, tokenizer.peer.tokenizer_fingerprint
        raise unavailable("no model is being served yet")

    def admit(self, count: int) -> None:
        """Raises StreamError when so many further streams would not be opened."""
        if self.draining:
            self.metrics.rejected(count)
            raise unavailable("the gateway is shutting down")
        if len(self._open) + count > self.limits.max_concurrent_requests:
            self.metrics.rejected(count)
            raise StreamError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"max_concurrent_requests: {self.limits.max_concurrent_requests} requests are being worked on",
                retry_after_ms=RETRY_AFTER_MS,
            )

    def open(self, make: Callable[[int], Stream], wake: Callable[[], None]) -> Subscription:
        """Starts the stream that `make` builds for a new request id. Raises StreamError."""
        self.admit(1)
        stream = make(secrets.randbits(64))
        stream.trace_context = client_trace.get()
        self.metrics.opened(stream)
        subscription = Subscription(wake, self._close)
        subscription.start_fresh(stream)
        stream.subscription = subscription
        self._open[stream.request_id] = stream
        if self.latencies is not None:
            self.latencies.opened(stream.request_id)
        if stream.unfinished == 0:
            stream.accepted = True
            self._finish(stream)
        else:
            self._place(stream)
        return subscription

    def attach(
        self,
        request_id: int,
        positions: dict[int, Position],
        prompt_logprobs_start: int,
        detach_grace: float | None,
        wake: Callable[[], None],
    ) -> Subscription:
        """Follows a stream from where its client left it, instead of that client's earlier
        subscription. Raises StreamError."""
        subscription = Subscription(wake, self._close)
        stream = self._open.get(request_id) or self._retained.get(request_id)
        if stream is None:
            search = Search(subscription, positions, prompt_logprobs_start, detach_grace or 0.0)
            self._searches.start(request_id, search, self.tokenizers)
            return subscription
        subscription.start(stream, positions, prompt_logprobs_start)
        if detach_grace is not None:
            stream.detach_grace = detach_grace
        if stream.subscription is not None:
            stream.subscription.fail(taken_over())
        stream.subscription = subscription
        stream.detached_at = None
        self._detached.pop(request_id, None)
        return subscription

    def abort(self, request_id: int) -> None:
        """Ends a request for its client too: its unfinished choices finish with ABORT."""
        stream = self._open.get(request_id)
        if stream is not None:
            self._send_abort(stream)
            for choice in stream.choices.values():
                if not choice.finished:
                    choice.finish(FinishReason.ABORT)
            stream.accepted = True
            self._finish(stream)

    def end_all(self, reason: str) -> None:
        """Ends every client's stream with UNAVAILABLE; the requests live on to the right for Attach."""
        for stream in list(self._open.values()):
            self._fail(stream, unavailable(reason))
        self._searches.end_all(unavailable(reason))

    # --- the link to the tokenizers ---

    def refuse(self, hello: Hello) -> str | None:
        """Why a dialer may not come in: what it serves must be what the others serve."""
        if hello.role is not Role.TOKENIZER:
            return f"only tokenizers connect here, not a {hello.role.name.lower()}"
        for tokenizer in self.tokenizers.values():
            other = tokenizer.peer
            if not other.alive or other.name == hello.name:
                continue
            if hello.tokenizer_fingerprint and other.tokenizer_fingerprint not in ("", hello.tokenizer_fingerprint):
                return f"its tokenizer differs from that of {other.name}"
            if (
                hello.model is not None
                and other.model is not None
                and hello.model.model_fingerprint != other.model.model_fingerprint
            ):
                return f"its model {hello.model.name} differs from that of {other.name}, {other.model.name}"
        return None

    def on_up(self, peer: Peer) -> None:
        self.tokenizers[peer] = Tokenizer(peer)
        self._searches.on_up(peer)
        self.on_status(peer)

    def on_down(self, peer: Peer, reason: str) -> None:
        tokenizer = self.tokenizers.pop(peer, None)
        if tokenizer is None:
            return
        for stream in list(tokenizer.streams.values()):
            self._place(stream)
        self._searches.on_down(peer)
        self.calls.on_down(peer)
        self.live.peers_changed()

    def on_status(self, peer: Peer) -> None:
        tokenizer = self.tokenizers.get(peer)
        if tokenizer is None:
            return
        if not peer.stalled:
            tokenizer.stalled_since = None
        elif tokenizer.stalled_since is None:
            tokenizer.stalled_since = self._clock()
        self._leave_stalled()
        self._leave_draining()
        if tokenizer.usable:
            for stream in list(self._waiting.values()):
                stream.refused_by.discard(tokenizer)
                self._place(stream)
        self.live.peers_changed()

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        tokenizer = self.tokenizers.get(peer)
        if tokenizer is None:
            return
        match message:
            case Deltas():
                trace_log = self.metrics.trace_log
                began = 0.0 if trace_log is None else self._clock()
                for delta in message.items:
                    self._on_delta(tokenizer, delta)
                if trace_log is not None:
                    trace_log.passed_on(began, sum(len(delta.token_ids) for delta in message.items))
            case Accepted():
                stream = self._current(tokenizer, message.request_id, message.attempt)
                if stream is not None:
                    self._abort_left(stream)
                if stream is not None and not stream.accepted:
                    self._on_accepted(tokenizer, stream, message)
            case PromptLogprobs():
                self._on_prompt_logprobs(tokenizer, message)
            case Attached():
                self._on_attached(tokenizer, message)
            case Failed():
                self._on_failed(tokenizer, message)
            case Loads() | Encoded() | Decoded() | PrefixCacheReset() | CallFailed():
                self.calls.on_answer(peer, message)
            case WatchEvents() | WatchEnded() | WatchedSpans():
                self.live.on_message(peer, message)
            case _:
                _log.warning("unexpected message", peer=peer.name, message=type(message).__name__)

    def tick(self) -> None:
        """Lets what has waited too long end. To be called several times a second while `is_waiting`."""
        now = self._clock()
        limits = self.limits
        for stream in list(self._waiting.values()):
            if stream.waiting_since is not None and now - stream.waiting_since > limits.recovery_deadline:
                self._fail(stream, unavailable(f"no tokenizer was ready for {limits.recovery_deadline:g} s"))
        for tokenizer in self.tokenizers.values():
            if tokenizer.stalled_since is not None and now - tokenizer.stalled_since > limits.recovery_deadline:
                for stream in list(tokenizer.streams.values()):
                    self._send_abort(stream)
                    self._fail(stream, unavailable(f"no progress for {limits.recovery_deadline:g} s"))
        for stream in list(self._detached.values()):
            if stream.detached_at is not None and now - stream.detached_at > stream.detach_grace:
                self._drop(stream)
        self._retained.tick(now)
        self._searches.tick()

    # --- placing ---

    def _mint_attempt(self, previous: int) -> int:
        # The wall clock makes attempts rise across restarts of the gateway too.
        self._attempt = max(self._attempt + 1, previous + 1, int(self._wall_clock() * 1000))
        return self._attempt

    def _pick(self, stream: Stream) -> Tokenizer | None:
        usable = [tokenizer for tokenizer in self.tokenizers.values() if tokenizer.usable]
        # New streams go to one model only, even while another is moving in.
        wanted = stream.fingerprints or (usable[0].fingerprints if usable else None)
        return min(
            (t for t in usable if t.fingerprints == wanted and t not in stream.refused_by),
            key=lambda tokenizer: len(tokenizer.streams),
            default=None,
        )

    def _place(self, stream: Stream) -> None:
        """Submits the stream to a tokenizer, or lets it wait; its former tokenizer has no more to say."""
        if stream.tokenizer is not None and stream.tokenizer.peer.alive:
            # It is told to forget the stream when the next one has it, so that the scheduler goes on with it.
            stream.left[stream.tokenizer.peer] = Abort(stream.request_id, stream.attempt)
        self._leave(stream)
        while (tokenizer := self._pick(stream)) is not None:
            again = stream.num_submits > 0 or stream.adopted
            if tokenizer.peer.send(stream.submit(self._mint_attempt(stream.attempt))):
                self.metrics.resubmits += again
                stream.left.pop(tokenizer.peer, None)
                self._belongs(stream, tokenizer)
                return
            stream.refused_by.add(tokenizer)
        self._waiting[stream.request_id] = stream
        if stream.waiting_since is None:
            stream.waiting_since = self._clock()
            _log.info("stream waits for a tokenizer", request_id=stream.request_id)

    def _belongs(self, stream: Stream, tokenizer: Tokenizer) -> None:
        stream.tokenizer = tokenizer
        tokenizer.streams[stream.request_id] = stream
        stream.waiting_since = None
        self._waiting.pop(stream.request_id, None)

    def _leave(self, stream: Stream) -> None:
        if stream.tokenizer is not None:
            stream.tokenizer.streams.pop(stream.request_id, None)
            stream.tokenizer = None

    def _leave_stalled(self) -> None:
        """Moves streams from tokenizers that stand still to one that does not, where there is one."""
        for tokenizer in self.tokenizers.values():
            if not tokenizer.peer.stalled:
                continue
            for stream in list(tokenizer.streams.values()):
                if self._pick(stream) is None:
                    break
                # Should it wake up, the lower attempt tells everyone to the right to ignore this.
                self._send_abort(stream)
                self._leave(stream)
                self._place(stream)

    def _leave_draining(self) -> None:
        """Streams of a tokenizer that wants to leave go on at another one, where there is one."""
        for tokenizer in self.tokenizers.values():
            if tokenizer.peer.draining and not self.draining:
                for stream in list(tokenizer.streams.values()):
                    if self._pick(stream) is None:
                        break
                    self._place(stream)

    def _resubmit_after_gap(self, stream: Stream) -> None:
        stream.gaps += 1
        self.metrics.gaps += 1
        _log.warning("gap in a stream", request_id=stream.request_id, gaps=stream.gaps)
        if stream.gaps > MAX_GAPS:
            self._send_abort(stream)
            self._fail(stream, StreamError(ErrorCode.INTERNAL, "tokens were lost several times in a row"))
        else:
            self._place(stream)

    # --- messages ---

    def _current(self, tokenizer: Tokenizer, request_id: int, attempt: int) -> Stream | None:
        stream = self._open.get(request_id)
        if stream is not None and stream.tokenizer is tokenizer and stream.attempt == attempt:
            return stream
        return None

    def _on_delta(self, tokenizer: Tokenizer, delta: Delta) -> None:
        self.progress += 1
        stream = self._current(tokenizer, delta.request_id, delta.attempt)
        choice = stream.choices.get(delta.index) if stream is not None else None
        if stream is None or choice is None or choice.finished:
            return
        try:
            if not stream.accepted:
                raise Gap  # the Accepted goes before all deltas
            size = choice.add(delta)
        except Gap:
            self._resubmit_after_gap(stream)
            return
        if size < 0:
            return
        if self.latencies is not None and delta.token_ids:
            self.latencies.came(delta.request_id, delta.index, len(delta.token_ids))
        if stream.num_cached_tokens is None and delta.index == stream.first_index:
            # Its first delta tells of the prompt. Later ones may count outputs that were recomputed, and
            # other choices what the first one has just computed.
            stream.num_cached_tokens = delta.num_cached_tokens
            self.metrics.first_token(stream)
        if stream.gaps or stream.refused_by:
            stream.gaps = 0
            stream.refused_by.clear()
        if choice.finished:
            stream.unfinished -= 1
        subscription = stream.subscription
        if subscription is not None:
            subscription.unread += size
            if subscription.unread > self.limits.max_unread_bytes:
                self._send_abort(stream)
                limit = f"max_unread_bytes: the client has left more than {self.limits.max_unread_bytes} bytes unread"
                self._fail(stream, StreamError(ErrorCode.RESOURCE_EXHAUSTED, limit))
                return
            subscription.wake()
        if stream.unfinished == 0:
            tokenizer.peer.send(Release(stream.request_id, stream.attempt))
            self._finish(stream)

    def _on_accepted(self, tokenizer: Tokenizer, stream: Stream, message: Accepted) -> None:
        try:
            stream.accept(message.prompt_token_ids, tokenizer.known_fingerprints)
        except Gap:
            self._resubmit_after_gap(stream)
        else:
            self.metrics.accepted(stream)
            self._wake(stream)

    def _on_prompt_logprobs(self, tokenizer: Tokenizer, message: PromptLogprobs) -> None:
        stream = self._current(tokenizer, message.request_id, message.attempt)
        if stream is None:
            return
        try:
            stream.add_prompt_logprobs(message)
        except Gap:
            self._resubmit_after_gap(stream)
        else:
            self._wake(stream)

    def _on_failed(self, tokenizer: Tokenizer, message: Failed) -> None:
        if self._searches.said_no(tokenizer.peer, message.request_id, message.attempt):
            return
        stream = self._current(tokenizer, message.request_id, message.attempt)
        if stream is None:
            return
        if message.code == ErrorCode.UNAVAILABLE:
            stream.refused_by.add(tokenizer)
            if tokenizer.peer.draining or self._pick(stream) is not None:
                self._place(stream)
                return
        error = StreamError(message.code, message.message, field=message.field, retry_after_ms=message.retry_after_ms)
        self._fail(stream, error)

    def _adopt(self, tokenizer: Tokenizer, attempt: int, stream: Stream) -> None:
        """A request of an earlier gateway goes on here."""
        stream.attempt = attempt
        stream.fingerprints = tokenizer.known_fingerprints
        self._open[stream.request_id] = stream
        self.metrics.opened(stream, adopted=True)
        self._belongs(stream, tokenizer)
        if stream.unfinished == 0:
            tokenizer.peer.send(Release(stream.request_id, attempt))
            self._finish(stream)

    def _on_attached(self, tokenizer: Tokenizer, message: Attached) -> None:
        stream = self._searches.found(tokenizer.peer, message)
        if stream is not None:
            self._adopt(tokenizer, message.attempt, stream)
            return
        # Nobody waits for it (any more), or another tokenizer was quicker. The one that won submits
        # once more: its higher attempt outlives this abort.
        tokenizer.peer.send(Abort(message.request_id, message.attempt))
        stream = self._open.get(message.request_id)
        if stream is not None and stream.tokenizer is not tokenizer:
            self._place(stream)

    # --- ends ---

    def _close(self, subscription: Subscription) -> None:
        stream = subscription.stream
        if stream is None:
            self._searches.drop(subscription)
        elif stream.subscription is subscription:
            stream.subscription = None
            if stream.over:
                return
            if stream.detach_grace > 0:
                stream.detached_at = self._clock()
                self._detached[stream.request_id] = stream
            else:
                self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        self._send_abort(stream)
        self._fail(stream, StreamError(ErrorCode.CANCELLED, "the client has left"))

    def _send_abort(self, stream: Stream) -> None:
        if stream.tokenizer is not None:
            stream.tokenizer.peer.send(Abort(stream.request_id, stream.attempt))

    def _abort_left(self, stream: Stream) -> None:
        """Former tokenizers forget the stream; where a later attempt is known, this one is ignored."""
        for peer, abort in stream.left.items():
            peer.send(abort)
        stream.left.clear()

    def _finish(self, stream: Stream) -> None:
        self._forget(stream)
        stream.finished = True
        self.metrics.finished(stream)
        self._retained.add(stream, self._clock())
        _log.debug("request finished", request_id=stream.request_id, attempt=stream.attempt)
        self._wake(stream)

    def _fail(self, stream: Stream, error: StreamError) -> None:
        self._forget(stream)
        stream.error = error
        self.metrics.failed(stream, error)
        _log.info("request ended", request_id=stream.request_id, code=error.code.name, reason=error.message)
        self._wake(stream)

    def _forget(self, stream: Stream) -> None:
        self._abort_left(stream)
        self._leave(stream)
        if self.latencies is not None:
            self.latencies.ended(stream.request_id)
        for table in (self._open, self._waiting, self._detached):
            table.pop(stream.request_id, None)

    def _wake(self, stream: Stream) -> None:
        if stream.subscription is not None:
            stream.subscription.wake()

    def _call_peer(self, excluded: Iterable[Peer]) -> Peer | None:
        """Who may answer a call: encoding text needs no scheduler, so a tokenizer that is not ready may."""
        tokenizers = [t for t in self.tokenizers.values() if t.peer.alive and t.peer not in excluded]
        best = min(tokenizers, key=lambda t: (not t.usable, t.peer.stalled, len(t.streams)), default=None)
        return None if best is None else best.peer
