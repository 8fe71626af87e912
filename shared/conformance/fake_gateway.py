"""A gateway without clients: it submits, and judges every delta that comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

from quartet.shared.conformance.wire import Bound, Loop
from quartet.shared.messages import (
    Accepted,
    AnyMessage,
    Attached,
    CallFailed,
    Decode,
    Decoded,
    Delta,
    Deltas,
    Encode,
    Encoded,
    Failed,
    FinishReason,
    GetLoads,
    Loads,
    Prompt,
    PromptLogprobs,
    Role,
    Submit,
    TextPrompt,
    TokenLogprobs,
    WatchEnded,
    WatchEvents,
)


@dataclass
class Choice:
    """What a client of the gateway has of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_deltas: int = 0


@dataclass
class Stream:
    submit: Submit
    choices: dict[int, Choice]
    accepted: list[int] | None = None
    attached: Submit | None = None
    failed: Failed | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def choice(self) -> Choice:
        return self.choices[0]

    @property
    def request_id(self) -> int:
        return self.submit.request_id


class FakeGateway:
    def __init__(self, loop: Loop, address: str) -> None:
        self.link = Bound(loop, address, Role.GATEWAY, "conformance-gateway")
        self.link.on_message = self._on_message
        self.loop = loop
        self.report = loop.report
        self.streams: dict[int, Stream] = {}
        self.answers: dict[int, AnyMessage] = {}
        self.watched: list[AnyMessage] = []
        self._next_call = 1

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoded:
        return self.encode_prompt(TextPrompt(text, add_special_tokens))

    def encode_prompt(self, prompt: Prompt) -> Encoded:
        answer = self.call(lambda call_id: Encode(call_id, prompt))
        self.report.check("calls.encode", isinstance(answer, Encoded), f"a prompt was not encoded: {answer}")
        assert isinstance(answer, Encoded)
        return answer

    def decode(self, token_ids: list[int]) -> str:
        answer = self.call(lambda call_id: Decode(call_id, token_ids))
        self.report.check("calls.decode", isinstance(answer, Decoded), f"ids were not decoded: {answer}")
        assert isinstance(answer, Decoded)
        return answer.text

    def call(self, make: object) -> AnyMessage:
        """Sends a call of the next id and waits for its answer."""
        call_id, self._next_call = self._next_call, self._next_call + 1
        self.link.send(make(call_id))  # type: ignore[operator]
        self.loop.expect("calls.answered", lambda: call_id in self.answers, "the answer to a call, with its id")
        return self.answers.pop(call_id)

    def settle(self) -> None:
        """All that was sent on both links has been handled: a call that goes down the line and back."""
        self.call(GetLoads)

    def submit(self, stream: Stream) -> Stream:
        self.streams[stream.request_id] = stream
        self.link.send(stream.submit)
        return stream

    # --- what comes back --------------------------------------------------------------------------

    def _on_message(self, message: AnyMessage) -> None:
        if isinstance(message, Deltas):
            for delta in message.items:
                self._delta(delta)
        elif isinstance(message, (Encoded, Decoded, Loads, CallFailed)):
            self.answers[message.call_id] = message
        elif isinstance(message, Accepted):
            if (stream := self._stream(message)) is not None:
                stream.accepted = message.prompt_token_ids
        elif isinstance(message, Attached):
            if (stream := self._stream(message)) is not None:
                stream.attached = message.submit
        elif isinstance(message, Failed):
            if (stream := self._stream(message)) is not None:
                stream.failed = message
        elif isinstance(message, PromptLogprobs):
            if (stream := self._stream(message)) is not None:
                stream.prompt_logprobs += message.entries[len(stream.prompt_logprobs) - message.start :]
        elif isinstance(message, (WatchEvents, WatchEnded)):
            self.watched.append(message)
        else:
            self.report.check("link.frames", False, f"a {type(message).__name__} came to a gateway")

    def _stream(self, message: Accepted | Attached | Failed | PromptLogprobs | Delta) -> Stream | None:
        """The stream it speaks of, unless it was sent for an attempt that is over."""
        stream = self.streams.get(message.request_id)
        return stream if stream is not None and message.attempt >= stream.submit.attempt else None

    def _delta(self, delta: Delta) -> None:
        stream = self._stream(delta)
        if stream is None:
            return
        check, choice = self.report.check, stream.choices[delta.index]
        check("request.attempts", delta.attempt == stream.submit.attempt, f"attempt {delta.attempt} was never made")
        check("delta.end", choice.finish_reason is None, "a delta came after the one with the finish reason")
        check(
            "delta.contiguous",
            delta.start == len(choice.token_ids),
            f"a delta from token {delta.start} on came where {len(choice.token_ids)} are known",
        )
        choice.token_ids += delta.token_ids
        choice.text += delta.text
        choice.num_deltas += 1
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.logprobs is not None:
            choice.logprobs += delta.logprobs
        check(
            "delta.bytes",
            delta.num_text_bytes == len(choice.text.encode()),
            f"num_text_bytes is {delta.num_text_bytes} where the text has {len(choice.text.encode())} bytes",
        )
        check(
            "delta.characters",
            "\ufffd" not in delta.text or delta.finish_reason is not None,
            "a delta has a replacement character in the middle of a text",
        )
