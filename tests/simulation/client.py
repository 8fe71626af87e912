"""A client that reads to the end, whatever happens, and knows what it ought to read.

It keeps and resumes its stream with the client library's own State.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from simulation.gateway import GatewayNode, ServerCall
from simulation.vocabulary import EOS, POISON, encode, text_of
from support.fake_executor import chain_start, continuation

from quartet.services.gateway.convert import stream_from
from quartet.shared.block_hash import hash_root
from quartet.shared.client.request import build_request
from quartet.shared.client.state import Chunk, InferenceError, State
from quartet.shared.messages import FinishReason, NewRequest
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
        self.left = False
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
        self._last_sent = 0.0
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
        self._last_sent = max(self._last_sent + 1e-6, world.now + world.latency())
        world.at(self._last_sent - world.now, process, method, process.node, call, request)

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
        self.world.check_turned_away(self, error)
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
        self.done = self.left = True
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
        self._sampling, self._stops = stream.sampling, list(stream.text.stop)
        self._message = NewRequest(0, 0, self.prompt_token_ids, self._sampling, [EOS], [], cache_salt=stream.cache_salt)
        ends = frozenset() if self._sampling.ignore_eos else frozenset([EOS])
        self._silent = ends | frozenset(self._sampling.stop_token_ids)
        self._chains = dict.fromkeys(stream.choices, self._prompt_chain())
        if not self.world.profile.diverges:
            self.expected = {index: self._whole(index, []) for index in stream.choices}

    def _prompt_chain(self) -> int:
        salt = self._message.cache_salt
        chain = chain_start(hash_root([("cache_salt", salt)] if salt else []))
        for token_id in self.prompt_token_ids:
            chain = hash((chain, token_id))
        return chain

    def _whole(self, index: int, past: list[int]) -> Expected:
        """What a choice with these tokens comes to, when nothing disturbs it."""
        sampling = self._sampling
        token_ids, reason = continuation(self._message, index, past, self.world.profile.model)
        for count in range(max(1, sampling.min_tokens), len(token_ids)):
            if token_ids[count - 1] in self._silent:  # it ought to have ended here
                token_ids, reason = token_ids[:count], FinishReason.STOP
                break
        text, count, stop = text_of(token_ids, self._silent, self._stops, sampling.min_tokens)
        if stop:
            return Expected(token_ids[:count], text, "stop", stop)
        stop_reason = None
        if reason is FinishReason.STOP and (token_ids[-1] != EOS or sampling.ignore_eos):
            stop_reason = token_ids[-1]
        return Expected(token_ids, text, REASONS[reason], stop_reason)

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
        if self.world.profile.diverges:
            self._check_sampled(chunk)
            return
        expected = self.expected[chunk.index]
        if received.token_ids != expected.token_ids[: len(received.token_ids)]:
            self.world.violation(f"{self.name}: tokens {received.token_ids} instead of {expected.token_ids}")
        if not expected.text.startswith(received.text):
            self.world.violation(f"{self.name}: text {received.text!r} instead of {expected.text!r}")

    def _check_sampled(self, chunk: Chunk) -> None:
        """Each token must once have been drawn after exactly those that the client has."""
        chain = self._chains[chunk.index]
        for place, token_id in enumerate(chunk.token_ids, chunk.start):
            if (self._sampling.seed, chunk.index, chain, token_id) not in self.world.sampled:
                self.world.violation(f"{self.name}: token {place} of choice {chunk.index} never followed those before")
            chain = hash((chain, token_id))
        self._chains[chunk.index] = chain

    def _check_end(self) -> None:
        violation = self.world.violation
        total = 0
        indices = range(self.options.get("n") or 1)
        for index in indices:
            received = self.received.get(index, Received())
            total += len(received.token_ids)
            if received.finish_reason == "abort" and self.aborted:
                continue
            if self.is_poisoned:
                violation(f"{self.name}: poison was survived: {received}")
                continue
            expected = self.expected.get(index) or self._whole(index, received.token_ids)
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
