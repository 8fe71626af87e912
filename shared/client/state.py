"""What a generation has received so far, and what to call next when its connection broke."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc

from quartet.shared.pb import inference_pb2 as pb
from quartet.shared.pb.inference_pb2_grpc import InferenceServiceStub

MAX_DELAY = 1.0
FIRST_DELAY = 0.05

_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_ABORT: "abort"}


class InferenceError(grpc.RpcError):
    """What the server said is wrong; has a status's `code()` and `details()`."""

    def __init__(self, code: grpc.StatusCode, details: str, retry_after_ms: int = 0) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code = code
        self._details = details
        self.retry_after_ms = retry_after_ms

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some tokens of a choice and the text they let out; `finish_reason` ("stop", "length" or "abort")
    is set in the choice's last one. `stop_reason` is the stop string or stop token id that matched. Of
    `tool_calls`, those with a name begin a call, and arguments of one index are to be joined."""

    index: int
    text: str
    token_ids: list[int]
    start: int = 0
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    tool_calls: list[pb.ToolCallDelta] = field(default_factory=list)


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    text_bytes: int | None = 0
    call_bytes: int | None = 0
    finished: bool = False


class State:
    """What a generation has received so far, and what to call next when its connection broke."""

    def __init__(self, request: pb.GenerateRequest, reconnect_timeout: float, timeout: float | None) -> None:
        self.request = request
        self.request_id = ""
        self.prompt_token_ids: list[int] = []
        self.seed = 0
        self.prompt_logprobs: list[pb.PromptLogprob] = []
        self.choices = {
            past.index: _Choice(
                list(past.past_token_ids),
                past.past_text_bytes if past.HasField("past_text_bytes") or not past.past_token_ids else None,
                past.past_call_bytes if past.HasField("past_call_bytes") or not past.past_token_ids else None,
                past.finished,
            )
            for past in request.past
        }
        self.usage: Usage | None = None
        self.num_attached = 0
        self.num_resumed = 0
        self._reconnect_timeout = reconnect_timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._progress_at = time.monotonic()
        self._delay = FIRST_DELAY
        self._known_to_server = False

    def call(self, stub: InferenceServiceStub) -> Any:
        timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        if self._known_to_server:
            self.num_attached += 1
            return stub.Attach(self.attach_request(), timeout=timeout)
        if self.request_id:
            self.num_resumed += 1
            return stub.Generate(self.resume_request(), timeout=timeout)
        return stub.Generate(self.request, timeout=timeout)

    def receive(self, response: pb.GenerateResponse) -> Chunk | None:
        self._progress_at = time.monotonic()
        self._delay = FIRST_DELAY
        match response.WhichOneof("event"):
            case "chunk":
                return self._chunk(response.chunk)
            case "started":
                self.request_id = response.started.request_id
                self.prompt_token_ids = list(response.started.prompt_token_ids)
                self.seed = response.started.seed
                self._known_to_server = True
            case "prompt_logprobs":
                self.prompt_logprobs += response.prompt_logprobs.entries
            case "completion":
                usage = response.completion.usage
                self.usage = Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        return None

    def after(self, error: grpc.RpcError, connected: bool) -> float:
        """Seconds to wait before the next call. Raises InferenceError when there is no use in one."""
        code, reason = error.code(), error_of(error)
        if code == grpc.StatusCode.NOT_FOUND and self._known_to_server:
            self._known_to_server = False
            return 0.0
        started = bool(self.request_id) or connected
        if code not in _BROKEN or not started or time.monotonic() - self._progress_at > self._reconnect_timeout:
            raise reason from error
        delay, self._delay = self._delay, min(MAX_DELAY, self._delay * 2)
        return min(MAX_DELAY, max(delay, reason.retry_after_ms / 1000))

    def _chunk(self, message: pb.Chunk) -> Chunk:
        choice = self.choices.setdefault(message.index, _Choice())
        if message.start != len(choice.token_ids):
            raise InferenceError(
                grpc.StatusCode.INTERNAL,
                f"choice {message.index} went on at token {message.start} instead of {len(choice.token_ids)}",
            )
        token_ids = list(message.token_ids)
        choice.token_ids += token_ids
        if choice.text_bytes is not None:
            choice.text_bytes += len(message.text.encode())
        tool_calls = list(message.tool_calls)
        if choice.call_bytes is not None:
            choice.call_bytes += sum(bool(part.name) + len(part.arguments.encode()) for part in tool_calls)
        finish_reason, stop_reason = None, None
        if message.HasField("finished"):
            choice.finished = True
            finish_reason = _FINISH_REASONS.get(message.finished.reason, "unspecified")
            which = message.finished.WhichOneof("stop_reason")
            stop_reason = None if which is None else getattr(message.finished, which)
        logprobs = list(message.logprobs)
        return Chunk(
            message.index, message.text, token_ids, message.start, logprobs, finish_reason, stop_reason, tool_calls
        )

    @property
    def _next_prompt_logprob(self) -> int:
        return self.request.prompt_logprobs_start + len(self.prompt_logprobs)

    def attach_request(self) -> pb.AttachRequest:
        request = pb.AttachRequest(request_id=self.request_id, prompt_logprobs_start=self._next_prompt_logprob)
        for index, choice in self.choices.items():
            request.positions.add(index=index, next_index=len(choice.token_ids), finished=choice.finished)
        if self.request.HasField("detach_grace_ms"):
            request.detach_grace_ms = self.request.detach_grace_ms
        return request

    def resume_request(self) -> pb.GenerateRequest:
        request = pb.GenerateRequest()
        request.CopyFrom(self.request)
        request.token_ids.ids[:] = self.prompt_token_ids
        request.sampling.seed = self.seed
        request.prompt_logprobs_start = self._next_prompt_logprob
        del request.past[:]
        for index, choice in self.choices.items():
            request.past.add(
                index=index,
                past_token_ids=choice.token_ids,
                past_text_bytes=choice.text_bytes,
                past_call_bytes=choice.call_bytes,
                finished=choice.finished,
            )
        return request


class GenerationState:
    """What Generation and AsyncGeneration have in common."""

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def request_id(self) -> str:
        """Empty until the server has accepted the request."""
        return self._state.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._state.prompt_token_ids

    @property
    def seed(self) -> int:
        return self._state.seed

    @property
    def prompt_logprobs(self) -> list[pb.PromptLogprob]:
        return self._state.prompt_logprobs

    @property
    def usage(self) -> Usage | None:
        """None until all choices have finished."""
        return self._state.usage

    @property
    def num_reconnects(self) -> int:
        return self._state.num_attached + self._state.num_resumed


def cut() -> InferenceError:
    return InferenceError(grpc.StatusCode.UNAVAILABLE, "the stream ended before its completion")


def error_of(error: Any) -> InferenceError:
    if isinstance(error, InferenceError):
        return error
    metadata = dict(error.trailing_metadata() or ()) if hasattr(error, "trailing_metadata") else {}
    retry_after = str(metadata.get("retry-after-ms", ""))
    return InferenceError(error.code(), error.details() or "", int(retry_after) if retry_after.isdigit() else 0)
