"""Drives a tokenizer: the kit binds the addresses of a gateway and of a scheduler, which it dials.

Nothing is known of its vocabulary: the ids of a text are asked for with Encode.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quartet.shared.conformance import link_checks, watching
from quartet.shared.conformance.fake_gateway import Choice, FakeGateway, Stream
from quartet.shared.conformance.report import Report
from quartet.shared.conformance.structured import TOKENIZER_RULES, structured_submits
from quartet.shared.conformance.wire import Bound, Loop
from quartet.shared.messages import (
    Abort,
    AnyMessage,
    Attach,
    CallFailed,
    ChoicePast,
    Decode,
    ErrorCode,
    Failed,
    Finish,
    FinishReason,
    GetLoads,
    Loads,
    ModelChanged,
    ModelInfo,
    NewRequest,
    Output,
    Outputs,
    Prompt,
    PromptLogprobs,
    Release,
    Role,
    Submit,
    TextPrompt,
    TokenLogprobs,
    TokensPrompt,
)
from quartet.shared.sampling_params import SamplingParams, TextParams

# More rows than any tokenizer has tokens, so that the vocabulary's end is the model's.
MODEL = ModelInfo("conformance", "", 1 << 20, 512, 512, 16, 64, 256, "float32", "none", structured_output=True)

RULES = link_checks.DIALLER_RULES | {
    "link.model": "gateways are told the model that the scheduler stands for",
    "link.ready": "it is ready exactly while a ready scheduler is there",
    "accept.ids": "a Submit is answered with Accepted and the prompt's ids, as Encode gives them",
    "accept.request": "the scheduler is asked with these ids, the attempt, the pasts, and max_tokens resolved",
    "accept.waits": "what is submitted while there is no scheduler is told the next one",
    "delta.contiguous": "each delta begins at the token where the one before ended",
    "delta.bytes": "num_text_bytes is the length of all text let out so far",
    "delta.characters": "no delta has half a character",
    "delta.text": "the text of all deltas is that of all tokens",
    "delta.end": "the last delta has the finish reason, and nothing follows; half a character left is told once or not",
    "delta.logprobs": "log-probabilities come with their tokens' bytes",
    "stop.cut": "a stop string across tokens ends the text right before it, and nothing of it gets out",
    "stop.finish": "a stop string is told to the scheduler with Finish, and the rest of the outputs is dropped",
    "stop.release": "text held back for a stop string that does not come is let out",
    "ledger.scheduler": "a scheduler that comes back is told every unfinished request with all its outputs",
    "ledger.gap": "outputs that leave a gap make it add the request again from where it is",
    "ledger.duplicate": "outputs told again are dropped",
    "request.attempts": "outputs and messages of a lower attempt are ignored",
    "request.higher-attempt": "a Submit with a higher attempt takes the stream over and goes on after its past",
    "request.failed": "Failed from the scheduler reaches the gateway, with its code and field",
    "attach.found": "a gateway that attaches within the grace is sent Attached and every token after next_index",
    "attach.unknown": "an Attach to an unknown request is answered with Failed NOT_FOUND",
    "forward.release": "Release and Abort of a request reach the scheduler; unknown ones change nothing",
    "refuse.field": "what the model cannot serve is refused with INVALID_ARGUMENT and the field's name",
    "calls.answered": "every call is answered under its id",
    "calls.encode": "Encode gives ids and their bytes, which make up the text",
    "calls.decode": "Decode gives the text of ids, and refuses ids that are none",
    "calls.loads": "GetLoads is passed on and its answer back; without a scheduler it fails with UNAVAILABLE",
    **TOKENIZER_RULES,
    **watching.TOKENIZER_RULES,
}

PLAIN = "The quick brown fox jumps over the lazy dog and runs away into the dark forest."
UNICODE = "na\u00efve caf\u00e9 \u2014 \U0001f600 \u9f9c \uac00 \U0001f1fa\U0001f1f8 \U0001f469\u200d\U0001f467 end"


@dataclass
class TokenizerKit:
    """A gateway and a scheduler, both this kit."""

    report: Report
    gateway_link: str
    scheduler_link: str
    timeout: float = 10.0
    gone: Callable[[], str] | None = None

    def __post_init__(self) -> None:
        self.loop = Loop(self.report, self.timeout, self.gone)
        self.gateway = FakeGateway(self.loop, self.gateway_link)
        self.scheduler = Bound(self.loop, self.scheduler_link, Role.SCHEDULER, "conformance-scheduler", MODEL)
        self.scheduler.on_message = self._on_scheduler_message
        self._request_ids = itertools.count(random.getrandbits(62))

    def start(self) -> None:
        self.gateway.link.wait_open()
        self.scheduler.wait_open()
        self.loop.expect("link.ready", self.is_ready, "ready in a heartbeat to the gateway, with a ready scheduler")
        self.loop.expect("link.model", lambda: self.gateway.link.model_told == MODEL, "the scheduler's model")

    def is_ready(self) -> bool:
        return bool(self.gateway.link.beats and self.gateway.link.beats[-1].ready)

    def close(self) -> None:
        if self.gateway.link.is_open:
            for stream in self.gateway.streams.values():
                self.gateway.link.send(Abort(stream.request_id, stream.submit.attempt))
            self.loop.run_for(0.1)
        self.loop.close()

    def _on_scheduler_message(self, message: AnyMessage) -> None:
        if isinstance(message, GetLoads):
            self.scheduler.send(Loads(message.call_id, 1, 2, 3, 4, 5, 6, 7, 8, 9))
        else:
            self.scheduler.inbox.append(message)

    # --- requests ---------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        pasts: dict[int, list[int]] | None = None,
        sent_bytes: int | None = None,
        text: TextParams | None = None,
        attempt: int = 1,
        request_id: int = 0,
        prompt_logprobs: int | None = None,
        **sampling: Any,
    ) -> Stream:
        """A Submit that is sent; its choices begin at the pasts."""
        pasts = pasts or {0: []}
        submit = Submit(
            request_id or next(self._request_ids),
            attempt,
            prompt or TokensPrompt([5, 6, 7]),
            SamplingParams(**({"max_tokens": 200, "prompt_logprobs": prompt_logprobs} | sampling)),
            text or TextParams(),
            [ChoicePast(i, list(ids), sent_bytes) for i, ids in pasts.items()],
        )
        choices = {i: Choice(list(ids)) for i, ids in pasts.items()}
        return self.gateway.submit(Stream(submit, choices))

    def asked(self, stream: Stream, rule: str = "accept.request") -> NewRequest:
        """The NewRequest for this stream's attempt."""

        def found() -> list[NewRequest]:
            return [
                message
                for message in self.scheduler.of(NewRequest)
                if (message.request_id, message.attempt) == (stream.request_id, stream.submit.attempt)
            ]

        self.loop.expect(rule, found, "a NewRequest to the scheduler")
        message = found()[0]
        self.scheduler.inbox.remove(message)
        return message

    def feed(
        self,
        stream: Stream,
        token_ids: Sequence[int],
        start: int | None = None,
        finish: FinishReason | None = None,
        index: int = 0,
        attempt: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """Outputs as the scheduler sends them, by default following what the gateway has."""
        start = len(stream.choices[index].token_ids) if start is None else start
        attempt = stream.submit.attempt if attempt is None else attempt
        self.scheduler.send(
            Outputs([Output(stream.request_id, attempt, index, start, list(token_ids), logprobs, finish)])
        )

    def until(self, stream: Stream, count: int, rule: str = "delta.contiguous", index: int = 0) -> None:
        choice = stream.choices[index]
        self.loop.expect(
            rule, lambda: len(choice.token_ids) >= count, f"{count} tokens in deltas, {len(choice.token_ids)} came"
        )

    def until_end(self, stream: Stream, index: int = 0, rule: str = "delta.end") -> None:
        self.loop.expect(rule, lambda: stream.choices[index].finish_reason, "a delta with a finish reason")

    def failure(self, stream: Stream, rule: str, what: str) -> Failed:
        self.loop.expect(rule, lambda: stream.failed, what)
        assert stream.failed is not None
        return stream.failed

    def attached(self, stream: Stream) -> Submit:
        self.loop.expect("attach.found", lambda: stream.attached, "Attached")
        assert stream.attached is not None
        return stream.attached

    def same_text(self, stream: Stream, right: str, rule: str = "delta.text") -> None:
        """Apart from a space that some vocabularies put first."""
        text = stream.choice.text
        self.report.check(
            rule, text.removeprefix(" ") == right.removeprefix(" "), f"the text is {text!r}, not {right!r}"
        )


# --- links ----------------------------------------------------------------------------------------


def gateway_link(kit: TokenizerKit) -> None:
    """Sessions with gateways."""
    kit.start()
    calls = itertools.count(1 << 32)

    def answers() -> int:
        return sum(call_id >= 1 << 32 for call_id in kit.gateway.answers)

    link_checks.dialler(kit.loop, kit.gateway.link, lambda: Decode(next(calls), []), answers)


def scheduler_link(kit: TokenizerKit) -> None:
    """Sessions with schedulers. That a message arrived is seen at the gateway: another model each time."""
    kit.start()
    names = itertools.count(1)
    seen: set[str] = set()

    def probe() -> ModelChanged:
        return ModelChanged(msgspec.structs.replace(MODEL, name=f"probe {next(names)}"))

    def answers() -> int:
        model = kit.gateway.link.model_told
        if model is not None and model.name.startswith("probe"):
            seen.add(model.name)
        return len(seen)

    link_checks.dialler(kit.loop, kit.scheduler, probe, answers)


def heartbeats(kit: TokenizerKit) -> None:
    """Idle beats, readiness, and progress with work."""
    kit.start()
    link_checks.beats(kit.loop, kit.gateway.link, kit.scheduler)
    before = link_checks.progress(kit.gateway.link)
    kit.gateway.encode(PLAIN)
    link_checks.moves(kit.loop, kit.gateway.link, before)
    kit.scheduler.close()
    kit.loop.expect("link.ready", lambda: not kit.is_ready(), "not ready in a heartbeat, without a scheduler")
    answer = kit.gateway.call(GetLoads)
    kit.report.check(
        "calls.loads",
        isinstance(answer, CallFailed) and answer.code is ErrorCode.UNAVAILABLE,
        f"GetLoads without a scheduler was answered with {answer}",
    )
    kit.scheduler.bind()
    kit.scheduler.wait_open()
    kit.loop.expect("link.ready", kit.is_ready, "ready again in a heartbeat")
    other = msgspec.structs.replace(MODEL, name="another", max_model_len=100)
    kit.scheduler.send(ModelChanged(other))
    kit.loop.expect("link.model", lambda: kit.gateway.link.model_told == other, "the model after ModelChanged")


# --- calls ----------------------------------------------------------------------------------------


def calls(kit: TokenizerKit) -> None:
    """Encode, Decode, GetLoads."""
    kit.start()
    for text in ("", PLAIN, UNICODE):
        encoded = kit.gateway.encode(text)
        joined = b"".join(encoded.tokens).decode(errors="replace")
        kit.report.check(
            "calls.encode",
            len(encoded.tokens) == len(encoded.token_ids) and joined.removeprefix(" ") == text,
            f"the tokens of {text!r} make up {joined!r}",
        )
        decoded = kit.gateway.decode(encoded.token_ids)
        kit.report.check("calls.decode", decoded == text, f"the ids of {text!r} decode to {decoded!r}")
    answer = kit.gateway.call(lambda call_id: Decode(call_id, [1 << 30]))
    kit.report.check(
        "calls.decode",
        isinstance(answer, CallFailed) and (answer.code, answer.field) == (ErrorCode.INVALID_ARGUMENT, "token_ids"),
        f"Decode of an id that is none was answered with {answer}",
    )
    loads = kit.gateway.call(GetLoads)
    kit.report.check(
        "calls.loads",
        isinstance(loads, Loads) and (loads.num_running, loads.max_num_batched_tokens) == (1, 9),
        f"GetLoads was answered with {loads}",
    )


# --- streams --------------------------------------------------------------------------------------


def accept(kit: TokenizerKit) -> None:
    """From text to the scheduler."""
    kit.start()
    encoded = kit.gateway.encode(PLAIN, add_special_tokens=True).token_ids
    stream = kit.stream(TextPrompt(PLAIN), max_tokens=None, temperature=0.5, seed=9)
    kit.loop.expect("accept.ids", lambda: stream.accepted is not None, "Accepted")
    kit.report.check("accept.ids", stream.accepted == encoded, "Accepted has other ids than Encode gives")
    request = kit.asked(stream)
    sampling = msgspec.structs.replace(stream.submit.sampling, max_tokens=MODEL.max_model_len - len(encoded))
    kit.report.check("accept.request", request.prompt_token_ids == encoded, "the scheduler is asked with other ids")
    kit.report.check("accept.request", request.sampling == sampling, f"its sampling is {request.sampling}")
    pasts = {0: [5, 6], 2: []}
    resumed = kit.stream(TokensPrompt([7, 8, 9]), pasts=pasts, attempt=3)
    request = kit.asked(resumed)
    kit.report.check("accept.ids", resumed.accepted == [7, 8, 9], f"Accepted has {resumed.accepted} for [7, 8, 9]")
    told = {past.index: past.output_token_ids for past in request.choices}
    kit.report.check("accept.request", told == pasts, f"the scheduler is told the pasts {told}, right is {pasts}")


def text(kit: TokenizerKit) -> None:
    """Token by token, all at once, and cut in the middle of a character."""
    kit.start()
    for sentence in (PLAIN, UNICODE):
        ids = kit.gateway.encode(sentence).token_ids
        for size in (1, 3, len(ids)):
            stream = kit.stream()
            kit.asked(stream)
            for i in range(0, len(ids), size):
                last = i + size >= len(ids)
                kit.feed(stream, ids[i : i + size], i, FinishReason.LENGTH if last else None)
            kit.until_end(stream)
            kit.report.check("delta.contiguous", stream.choice.token_ids == ids, "the deltas have other ids")
            kit.same_text(stream, sentence)
            kit.report.check(
                "delta.end", stream.choice.finish_reason is FinishReason.LENGTH, f"{stream.choice.finish_reason}"
            )
    encoded = kit.gateway.encode("\U0001f600")
    if len(encoded.token_ids) > 1:
        stream = kit.stream()
        kit.asked(stream)
        for i, token_id in enumerate(encoded.token_ids[:-1]):
            last = i == len(encoded.token_ids) - 2
            kit.feed(stream, [token_id], i, FinishReason.LENGTH if last else None)
        kit.until_end(stream)
        kit.report.check(
            "delta.end",
            stream.choice.text.strip(" ") in ("", "\ufffd"),
            f"half a character at the end was told as {stream.choice.text!r}",
        )


def choices(kit: TokenizerKit) -> None:
    """Two choices side by side, and log-probabilities."""
    kit.start()
    encoded = kit.gateway.encode(PLAIN)
    ids = encoded.token_ids
    stream = kit.stream(pasts={0: [], 1: []}, logprobs=1)
    kit.asked(stream)
    for i, token_id in enumerate(ids):
        finish = FinishReason.LENGTH if i == len(ids) - 1 else None
        for index, this in ((0, token_id), (1, ids[-1 - i])):
            entry = TokenLogprobs(this, -1.0, 2, [(ids[0], -0.5)])
            kit.feed(stream, [this], i, finish, index, logprobs=[entry])
    kit.until_end(stream)
    kit.until_end(stream, 1)
    kit.same_text(stream, PLAIN)
    kit.report.check("delta.contiguous", stream.choices[1].token_ids == ids[::-1], "the choices are mixed up")
    told = [(entry.token_id, entry.text) for entry in stream.choice.logprobs]
    right = [(token_id, [encoded.tokens[i], encoded.tokens[0]]) for i, token_id in enumerate(ids)]
    kit.report.check("delta.logprobs", told == right, f"of {len(right)} entries {len(told)} came, or not their bytes")


def prompt_logprobs(kit: TokenizerKit) -> None:
    """They are passed on, and those told again are dropped."""
    kit.start()
    stream = kit.stream(TokensPrompt([5, 6, 7, 8]), prompt_logprobs=0)
    kit.asked(stream)
    entries = [None, *(TokenLogprobs(i, -1.0, 1) for i in (6, 7, 8))]
    for start, end in ((0, 2), (0, 3), (3, 4)):
        kit.scheduler.send(PromptLogprobs(stream.request_id, 1, start, entries[start:end]))
    kit.feed(stream, [5], finish=FinishReason.LENGTH)
    kit.until_end(stream)
    told = [entry and entry.token_id for entry in stream.prompt_logprobs]
    kit.report.check("delta.logprobs", told == [None, 6, 7, 8], f"the prompt's log-probabilities are of {told}")


def stop_strings(kit: TokenizerKit) -> None:
    """Across tokens, inside one, and not at all."""
    kit.start()
    ids = kit.gateway.encode(PLAIN).token_ids
    for size in (1, len(ids)):
        stream = kit.stream(text=TextParams(["never", "wn fo"]))
        kit.asked(stream)
        for i in range(0, len(ids), size):
            kit.feed(stream, ids[i : i + size], i)
        kit.until_end(stream, rule="stop.cut")
        kit.same_text(stream, PLAIN[: PLAIN.index("wn fo")], "stop.cut")
        choice = stream.choice
        kit.report.check(
            "stop.cut",
            (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, "wn fo"),
            f"it ended with {choice.finish_reason} and stop_reason {choice.stop_reason!r}",
        )
        kit.loop.expect("stop.finish", lambda: kit.scheduler.of(Finish), "Finish to the scheduler")
        finish = kit.scheduler.take("stop.finish", Finish)
        kit.report.check(
            "stop.finish",
            (finish.request_id, finish.attempt, finish.index) == (stream.request_id, 1, 0)
            and finish.num_output_tokens == len(choice.token_ids),
            f"Finish at {finish.num_output_tokens} tokens, the gateway has {len(choice.token_ids)}",
        )
        kit.feed(stream, [ids[0]], len(choice.token_ids))
        kit.gateway.settle()
    stream = kit.stream(text=TextParams(["lazy cat", "forest.\n"]))
    kit.asked(stream)
    for i, token_id in enumerate(ids):
        kit.feed(stream, [token_id], i, FinishReason.LENGTH if i == len(ids) - 1 else None)
    kit.until_end(stream)
    kit.same_text(stream, PLAIN, "stop.release")


# --- the ledger -----------------------------------------------------------------------------------


def scheduler_restart(kit: TokenizerKit) -> None:
    """A scheduler that comes back knows nothing."""
    kit.start()
    ids = kit.gateway.encode(UNICODE).token_ids
    stream, other = kit.stream(), kit.stream(TokensPrompt([9, 8]))
    kit.asked(stream)
    kit.asked(other)
    for i in range(5):
        kit.feed(stream, ids[i : i + 1], i)
    kit.until(stream, 5)
    kit.scheduler.close()
    kit.loop.expect("link.ready", lambda: not kit.is_ready(), "not ready in a heartbeat, without a scheduler")
    late = kit.stream(TokensPrompt([4, 5]))
    kit.loop.run_for(0.1)
    kit.scheduler.inbox.clear()
    kit.scheduler.restart()
    kit.scheduler.wait_open()
    request = kit.asked(stream, "ledger.scheduler")
    past = request.choices[0].output_token_ids if request.choices else None
    kit.report.check("ledger.scheduler", past == ids[:5], f"the past told is {past}, right is {ids[:5]}")
    kit.report.check("ledger.scheduler", request.prompt_token_ids == [5, 6, 7], "the prompt told is another")
    request = kit.asked(other, "ledger.scheduler")
    kit.report.check("ledger.scheduler", request.prompt_token_ids == [9, 8], "the prompt told is another")
    kit.asked(late, "accept.waits")
    for i in range(5, len(ids)):
        kit.feed(stream, ids[i : i + 1], i, FinishReason.LENGTH if i == len(ids) - 1 else None)
    kit.until_end(stream)
    kit.same_text(stream, UNICODE)
    kit.scheduler.restart()
    kit.scheduler.wait_open()
    kit.asked(other, "ledger.scheduler")
    kit.loop.expect("link.ready", kit.is_ready, "ready again in a heartbeat")
    kit.gateway.settle()
    again = [message for message in kit.scheduler.of(NewRequest) if message.request_id == stream.request_id]
    kit.report.check("ledger.scheduler", not again, "a finished request was added again")


def gaps_and_duplicates(kit: TokenizerKit) -> None:
    """Outputs lost and outputs told twice."""
    kit.start()
    ids = kit.gateway.encode(PLAIN).token_ids
    stream = kit.stream()
    kit.asked(stream)
    kit.feed(stream, ids[:4], 0)
    kit.until(stream, 4)
    kit.feed(stream, ids[6:7], 6)
    request = kit.asked(stream, "ledger.gap")
    past = request.choices[0].output_token_ids
    kit.report.check("ledger.gap", past == ids[:4], f"it was added again with the past {past}, right is {ids[:4]}")
    kit.gateway.settle()
    kit.report.check("ledger.gap", len(stream.choice.token_ids) == 4, "tokens after a gap were passed on")
    for start, end in ((4, 6), (0, 5), (0, 6), (3, 8)):
        kit.feed(stream, ids[start:end], start)
    kit.until(stream, 8, "ledger.duplicate")
    kit.feed(stream, ids[:2], 0)
    kit.gateway.settle()
    kit.report.check(
        "ledger.duplicate",
        stream.choice.token_ids == ids[:8],
        f"{len(stream.choice.token_ids)} tokens were passed on of 8, or others",
    )
    kit.feed(stream, ids[8:], 8, FinishReason.LENGTH)
    kit.until_end(stream)
    kit.same_text(stream, PLAIN, "ledger.duplicate")


def attempts(kit: TokenizerKit) -> None:
    """A lower one is ignored, a higher one takes over."""
    kit.start()
    ids = kit.gateway.encode(PLAIN).token_ids
    stream = kit.stream(attempt=4)
    kit.asked(stream)
    kit.feed(stream, ids[:2], 0)
    kit.until(stream, 2)
    kit.feed(stream, ids[5:9], 2, attempt=3)
    kit.gateway.link.send(msgspec.structs.replace(stream.submit, attempt=3, prompt=TokensPrompt([1])))
    kit.gateway.link.send(Abort(stream.request_id, 3))
    kit.gateway.link.send(Release(stream.request_id, 3))
    kit.scheduler.send(Outputs([Output(12345, 1, 0, 0, [5])]))
    kit.gateway.settle()
    kit.report.check(
        "request.attempts", stream.choice.token_ids == ids[:2], "outputs of a lower attempt were passed on"
    )
    strays = [m for m in kit.scheduler.inbox if isinstance(m, (NewRequest, Abort, Release))]
    kit.report.check("request.attempts", not strays, f"a lower attempt was passed on: {strays[:1]}")

    # A gateway that has two tokens of it, and their text.
    begun = kit.gateway.decode(ids[:2])
    higher = kit.stream(
        stream.submit.prompt,
        pasts={0: ids[:2]},
        attempt=6,
        request_id=stream.request_id,
        sent_bytes=len(begun.encode()),
    )
    higher.choice.text = begun
    request = kit.asked(higher, "request.higher-attempt")
    past = request.choices[0].output_token_ids
    kit.report.check("request.higher-attempt", past == ids[:2], f"the past told is {past}, right is {ids[:2]}")
    kit.feed(higher, ids[2:4], 2, attempt=4)
    kit.gateway.settle()
    kit.report.check("request.attempts", higher.choice.token_ids == ids[:2], "an output of the lower attempt counted")
    kit.feed(higher, ids[2:], 2, FinishReason.LENGTH)
    kit.until_end(higher)
    kit.same_text(higher, PLAIN, "request.higher-attempt")


def half_sent(kit: TokenizerKit) -> None:
    """A past that ends in the middle of a character, of which the client has no byte."""
    kit.start()
    ids = kit.gateway.encode("\U0001f600 and on").token_ids
    stream = kit.stream(pasts={0: ids[:1]}, sent_bytes=0)
    kit.asked(stream)
    kit.feed(stream, ids[1:], 1, FinishReason.LENGTH)
    kit.until_end(stream)
    kit.same_text(stream, "\U0001f600 and on")


def attach(kit: TokenizerKit) -> None:
    """A gateway dies, and another attaches for a client that has some tokens."""
    kit.start()
    ids = kit.gateway.encode(PLAIN).token_ids
    running, ended = kit.stream(), kit.stream()
    kit.asked(running)
    kit.asked(ended)
    for i in range(6):
        kit.feed(running, ids[i : i + 1], i)
    kit.feed(ended, ids, 0, FinishReason.LENGTH)
    kit.until(running, 6)
    kit.until_end(ended)
    kit.gateway.link.close()
    kit.loop.run_for(0.1)
    kit.feed(running, ids[6:8], 6)
    gone = dict(kit.gateway.streams)
    kit.gateway.streams.clear()
    kit.gateway.link.restart()
    kit.gateway.link.wait_open()
    unknown = Stream(running.submit, {0: Choice()})
    kit.gateway.streams[7] = unknown
    kit.gateway.link.send(Attach(7, 1 << 20, {}))
    failed = kit.failure(unknown, "attach.unknown", "Failed for an unknown request")
    kit.report.check("attach.unknown", failed.code is ErrorCode.NOT_FOUND, f"it is {failed.code.name}")
    for stream, have in ((running, 4), (ended, len(ids) - 1)):
        begun = kit.gateway.decode(ids[:have])
        submit = msgspec.structs.replace(gone[stream.request_id].submit, attempt=2)
        again = Stream(submit, {0: Choice(list(ids[:have]), begun)})
        if stream.choice.text.startswith(" "):
            again.choice.text = f" {begun}"
        kit.gateway.streams[submit.request_id] = again
        kit.gateway.link.send(Attach(submit.request_id, 2, {0: have}))
        told = kit.attached(again)
        kit.report.check(
            "attach.found",
            told.prompt == TokensPrompt([5, 6, 7]) and [past.output_token_ids for past in told.choices] == [ids[:have]],
            "Attached has another prompt or past than the client's",
        )
        if stream is running:
            kit.until(again, 8, "attach.found")
            request = kit.asked(again, "attach.found")
            kit.report.check(
                "attach.found", request.choices[0].output_token_ids == ids[:8], "the scheduler is told another past"
            )
            kit.feed(again, ids[8:], 8, FinishReason.LENGTH)
        kit.until_end(again)
        kit.report.check("attach.found", again.choice.token_ids == ids, "the tokens after next_index are not all there")
        kit.same_text(again, PLAIN, "attach.found")


def ends(kit: TokenizerKit) -> None:
    """Release, Abort and Failed."""
    kit.start()
    ids = kit.gateway.encode(PLAIN).token_ids
    done, running, failing = kit.stream(), kit.stream(), kit.stream()
    for stream in (done, running, failing):
        kit.asked(stream)
    kit.feed(done, ids, 0, FinishReason.LENGTH)
    kit.until_end(done)
    kit.gateway.link.send(Release(done.request_id, 1))
    kit.gateway.link.send(Abort(running.request_id, 1))
    for message in (Release(77, 1), Abort(77, 1), Release(done.request_id, 1), Abort(running.request_id, 1)):
        kit.gateway.link.send(message)
    kit.gateway.settle()
    told = [(type(m), m.request_id) for m in kit.scheduler.inbox if isinstance(m, (Release, Abort))]
    for kind, stream in ((Release, done), (Abort, running)):
        kit.report.check(
            "forward.release", (kind, stream.request_id) in told, f"{kind.__name__} did not reach the scheduler"
        )
    kit.scheduler.send(
        Failed(failing.request_id, 1, ErrorCode.RESOURCE_EXHAUSTED, "provoked", "max_tokens", retry_after_ms=7)
    )
    failed = kit.failure(failing, "request.failed", "Failed at the gateway")
    kit.report.check(
        "request.failed",
        (failed.code, failed.message, failed.field, failed.retry_after_ms)
        == (ErrorCode.RESOURCE_EXHAUSTED, "provoked", "max_tokens", 7),
        f"it came as {failed}",
    )


def refusals(kit: TokenizerKit) -> None:
    """Each with the field that is to blame."""
    kit.start()
    beyond = MODEL.vocab_size
    cases: list[tuple[str, dict[str, Any]]] = [
        ("prompt_token_ids", {"prompt": TokensPrompt([])}),
        ("prompt_token_ids", {"prompt": TokensPrompt([5, beyond])}),
        ("prompt_token_ids", {"prompt": TokensPrompt([5] * 600)}),
        ("logit_bias", {"logit_bias": {beyond: 1.0}}),
        ("stop_token_ids", {"stop_token_ids": [beyond]}),
        ("past_token_ids", {"pasts": {0: [beyond]}}),
    ]
    for field, changes in cases:
        stream = kit.stream(**changes)
        failed = kit.failure(stream, "refuse.field", f"a refusal for {field}")
        kit.report.check(
            "refuse.field",
            (failed.code, failed.field) == (ErrorCode.INVALID_ARGUMENT, field),
            f"{failed.code.name} with field {failed.field!r}, right is INVALID_ARGUMENT and {field!r}",
        )
    kit.gateway.settle()
    kit.report.check("refuse.field", not kit.scheduler.of(NewRequest), "a refused request reached the scheduler")


SCENARIOS: dict[str, Callable[[TokenizerKit], None]] = {
    function.__name__: function
    for function in (
        gateway_link,
        scheduler_link,
        heartbeats,
        calls,
        accept,
        text,
        choices,
        prompt_logprobs,
        stop_strings,
        scheduler_restart,
        gaps_and_duplicates,
        attempts,
        half_sent,
        attach,
        ends,
        refusals,
        structured_submits,
        watching.watching_gateway,
    )
}
