"""A client that reads to the end, whatever happens, and knows what it ought to read.

It keeps and resumes its stream with the client library's own State.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from simulation.processes import GatewayNode, ServerCall
from simulation.vocabulary import EOS, POISON, encode, text_of
from support.fake_executor import continuation

from quartet.services.gateway.convert import stream_from
from quartet.shared.client.request import build_request
from quartet.shared.client.state import Chunk, InferenceError, State
from quartet.shared.messages import FinishReason, NewRequest, TokensPrompt
from quartet.shared.pb import inference_pb2 as pb
from quartet.shared.sampling_params import RequestLimits

if TYPE_CHECKING:
    from simulation.world import World

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass
class Expected:
    """What a choice is when nothing disturbs it."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None


@dataclass
class Received:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_logprobs: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Client:
    """`pace`: seconds that it takes to read a response. `leaves_at`, `aborts_at`: after so many chunks."""

    def __init__(
        self,
        world: World,
        name: str,
        prompt: str | list[int],
        options: dict[str, Any],
        *,
        pace: float = 0.0,
        leaves_at: int | None = None,
        aborts_at: int | None = None,
    ) -> None:
        self.world = world
        self.name = name
        self.options = options
        self.pace = pace
        self.leaves_at = leaves_at
        self.aborts_at = aborts_at
        self.aborted = False
        self.done = False
        self.error: InferenceError | None = None
        self.num_chunks = 0
        self.received: dict[int, Received] = {}
        self.prompt_token_ids = encode(prompt) if isinstance(prompt, str) else prompt
        source = {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
        self._request = build_request(**source, **options)  # type: ignore[arg-type]
        self.state = State(self._request, 1e9, None)
        self.is_poisoned = POISON in self.prompt_token_ids
        self._call: ServerCall | None = None
        self._inbox: list[tuple[ServerCall, Any]] = []
        self._reading = False
        self.expected: dict[int, Expected] = {}
        if not self.is_poisoned:
            self._expect()

    def start(self) -> None:
        if not self.done:
            self.state.call(self)  # type: ignore[arg-type]

    # --- what State calls of a gRPC stub ----------------------------------------------------------

    def Generate(self, request: Any, timeout: float | None = None) -> None:
        self._begin(GatewayNode.generate, request)

    def Attach(self, request: Any, timeout: float | None = None) -> None:
        self._begin(GatewayNode.attach, request)

    def _begin(self, method: Any, request: Any) -> None:
        world = self.world
        process = world.slots["gateway"].process
        self._inbox.clear()
        if process is None:
            self._call = None
            world.at(0.01, None, self._failed, InferenceError(grpc.StatusCode.UNAVAILABLE, "no gateway"))
            return
        world.trace("call", self.name, method.__name__, self.state.request_id)
        call = self._call = ServerCall(process.node, self)
        world.at(world.latency(), process, method, process.node, call, request)

    # --- what comes back --------------------------------------------------------------------------

    def on_response(self, call: ServerCall, response: Any) -> None:
        self._take(call, response)

    def on_status(self, call: ServerCall, error: InferenceError | None) -> None:
        self._take(call, error)

    def _take(self, call: ServerCall, item: Any) -> None:
        if call is self._call and not self.done:
            self._inbox.append((call, item))
            self._read()

    def _read(self) -> None:
        if self._inbox and not self._reading and not self.done:
            self._reading = True
            self.world.at(self.pace, None, self._consume)

    def _consume(self) -> None:
        self._reading = False
        if self._inbox and not self.done:
            call, item = self._inbox.pop(0)
            if isinstance(item, pb.GenerateResponse):
                self.world.post(call.node.process, call.read)
                self._respond(item)
            elif item is None and self.state.usage is not None:
                self._check_end()
                self.done = True
            else:
                self._failed(item or InferenceError(grpc.StatusCode.UNAVAILABLE, "no completion"))
            self._read()

    def _failed(self, error: InferenceError) -> None:
        if self.done:
            return
        self._call = None
        self._inbox.clear()
        self.world.trace("status", self.name, error)
        try:
            delay = self.state.after(error, True)
        except InferenceError as final:
            self.done = True
            self.error = final
            self.world.check_error(self, final)
            return
        self.world.at(delay, None, self.start)

    def break_off(self) -> None:
        """The connection to the gateway breaks; the gateway may notice later."""
        call = self._call
        if call is not None and not self.done:
            world = self.world
            call.break_off(keep=world.random.random() < 0.3)
            world.at(world.random.choice((0.0, 0.001, 0.1, 2.0)), call.node.process, call.cancel)

    def leave(self) -> None:
        """For good."""
        self.done = True
        if self._call is not None:
            self.world.at(self.world.latency(), self._call.node.process, self._call.cancel)

    def abort(self) -> None:
        self.aborted = True
        process = self.world.slots["gateway"].process
        if process is not None and self.state.request_id:
            self.world.at(self.world.latency(), process, GatewayNode.abort, process.node, self.state.request_id)

    # --- what is right ----------------------------------------------------------------------------

    def _expect(self) -> None:
        stream = stream_from(self.state.request, 0, RequestLimits(), 1e9)
        sampling, text = stream.sampling, stream.text
        message = NewRequest(0, 0, self.prompt_token_ids, sampling, [EOS], [], cache_salt=stream.cache_salt)
        assert stream.prompt is not None and isinstance(sampling.seed, int)
        assert isinstance(stream.prompt, TokensPrompt) or self.state.request.text
        silent = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset([EOS]))
        for index in stream.choices:
            token_ids, reason = continuation(message, index, [], self.world.profile.model)
            whole, count, stop = text_of(token_ids, silent, list(text.stop), sampling.min_tokens)
            stop_reason: int | str | None = None
            if stop:
                token_ids, reason, stop_reason = token_ids[:count], FinishReason.STOP, stop
            elif reason is FinishReason.STOP and (token_ids[-1] != EOS or sampling.ignore_eos):
                stop_reason = token_ids[-1]
            self.expected[index] = Expected(token_ids, whole, REASONS[reason], stop_reason)

    def _respond(self, response: Any) -> None:
        world = self.world
        try:
            chunk = self.state.receive(response)
        except InferenceError as error:
            world.violation(f"{self.name}: {error}")
            return
        if chunk is None:
            if response.WhichOneof("event") == "started" and self.state.prompt_token_ids != self.prompt_token_ids:
                world.violation(f"{self.name}: the prompt became {self.state.prompt_token_ids}")
            return
        world.trace(
            "chunk", self.name, chunk.index, chunk.start, chunk.token_ids, repr(chunk.text), chunk.finish_reason
        )
        self.num_chunks += 1
        self._check_chunk(chunk)
        if self.leaves_at is not None and self.num_chunks >= self.leaves_at:
            self.leave()
        elif self.aborts_at is not None and self.num_chunks >= self.aborts_at and not self.aborted:
            self.abort()

    def _check_chunk(self, chunk: Chunk) -> None:
        received = self.received.setdefault(chunk.index, Received())
        if received.finish_reason is not None:
            self.world.violation(f"{self.name}: more of choice {chunk.index} after its end: {chunk}")
        if chunk.start != len(received.token_ids):
            self.world.violation(f"{self.name}: token {len(received.token_ids)} was due, {chunk.start} came")
        received.token_ids += chunk.token_ids
        received.text += chunk.text
        received.num_logprobs += len(chunk.logprobs)
        received.finish_reason, received.stop_reason = chunk.finish_reason, chunk.stop_reason
        if chunk.logprobs and [e.token.token_id for e in chunk.logprobs] != chunk.token_ids:
            self.world.violation(f"{self.name}: log-probabilities of other tokens: {chunk}")
        if self.is_poisoned:
            return
        expected = self.expected[chunk.index]
        if received.token_ids != expected.token_ids[: len(received.token_ids)]:
            self.world.violation(f"{self.name}: tokens {received.token_ids} instead of {expected.token_ids}")
        if not expected.text.startswith(received.text):
            self.world.violation(f"{self.name}: text {received.text!r} instead of {expected.text!r}")

    def _check_end(self) -> None:
        violation = self.world.violation
        total = 0
        indices = self.expected if not self.is_poisoned else self.received
        for index in indices:
            received = self.received.get(index, Received())
            total += len(received.token_ids)
            if received.finish_reason == "abort" and self.aborted:
                continue
            if self.is_poisoned:
                violation(f"{self.name}: poison was survived: {received}")
                continue
            expected = self.expected[index]
            got = Expected(received.token_ids, received.text, received.finish_reason or "", received.stop_reason)
            if got != expected:
                violation(f"{self.name}: choice {index} ended as {got} instead of {expected}")
            wants = self.options.get("logprobs") is not None
            if not wants and received.num_logprobs:
                violation(f"{self.name}: {received.num_logprobs} log-probabilities that nobody asked for")
        usage = self.state.usage
        assert usage is not None
        if usage.prompt_tokens != len(self.prompt_token_ids) or usage.completion_tokens != total:
            violation(f"{self.name}: usage {usage} for {len(self.prompt_token_ids)} and {total} tokens")
        if not 0 <= usage.cached_tokens <= len(self.prompt_token_ids) + total:
            violation(f"{self.name}: usage {usage}")
        if self.options.get("prompt_logprobs") is not None and not self.aborted:
            told = [e.logprobs.token.token_id for e in self.state.prompt_logprobs[1:]]
            if told != self.prompt_token_ids[1:] or self.state.prompt_logprobs[0].HasField("logprobs"):
                violation(f"{self.name}: prompt log-probabilities of {told}")
