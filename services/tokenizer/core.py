"""The tokenizer's decisions, without I/O: events in, messages out.

It keeps the ledger of the link to the scheduler: every unfinished request in a form that can be
submitted again, so a scheduler that comes up is told all of them with what they have so far. Towards
the gateways it is a server: a request outlives its gateway by `attach_grace`, and a higher attempt
takes its stream over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.services.tokenizer.metrics import TokenizerMetrics
from quartet.services.tokenizer.prompt_encoder import check_request, prompt_field
from quartet.services.tokenizer.request import GatewayKey, Request, adopt, advance, cut_to, open_request
from quartet.services.tokenizer.tool_formats import ToolFormat
from quartet.services.tokenizer.vocabulary import vocabulary_parts
from quartet.services.tokenizer.watching import Watching
from quartet.shared.messages import (
    Abort,
    Accepted,
    Attach,
    Attached,
    CallFailed,
    Delta,
    Deltas,
    ErrorCode,
    Failed,
    Finish,
    GetLoads,
    Loads,
    Message,
    ModelInfo,
    Output,
    Outputs,
    PrefixCacheReset,
    PromptLogprobs,
    Release,
    ResetPrefixCache,
    Submit,
    TokenLogprobs,
    TokensPrompt,
    Watch,
    WatchEnded,
    WatchEvents,
)
from quartet.shared.sampling_params import InvalidField, StructuredOutput

CALL_TIMEOUT = 5.0
MAX_PROMPT_LOGPROBS = 4096


class Send(NamedTuple):
    """`to` is a gateway, or None for the scheduler."""

    to: GatewayKey | None
    message: Message


@dataclass(slots=True)
class _Pending:
    """A submit whose prompt is being encoded (token_ids None), or that waits to learn the model."""

    submit: Submit
    owner: GatewayKey
    token_ids: list[int] | None = None
    structured: StructuredOutput | None = None


class _Call(NamedTuple):
    owner: GatewayKey
    call_id: int
    deadline: float


class TokenizerCore:
    """`clock` gives seconds, monotonic. After each event, `take` gives the messages it led to."""

    def __init__(
        self,
        loaded: LoadedTokenizer,
        clock: Callable[[], float],
        attach_grace: float = 30.0,
        max_retained_bytes: int = 256 << 20,
        recovery_deadline: float = 60.0,
        tool_format: ToolFormat | None = None,
    ) -> None:
        self.model: ModelInfo | None = None
        self.draining = False
        self.metrics = TokenizerMetrics()
        self._loaded = loaded
        self._tool_format = tool_format
        self._clock = clock
        self._attach_grace = attach_grace
        self._max_retained_bytes = max_retained_bytes
        self._gateways: set[GatewayKey] = set()
        self._recovery_deadline = recovery_deadline
        self._scheduler_is_up = False
        self._no_scheduler_since = clock()
        self._told_vocabulary = False
        self._pending: dict[int, _Pending] = {}
        self._requests: dict[int, Request] = {}
        self._calls: dict[int, _Call] = {}
        self._next_call_id = 1
        self._watching = Watching()
        self._out: list[Send] = []
        self._open_deltas: dict[GatewayKey, Deltas] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._pending) + sum(1 for r in self._requests.values() if r.finished_at is None)

    @property
    def num_owed(self) -> int:
        """Unfinished requests that a gateway is there to wait for."""
        requests = self._requests.values()
        return len(self._pending) + sum(r.finished_at is None and r.owner is not None for r in requests)

    @property
    def requests(self) -> dict[int, Request]:
        """The ledger, by request id."""
        return self._requests

    @property
    def num_retained(self) -> int:
        """Requests in the ledger, finished ones that wait for Release included."""
        return len(self._requests)

    def take(self) -> list[Send]:
        """The messages to send, in order; deltas for one gateway travel together."""
        out, self._out = self._out, []
        self._open_deltas.clear()
        return out

    # --- gateways ---------------------------------------------------------------------------------

    def gateway_up(self, gateway: GatewayKey) -> None:
        self._gateways.add(gateway)

    def gateway_down(self, gateway: GatewayKey) -> None:
        """Its requests run on for the grace; what was not yet accepted is for it to submit again."""
        self._gateways.discard(gateway)
        self._tell_watch(self._watching.leave(gateway))
        self._pending = {i: p for i, p in self._pending.items() if p.owner != gateway}
        self._calls = {i: c for i, c in self._calls.items() if c.owner != gateway}
        for request in self._requests.values():
            if request.owner == gateway:
                request.owner, request.orphaned_at = None, self._clock()

    def submit(self, gateway: GatewayKey, submit: Submit) -> bool:
        """True when the prompt is now to be encoded and `encoded` or `refused` to be called."""
        if submit.attempt <= self._highest_attempt(submit.request_id):
            return False
        self.metrics.submits += 1
        if self.draining and submit.request_id not in self._requests:
            self._fail(gateway, submit, ErrorCode.UNAVAILABLE, "this tokenizer is being shut down")
            return False
        self._pending[submit.request_id] = _Pending(submit, gateway)
        return True

    def wants(self, request_id: int, attempt: int) -> bool:
        """Whether the prompt still need be encoded. May be asked from another thread."""
        pending = self._pending.get(request_id)
        return pending is not None and pending.submit.attempt == attempt

    def encoded(
        self,
        request_id: int,
        attempt: int,
        prompt_token_ids: list[int],
        structured: StructuredOutput | None = None,
    ) -> None:
        """`structured`: what the executor is to keep the output to."""
        pending = self._pending.get(request_id)
        if pending is None or pending.submit.attempt != attempt:
            return  # aborted or superseded meanwhile
        pending.token_ids, pending.structured = prompt_token_ids, structured
        if self.model is not None:
            del self._pending[request_id]
            self._start(pending, self.model)

    def refused(self, request_id: int, attempt: int, code: ErrorCode, message: str, field: str = "") -> None:
        pending = self._pending.get(request_id)
        if pending is not None and pending.submit.attempt == attempt:
            del self._pending[request_id]
            self._fail(pending.owner, pending.submit, code, message, field)

    def attach(self, gateway: GatewayKey, attach: Attach) -> None:
        known = self._requests.get(attach.request_id)
        if known is None:
            self._fail(gateway, attach, ErrorCode.NOT_FOUND, "no such request is known here")
            return
        if attach.attempt <= known.attempt:
            self._fail(gateway, attach, ErrorCode.ABORTED, "the stream belongs to a later attempt")
            return
        if any(count > len(known.choices[i].token_ids) for i, count in attach.next_index.items() if i in known.choices):
            self._fail(gateway, attach, ErrorCode.NOT_FOUND, "the client has tokens that are not known here")
            return
        self.metrics.attaches += 1
        self._tell_owner(known, gateway)
        submit = cut_to(known, attach.attempt, attach.next_index)
        request = open_request(submit, gateway, self._loaded, self._tool_format, known.structured)
        for past in request.submit.choices:
            stream = request.choices[past.index].stream
            past.sent_bytes, past.sent_call_bytes = stream.num_text_bytes, stream.num_call_bytes
        self._to_gateway(gateway, Attached(attach.request_id, attach.attempt, request.submit))
        self._take_over(request, known)

    def abort(self, abort: Abort) -> None:
        pending = self._pending.get(abort.request_id)
        if pending is not None and abort.attempt >= pending.submit.attempt:
            del self._pending[abort.request_id]
        request = self._requests.get(abort.request_id)
        if request is not None and abort.attempt >= request.attempt:
            self._forget(request)

    def release(self, release: Release) -> None:
        request = self._requests.get(release.request_id)
        if request is not None and release.attempt >= request.attempt:
            self._forget(request)

    def call_scheduler(self, gateway: GatewayKey, call: GetLoads | ResetPrefixCache) -> None:
        if not self._scheduler_is_up:
            self._to_gateway(gateway, CallFailed(call.call_id, ErrorCode.UNAVAILABLE, "there is no scheduler"))
            return
        call_id, self._next_call_id = self._next_call_id, self._next_call_id + 1
        self._calls[call_id] = _Call(gateway, call.call_id, self._clock() + CALL_TIMEOUT)
        self._to_scheduler(type(call)(call_id))

    def watch(self, gateway: GatewayKey, watch: Watch) -> None:
        """The gateway wants to be told what happens, or no more."""
        self._tell_watch(self._watching.set(gateway, watch))
        if watch.interval_ms > 0 and not self._scheduler_is_up:
            self._to_gateway(gateway, WatchEnded())

    # --- scheduler --------------------------------------------------------------------------------

    def scheduler_up(self) -> None:
        """Tells it every unfinished request, oldest first."""
        self._scheduler_is_up = True
        self._told_vocabulary = False
        for request in self._requests.values():
            self._add(request)
        self._tell_watch(self._watching.wanted)

    def scheduler_down(self) -> None:
        """Requests are held until it, or another, comes."""
        self._scheduler_is_up = False
        self._no_scheduler_since = self._clock()
        for gateway in self._watching.gateways:
            self._to_gateway(gateway, WatchEnded())
        for call in self._calls.values():
            self._to_gateway(call.owner, CallFailed(call.call_id, ErrorCode.UNAVAILABLE, "the scheduler went away"))
        self._calls.clear()

    def model_changed(self, model: ModelInfo | None) -> None:
        """The last known model stands while there is none: requests go on to the scheduler, which waits."""
        if model is None:
            return
        self.model = model
        if model.structured_output:
            # Before it is needed: an executor takes most of a second over it.
            self._tell_vocabulary()
        waiting = [p for p in self._pending.values() if p.token_ids is not None]
        for pending in waiting:
            del self._pending[pending.submit.request_id]
            self._start(pending, model)

    def outputs(self, outputs: Outputs) -> None:
        for output in outputs.items:
            request = self._requests.get(output.request_id)
            if request is not None and output.attempt == request.attempt:
                self._output(request, output)

    def prompt_logprobs(self, message: PromptLogprobs) -> None:
        request = self._requests.get(message.request_id)
        if request is None or message.attempt != request.attempt:
            return
        known = request.next_prompt_logprob
        if message.start > known:
            self._add_again(request)
            return
        entries = message.entries[known - message.start :]
        if entries:
            self._fill([entry for entry in entries if entry is not None])
            request.prompt_logprobs.extend(entries)
            self._to_gateway(request.owner, PromptLogprobs(request.request_id, request.attempt, known, entries))

    def failed(self, failed: Failed) -> None:
        request = self._requests.get(failed.request_id)
        if request is None or failed.attempt < request.attempt:
            return
        failed.attempt = request.attempt
        if request.owner is not None:
            self._to_gateway(request.owner, failed)
            del self._requests[request.request_id]
        else:  # kept for whoever attaches
            request.failure, request.finished_at = failed, self._clock()

    def call_answered(self, answer: Loads | PrefixCacheReset | CallFailed) -> None:
        call = self._calls.pop(answer.call_id, None)
        if call is not None:
            answer.call_id = call.call_id
            self._to_gateway(call.owner, answer)

    def watch_events(self, events: WatchEvents) -> None:
        for gateway in self._watching.gateways:
            self._to_gateway(gateway, events)

    def tick(self) -> None:
        """To be called about every second."""
        now = self._clock()
        for call_id, call in list(self._calls.items()):
            if now >= call.deadline:
                del self._calls[call_id]
                self._to_gateway(
                    call.owner, CallFailed(call.call_id, ErrorCode.UNAVAILABLE, "the scheduler did not answer")
                )
        deadline = self._recovery_deadline
        if not self._scheduler_is_up and now - self._no_scheduler_since >= deadline:
            for request in [r for r in self._requests.values() if r.unfinished]:
                reason = f"no scheduler was there for {deadline:g} s"
                self.failed(Failed(request.request_id, request.attempt, ErrorCode.UNAVAILABLE, reason))
        idle: list[tuple[float, Request]] = []
        for request in list(self._requests.values()):
            since = request.finished_at if request.finished_at is not None else request.orphaned_at
            if since is None:
                continue
            if now - since >= self._attach_grace:
                self._forget(request)
            else:
                idle.append((since, request))
        self._bound_retained(idle)

    # --- within -----------------------------------------------------------------------------------

    def _tell_watch(self, watch: Watch | None) -> None:
        if watch is not None:
            self._to_scheduler(watch)

    def _start(self, pending: _Pending, model: ModelInfo) -> None:
        submit, ids = pending.submit, pending.token_ids
        assert ids is not None
        known = self._requests.get(submit.request_id)
        try:
            if not submit.choices:
                raise InvalidField("n", "there is no choice to generate")
            if pending.structured is not None and not model.structured_output:
                field = "structured" if submit.sampling.structured is not None else "tool_choice"
                raise InvalidField(field, "the executor cannot keep an output to a grammar")
            pasts = [past.output_token_ids for past in submit.choices]
            field = prompt_field(submit.prompt)
            max_tokens = check_request(field, ids, submit.sampling, pasts, self._loaded, model)
        except InvalidField as error:
            if known is not None:
                self._forget(known)
            self._fail(pending.owner, submit, ErrorCode.INVALID_ARGUMENT, str(error), error.field)
            return
        sampling = msgspec.structs.replace(submit.sampling, max_tokens=max_tokens)
        submit = msgspec.structs.replace(submit, prompt=TokensPrompt(ids), sampling=sampling)
        if known is not None:
            self._tell_owner(known, pending.owner)
        request = open_request(submit, pending.owner, self._loaded, self._tool_format, pending.structured)
        self.metrics.accepted += 1
        self._to_gateway(pending.owner, Accepted(submit.request_id, submit.attempt, ids))
        self._take_over(request, known)

    def _take_over(self, request: Request, known: Request | None) -> None:
        """`request` enters the ledger, in the place of the same request of a lower attempt where it is known."""
        self._requests[request.request_id] = request
        if known is not None:
            self.metrics.takeovers += 1
            request.was_added = known.was_added
        same = known is not None and known.prompt_token_ids == request.prompt_token_ids
        if known is not None and same and known.failure is not None:
            known.failure.attempt = request.attempt
            self._to_gateway(request.owner, known.failure)
            del self._requests[request.request_id]
            return
        if known is not None and same:
            self._adopt_prompt_logprobs(request, known)
        for choice in request.choices.values():
            there = known.choices.get(choice.index) if known is not None and same else None
            past = choice.token_ids
            if there is not None and there.token_ids[: len(past)] == past:
                for delta in adopt(request, choice, there):
                    self._delta(request, delta)
            elif choice.stream.stop is not None:  # the past holds a stop string
                self._delta(request, advance(request, choice, []))
        self._note_finished(request)
        self._add(request)

    def _adopt_prompt_logprobs(self, request: Request, known: Request) -> None:
        first = request.submit.prompt_logprobs_start
        skip = first - known.submit.prompt_logprobs_start
        if 0 <= skip < len(known.prompt_logprobs):
            request.prompt_logprobs = known.prompt_logprobs[skip:]
            # In parts: all of a long prompt's might be more than a frame holds.
            for i in range(0, len(request.prompt_logprobs), MAX_PROMPT_LOGPROBS):
                part = request.prompt_logprobs[i : i + MAX_PROMPT_LOGPROBS]
                entries = PromptLogprobs(request.request_id, request.attempt, first + i, part)
                self._to_gateway(request.owner, entries)

    def _output(self, request: Request, output: Output) -> None:
        choice = request.choices.get(output.index)
        if choice is None or choice.finish_reason is not None:
            return
        known, end = len(choice.token_ids), output.start + len(output.token_ids)
        if output.start > known:
            self._add_again(request)
            return
        if end < known or (end == known and output.finish_reason is None):
            return
        request.adding_again = False
        skip = known - output.start
        logprobs = output.logprobs[skip:] if output.logprobs is not None else None
        if logprobs:
            self._fill(logprobs)
        choice.num_cached_tokens = output.num_cached_tokens
        delta = advance(request, choice, output.token_ids[skip:], logprobs, output.finish_reason, output.stop_reason)
        self._delta(request, delta)
        if choice.stream.stop is not None and (output.finish_reason is None or len(choice.token_ids) < end):
            self._to_scheduler(Finish(request.request_id, request.attempt, choice.index, len(choice.token_ids)))
        self._note_finished(request)

    def _note_finished(self, request: Request) -> None:
        if not request.unfinished and request.finished_at is None:
            request.finished_at = self._clock()

    def _add(self, request: Request) -> None:
        request.adding_again = False
        if self._scheduler_is_up and request.unfinished:
            if request.structured is not None:
                self._tell_vocabulary()
            self.metrics.added_to_scheduler += 1
            self.metrics.added_again += request.was_added
            request.was_added = True
            self._to_scheduler(request.new_request(self._loaded.eos_token_ids, self._loaded.fingerprint))

    def _tell_vocabulary(self) -> None:
        """Once in each of the scheduler's sessions."""
        if self._scheduler_is_up and not self._told_vocabulary:
            self._told_vocabulary = True
            for part in vocabulary_parts(self._loaded):
                self._to_scheduler(part)

    def _add_again(self, request: Request) -> None:
        """Something on the way here was lost. Once: what follows the loss is still on its way."""
        if not request.adding_again:
            self._add(request)
            request.adding_again = True

    def _forget(self, request: Request) -> None:
        gone = Abort if request.unfinished else Release
        self._to_scheduler(gone(request.request_id, request.attempt))
        del self._requests[request.request_id]

    def _bound_retained(self, idle: list[tuple[float, Request]]) -> None:
        """Drops the longest idle requests when all of them together take too much memory."""
        idle.sort(key=lambda entry: entry[0])
        sizes = [request.retained_bytes() for _, request in idle]
        excess = sum(sizes) - self._max_retained_bytes
        for size, (_, request) in zip(sizes, idle, strict=True):
            if excess <= 0:
                break
            excess -= size
            self._forget(request)

    def _highest_attempt(self, request_id: int) -> int:
        pending, request = self._pending.get(request_id), self._requests.get(request_id)
        return max(pending.submit.attempt if pending else -1, request.attempt if request else -1)

    def _tell_owner(self, known: Request, successor: GatewayKey) -> None:
        if known.owner is not None and known.owner != successor:
            self._fail(known.owner, known, ErrorCode.ABORTED, "the stream was taken over by a later attempt")

    def _fill(self, entries: list[TokenLogprobs]) -> None:
        bytes_of = self._loaded.bytes_of
        for entry in entries:
            entry.text = [bytes_of(entry.token_id), *(bytes_of(token_id) for token_id, _ in entry.top)]

    def _fail(
        self, to: GatewayKey, about: Submit | Attach | Request, code: ErrorCode, message: str, field: str = ""
    ) -> None:
        self.metrics.refused += isinstance(about, Submit)
        self._to_gateway(to, Failed(about.request_id, about.attempt, code, message, field))

    def _delta(self, request: Request, delta: Delta) -> None:
        owner = request.owner
        if owner is None or owner not in self._gateways:
            return
        deltas = self._open_deltas.get(owner)
        if deltas is None:
            deltas = self._open_deltas[owner] = Deltas([])
            self._out.append(Send(owner, deltas))
        deltas.items.append(delta)

    def _to_gateway(self, gateway: GatewayKey | None, message: Message) -> None:
        if gateway is not None and gateway in self._gateways:
            self._open_deltas.pop(gateway, None)
            self._out.append(Send(gateway, message))

    def _to_scheduler(self, message: Message) -> None:
        # While there is none nothing need be kept: scheduler_up tells all that counts.
        if self._scheduler_is_up:
            self._out.append(Send(None, message))
