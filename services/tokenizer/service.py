"""The tokenizer's process: links, threads and signals around TokenizerCore."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quartet.services.tokenizer.chat_template import ChatTemplate
from quartet.services.tokenizer.core import TokenizerCore
from quartet.services.tokenizer.detokenizer import decode
from quartet.services.tokenizer.grammar_check import GrammarChecker
from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.services.tokenizer.metrics import tell
from quartet.services.tokenizer.prompt_encoder import PromptEncoder, Refusal
from quartet.services.tokenizer.settings import TokenizerSettings
from quartet.services.tokenizer.span_log import SpanLog
from quartet.services.tokenizer.tool_formats import ToolFormat
from quartet.shared.config import default_name, version
from quartet.shared.link import Identity, Link, Peer, Status
from quartet.shared.liveness import StatusFile, status_path
from quartet.shared.log import get_logger
from quartet.shared.messages import (
    Abort,
    AnyMessage,
    Attach,
    CallFailed,
    Decode,
    Decoded,
    Encode,
    Encoded,
    ErrorCode,
    Failed,
    GetLoads,
    Loads,
    Outputs,
    PrefixCacheReset,
    PromptLogprobs,
    Release,
    ResetPrefixCache,
    Role,
    Submit,
    TokensPrompt,
    Watch,
    WatchedSpans,
    WatchEvents,
    WatchSpans,
)
from quartet.shared.metrics import Collector, Families, MetricsServer, service_source
from quartet.shared.sampling_params import InvalidField, StructuredOutput, validate_token_ids
from quartet.shared.trace_context import checked
from quartet.shared.tracing import REQUEST_ID, USAGE_PROMPT_TOKENS, Attributes, Tracer
from quartet.shared.transport import Dialer, until_beat

# Longer texts have a thread of their own, so that short ones never wait for them.
LARGE_PROMPT_BYTES = 64 << 10

_log = get_logger()
T = TypeVar("T")


class TokenizerService:
    """Lives in one event loop. `model_fingerprint`: of the files that the tokenizer was read from; "": unknown.
    Without a `tool_format` requests with tools are refused."""

    def __init__(
        self,
        settings: TokenizerSettings,
        loaded: LoadedTokenizer,
        template: ChatTemplate,
        model_fingerprint: str = "",
        tool_format: ToolFormat | None = None,
    ) -> None:
        self.core = TokenizerCore(
            loaded,
            time.monotonic,
            settings.attach_grace,
            recovery_deadline=settings.recovery_deadline,
            tool_format=tool_format,
        )
        name = settings.name or default_name("tokenizer")
        self.identity = Identity(Role.TOKENIZER, name, tokenizer_fingerprint=loaded.fingerprint, version=version())
        self._loaded = loaded
        self._model_fingerprint = model_fingerprint
        self._drain_timeout = settings.drain_timeout
        self._encoder = PromptEncoder(loaded, template, settings.max_prompt_bytes)
        self._threads = ThreadPoolExecutor(settings.encode_threads, "encode")
        self._large_thread = ThreadPoolExecutor(1, "encode-large")
        self._grammars = GrammarChecker(loaded, tool_format)
        self._grammar_timeout = settings.grammar_timeout
        self._grammar_threads = ThreadPoolExecutor(2, "grammar")
        self._encoding = 0
        self._progress = 0
        self._status_file = StatusFile(status_path(settings.run_dir, "tokenizer"))
        self._scheduler = Dialer(
            settings.scheduler_address,
            self.identity,
            _SchedulerSide(self),
            self.status,
            expect=Role.SCHEDULER,
            status_file=self._status_file,
            curve_keys=settings.curve_keys,
        )
        gateway_side = _GatewaySide(self)
        self._gateways = [
            Dialer(
                address,
                self.identity,
                gateway_side,
                self.status,
                expect=Role.GATEWAY,
                curve_keys=settings.curve_keys,
            )
            for address in settings.gateway_addresses
        ]
        self._was_ready = False
        self.tracer: Tracer | None = None
        # There while a gateway traces.
        self.spans: SpanLog | None = None
        self._tracing: set[Peer] = set()

    def status(self) -> Status:
        # What can stand still here is encoding; the loop itself is alive when it says this.
        return Status(self._progress, self._encoding, self._ready(), self.core.draining)

    def start(self) -> None:
        for link in (self._scheduler, *self._gateways):
            link.start()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(until_beat(time.monotonic()), self._tick)

    async def drain(self) -> None:
        """No new requests; returns when the running ones have ended or moved, or after drain_timeout. A gateway
        that has gone is not waited for."""
        self.core.draining = True
        for link in (self._scheduler, *self._gateways):
            link.announce()
        deadline = time.monotonic() + self._drain_timeout
        while (left := self.core.num_owed) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if left:
            _log.warning("drain timeout: streams are left to other tokenizers", num_unfinished=left)

    def close(self) -> None:
        self._timer.cancel()
        for link in (self._scheduler, *self._gateways):
            link.close()
        self._status_file.remove()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._large_thread.shutdown(wait=False, cancel_futures=True)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)

    # --- within -----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Sends what the core has to say; a send that fails is followed by that peer's on_down."""
        for to, message in self.core.take():
            peer = self._scheduler.peer if to is None else to
            if isinstance(peer, Peer):
                peer.send(message)

    def scheduler_changed(self) -> None:
        """The scheduler came, went, or says something new of itself."""
        peer = self._scheduler.peer
        model = peer.model if peer is not None else None
        if model is not None and model != self.identity.model:
            if self._model_fingerprint not in ("", model.model_fingerprint):
                _log.warning("the executor's model has other files than this tokenizer's", model=model.name)
            if model.vocab_size < self._loaded.vocab_size:
                _log.warning(
                    "the tokenizer has more tokens than the model",
                    tokenizer=self._loaded.vocab_size,
                    model=model.vocab_size,
                )
            self.identity.model = model
            if model.structured_output:
                self._grammar_threads.submit(self._grammars.warm_up)
            for link in self._gateways:
                link.announce_model()
        self.core.model_changed(model)
        self.flush()
        if self._ready() != self._was_ready:
            self._was_ready = self._ready()
            for link in self._gateways:
                link.announce()

    def watch_spans(self, gateway: Peer, enabled: bool) -> None:
        """The gateway wants to be told what takes its time here, or no more."""
        if enabled:
            self._tracing.add(gateway)
        else:
            self._tracing.discard(gateway)
        if not self._tracing:
            self.spans = None
        elif self.spans is None:
            wall = time.time() - time.monotonic()
            self.spans = SpanLog(time.monotonic, wall, self._tell_spans, self._loop.call_later)

    def _tell_spans(self, spans: WatchedSpans) -> None:
        for gateway in list(self._tracing):
            gateway.send(spans)

    def submit(self, gateway: Peer, submit: Submit) -> None:
        if not self.core.submit(gateway, submit):
            return
        arrived_at = time.monotonic()
        request_id, attempt, prompt = submit.request_id, submit.attempt, submit.prompt
        structured = self._grammars.is_needed(submit)
        if isinstance(prompt, TokensPrompt) and not structured:
            self._trace_encoding(submit, arrived_at, len(prompt.token_ids))
            self.core.encoded(request_id, attempt, prompt.token_ids)
            return
        max_model_len = self.core.model.max_model_len if self.core.model is not None else None

        def encode() -> tuple[list[int], StructuredOutput | None]:
            if not self.core.wants(request_id, attempt):
                return [], None
            token_ids = self._encoder.encode(prompt, max_model_len, submit.tools)
            return token_ids, self._grammars.check(submit)

        def done(result: tuple[list[int], StructuredOutput | None] | None, refusal: Refusal | None) -> None:
            if late is not None:
                late.cancel()
            if result is not None:
                self._note_encoding(submit, arrived_at, len(result[0]))
                self.core.encoded(request_id, attempt, *result)
            elif refusal is not None:
                self.core.refused(request_id, attempt, refusal.code, str(refusal), refusal.field)

        def refuse_late() -> None:
            field = "structured" if submit.sampling.structured is not None else "tools"
            text = f"{field}: takes longer than {self._grammar_timeout:g} s to compile"
            self.core.refused(request_id, attempt, ErrorCode.INVALID_ARGUMENT, text, field)
            self.flush()

        late = self._loop.call_later(self._grammar_timeout, refuse_late) if structured else None
        self._in_thread(self._encoder.size(prompt), encode, done, self._grammar_threads if structured else None)

    def _note_encoding(self, submit: Submit, since: float, num_tokens: int) -> None:
        self.core.metrics.encode_time.observe(time.monotonic() - since)
        self.core.metrics.encoded_tokens += num_tokens
        self._trace_encoding(submit, since, num_tokens)

    def _trace_encoding(self, submit: Submit, since: float, num_tokens: int) -> None:
        if self.spans is not None:
            self.spans.add("tokenize", since, num_tokens, submit.request_id)
        if self.tracer is not None and submit.trace_context:
            attributes: Attributes = {
                REQUEST_ID: f"{submit.request_id:016x}",
                USAGE_PROMPT_TOKENS: num_tokens,
                "quartet.attempt": submit.attempt,
            }
            self.tracer.record("tokenize", checked(submit.trace_context), since, time.monotonic(), attributes)

    def metrics_server(self, settings: TokenizerSettings) -> MetricsServer:
        def links() -> list[tuple[str, Link]]:
            gateways = [(f"gateway-{i}" if i else "gateway", link.link) for i, link in enumerate(self._gateways)]
            return [("scheduler", self._scheduler.link), *gateways]

        def model_name() -> str:
            return self.core.model.name if self.core.model is not None else settings.model

        def source(families: Families) -> None:
            tell(self.core, self._encoding, families)

        collector = Collector((service_source(self.identity, links), source), model_name)
        return MetricsServer(settings.metrics_address, collector)

    def encode(self, gateway: Peer, call: Encode) -> None:
        def work() -> Encoded:
            ids = self._encoder.encode_to_tell(call.prompt, call.tools)
            return Encoded(call.call_id, ids, [self._loaded.bytes_of(i) for i in ids])

        self._answer(gateway, call.call_id, self._encoder.size(call.prompt), work)

    def decode(self, gateway: Peer, call: Decode) -> None:
        def work() -> Decoded:
            try:
                validate_token_ids("token_ids", call.token_ids, self._loaded.vocab_size)
            except InvalidField as error:
                raise Refusal(ErrorCode.INVALID_ARGUMENT, str(error), error.field) from error
            return Decoded(call.call_id, decode(self._loaded, call.token_ids, call.skip_special_tokens))

        self._answer(gateway, call.call_id, 4 * len(call.token_ids), work)

    def _answer(self, gateway: Peer, call_id: int, size: int, work: Callable[[], Encoded | Decoded]) -> None:
        def done(answer: Encoded | Decoded | None, refusal: Refusal | None) -> None:
            if answer is not None:
                gateway.send(answer)
            elif refusal is not None:
                gateway.send(CallFailed(call_id, refusal.code, str(refusal), refusal.field))

        self._in_thread(size, work, done)

    def _in_thread(
        self,
        size: int,
        work: Callable[[], T],
        done: Callable[[T | None, Refusal | None], None],
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        def finished(future: asyncio.Future[T]) -> None:
            self._encoding -= 1
            self._progress += 1
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                done(future.result(), None)
            elif isinstance(error, Refusal):
                done(None, error)
            else:
                _log.error("encoding failed", exc_info=error)
                done(None, Refusal(ErrorCode.INTERNAL, f"the tokenizer failed: {error}"))
            self.flush()

        self._encoding += 1
        if pool is None:
            pool = self._large_thread if size > LARGE_PROMPT_BYTES else self._threads
        self._loop.run_in_executor(pool, work).add_done_callback(finished)

    def _ready(self) -> bool:
        return self._scheduler.peer is not None and self._scheduler.peer.ready

    def _tick(self) -> None:
        self._progress += 1
        self.core.tick()
        self.flush()
        self._timer = self._loop.call_later(until_beat(time.monotonic()), self._tick)


class _GatewaySide:
    def __init__(self, service: TokenizerService) -> None:
        self._service = service
        self._core = service.core

    def on_up(self, peer: Peer) -> None:
        self._core.gateway_up(peer)

    def on_down(self, peer: Peer, reason: str) -> None:
        self._service.watch_spans(peer, enabled=False)
        self._core.gateway_down(peer)

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case Submit():
                self._service.submit(peer, message)
            case Attach():
                self._core.attach(peer, message)
            case Abort():
                self._core.abort(message)
            case Release():
                self._core.release(message)
            case GetLoads() | ResetPrefixCache():
                self._core.call_scheduler(peer, message)
            case Watch():
                self._core.watch(peer, message)
            case WatchSpans():
                self._service.watch_spans(peer, message.enabled)
            case Encode():
                self._service.encode(peer, message)
            case Decode():
                self._service.decode(peer, message)
            case _:
                _log.warning("unexpected message from a gateway", message=type(message).__name__)
        self._service.flush()

    def on_status(self, peer: Peer) -> None:
        """A gateway's status changes nothing here."""


class _SchedulerSide:
    def __init__(self, service: TokenizerService) -> None:
        self._service = service
        self._core = service.core

    def on_up(self, peer: Peer) -> None:
        self._core.scheduler_up()
        self._service.scheduler_changed()

    def on_down(self, peer: Peer, reason: str) -> None:
        self._core.scheduler_down()
        self._service.scheduler_changed()

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        spans = self._service.spans
        began = 0.0 if spans is None else time.monotonic()
        match message:
            case Outputs():
                self._core.outputs(message)
            case PromptLogprobs():
                self._core.prompt_logprobs(message)
            case Failed():
                self._core.failed(message)
            case Loads() | PrefixCacheReset() | CallFailed():
                self._core.call_answered(message)
            case WatchEvents():
                self._core.watch_events(message)
            case _:
                _log.warning("unexpected message from the scheduler", message=type(message).__name__)
        self._service.flush()
        if spans is not None and isinstance(message, Outputs):
            spans.add("detokenize", began, sum(len(output.token_ids) for output in message.items))

    def on_status(self, peer: Peer) -> None:
        self._service.scheduler_changed()
