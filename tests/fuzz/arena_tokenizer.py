"""The tokenizer's links: a good gateway and a good scheduler, and a gateway or the scheduler that sends rubbish."""

from __future__ import annotations

import random
import tempfile
from concurrent.futures import Future
from typing import Any

from fuzz.mutate import Mutator
from fuzz.world import MODEL, Failure, FakeWire, Loop, answer_dial, check_number, continuation, identity
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quartet.services.tokenizer.chat_template import ChatTemplate
from quartet.services.tokenizer.loaded import LoadedTokenizer, byte_level_alphabet, describe
from quartet.services.tokenizer.service import TokenizerService
from quartet.services.tokenizer.settings import TokenizerSettings
from quartet.shared.messages import (
    Abort,
    Accepted,
    Attach,
    CallFailed,
    ChatMessage,
    ChatPrompt,
    ChoicePast,
    Decode,
    Deltas,
    Encode,
    ErrorCode,
    Failed,
    FinishReason,
    GetLoads,
    Heartbeat,
    Loads,
    Message,
    ModelChanged,
    NewRequest,
    Output,
    Outputs,
    PromptLogprobs,
    Release,
    Role,
    Submit,
    TextPrompt,
    TokenLogprobs,
    TokensPrompt,
    decode,
    encode,
)
from quartet.shared.sampling_params import SamplingParams, TextParams

NUM_GOOD = 4
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def make_loaded() -> LoadedTokenizer:
    """Id 0 ends a sequence; ids 1 to 96 are the bytes from the space on."""
    stand_in = {byte: char for char, byte in byte_level_alphabet().items()}
    order = [*range(32, 128), *range(32), *range(128, 256)]
    vocab = {"</s>": 0} | {stand_in[byte]: i + 1 for i, byte in enumerate(order)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken("</s>", normalized=False, special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return describe(
        tokenizer,
        bos_token_id=None,
        eos_token_ids=(0,),
        add_bos=False,
        chat_template=TEMPLATE,
        special_tokens={},
        fingerprint="tiny",
    )


class Threads(Loop):
    """The event loop of a service whose threads do their work when the loop runs."""

    def run_in_executor(self, pool: Any, work: Any) -> Any:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_soon(run)
        return future


class TokenizerArena:
    """`evil` is the second gateway, or the scheduler."""

    loaded: LoadedTokenizer | None = None

    def __init__(self, rng: random.Random, evil: str) -> None:
        self.rng = rng
        self.evil = evil
        self.mutator = Mutator(rng)
        loaded = TokenizerArena.loaded = TokenizerArena.loaded or make_loaded()
        settings = TokenizerSettings(
            run_dir=tempfile.gettempdir(), gateway_links=["ipc:///a", "ipc:///b"], encode_threads=1
        )
        self.service = TokenizerService(settings, loaded, ChatTemplate(TEMPLATE, {}))
        self.loop: Any = Threads()
        self.service._loop = self.loop
        self.links = [*(link.link for link in self.service._gateways), self.service._scheduler.link]
        self.wires = [FakeWire(link) for link in self.links]
        self.sessions = [b"", b"", b""]
        self.requests: dict[int, tuple[list[int], int, list[int], str]] = {}
        self.running: dict[int, tuple[NewRequest, int]] = {}
        self.evil_ids: list[int] = []
        self.attempts: dict[int, int] = {}
        self.finished = 0
        self.excused = 0
        for i in range(3):
            self._greet(i)

    @property
    def dropped(self) -> int:
        return sum(link.frames_dropped for link in self.links)

    def attack(self) -> None:
        place = 1 if self.evil == "gateway" else 2
        valid = self._valid_of_gateway if self.evil == "gateway" else self._valid_of_scheduler
        session = self.mutator.session(self.sessions[place], [self.sessions[0]])
        self.links[place].on_frame(session, self.mutator.frame(valid(), self._any))

    def work(self, num_plans: int = 2) -> None:
        for place in range(3):
            peer = self.links[place].peer
            if peer is None or self.links[place]._session != self.sessions[place]:
                if place == 0:
                    raise Failure("the good gateway has lost its session")
                self._greet(place)
            elif place == 2 and self.evil == "scheduler" and (peer.model != MODEL or not peer.ready or peer.draining):
                self._from_scheduler(ModelChanged(MODEL))
                self._from_scheduler(Heartbeat(0, 0, True))
        while len(self.requests) < NUM_GOOD:
            self._ask()
        self._pump()
        for request_id in list(self.running):
            self._speak(request_id)
        self._pump()
        if self.rng.random() < 0.05:
            self.service.core.tick()
            self._pump()

    def check(self) -> None:
        core = self.service.core
        for request_id, request in core._requests.items():
            if request.request_id != request_id or not request.choices:
                raise Failure("a request is not what it is kept as")

    def settle(self) -> None:
        self._greet(2)
        for _ in range(300):
            self._pump()
            for request_id in list(self.running):
                self._speak(request_id)
        self._pump()
        if self.requests:
            raise Failure(f"{len(self.requests)} streams stand still")
        if self.service._encoding:
            raise Failure(f"{self.service._encoding} prompts are still being encoded")
        self.check()

    # --- the good ones ----------------------------------------------------------------------------

    def _greet(self, place: int) -> None:
        role = Role.SCHEDULER if place == 2 else Role.GATEWAY
        if place == 2:
            self.running.clear()  # what the one before was told; the new one is told all again
        self.sessions[place] = answer_dial(self.links[place], identity(role, str(place)))

    def _ask(self) -> None:
        rng = self.rng
        request_id, count = rng.getrandbits(64), rng.randint(1, 12)
        ids = [rng.randrange(1, 97) for _ in range(rng.randint(1, 10))]
        text = "".join(chr(31 + i) for i in ids)
        prompt = TextPrompt(text) if rng.random() < 0.5 else TokensPrompt(ids)
        self.requests[request_id] = (continuation(ids, count), count, [], "")
        sampling = SamplingParams(max_tokens=count, ignore_eos=True)
        submit = Submit(request_id, 1, prompt, sampling, TextParams(), [ChoicePast(0)])
        self.links[0].on_frame(self.sessions[0], encode(submit))

    def _pump(self) -> None:
        moved = True
        while moved:
            moved = self.loop.run()
            for place, wire in enumerate(self.wires):
                while wire.sent:
                    moved = True
                    _, session, payload = wire.sent.popleft()
                    if session == self.sessions[place]:
                        self._told(place, decode(payload))

    def _told(self, place: int, message: Message) -> None:
        if place == 2:
            match message:
                case NewRequest():
                    self.running[message.request_id] = (message, 0)
                case Abort() | Release():
                    self.running.pop(message.request_id, None)
                case GetLoads():
                    self._from_scheduler(Loads(message.call_id, *range(1, 10)))
        elif place == 0:
            self._to_client(message)

    def _to_client(self, message: Message) -> None:
        match message:
            case Deltas():
                for item in message.items:
                    known = self.requests.get(item.request_id)
                    if known is None:
                        continue
                    expected, count, ids, text = known
                    if item.start != len(ids):
                        raise Failure(f"token {item.start} follows {len(ids)}")
                    ids += item.token_ids
                    text += item.text
                    self.requests[item.request_id] = (expected, count, ids, text)
                    for entry in item.logprobs or ():
                        check_number(entry.logprob)
                    if self.evil == "gateway" and ids != expected[: len(ids)]:
                        raise Failure(f"{ids} where {expected} was due")
                    if item.finish_reason is not None:
                        if self.evil == "gateway" and (
                            len(ids) != count or text != "".join(chr(31 + i) for i in ids).replace("\x7f", "\x7f")
                        ):
                            raise Failure(f"{ids} {text!r}")
                        self.finished += 1
                        del self.requests[item.request_id]
                        self.links[0].on_frame(self.sessions[0], encode(Release(item.request_id, item.attempt)))
            case Failed():
                if self.requests.pop(message.request_id, None):
                    if self.evil == "gateway":
                        raise Failure(f"a good stream failed: {message}")
                    self.excused += 1

    def _speak(self, request_id: int) -> None:
        """The good scheduler's next token of one request."""
        request, said = self.running[request_id]
        limit = request.sampling.max_tokens or 1
        items = []
        for past in request.choices:
            place = len(past.output_token_ids) + said
            if place < limit:
                known = [*request.prompt_token_ids, *past.output_token_ids]
                token_ids = continuation(known, said + 1)[-1:]
                finish = FinishReason.LENGTH if place == limit - 1 else None
            elif said == 0:
                token_ids, finish = [], FinishReason.LENGTH
            else:
                continue
            item = Output(request_id, request.attempt, past.index, place, token_ids, None, finish)
            if request.sampling.logprobs is not None:
                item.logprobs = [TokenLogprobs(token_id, -0.5, 1, [(token_id, -0.5)]) for token_id in token_ids]
            items.append(item)
        if not items:
            del self.running[request_id]
            return
        self.running[request_id] = (request, said + 1)
        self._from_scheduler(Outputs(items))

    def _from_scheduler(self, message: Message) -> None:
        self.links[2].on_frame(self.sessions[2], encode(message))

    # --- the other one ----------------------------------------------------------------------------

    def _valid_of_gateway(self) -> Message:
        rng = self.rng
        if len(self.evil_ids) < 3 or rng.random() < 0.2:
            self.evil_ids.append(rng.getrandbits(64))
        if len(self.evil_ids) > 8:
            return Abort(self.evil_ids.pop(0), 2**63)
        request_id = rng.choice(self.evil_ids)
        attempt = self.attempts[request_id] = self.attempts.get(request_id, 0) + rng.choice((0, 1, 1))
        prompt = rng.choice(
            (
                TextPrompt("some text"),
                TokensPrompt([1, 2, 3]),
                ChatPrompt([ChatMessage("user", "hi"), ChatMessage("assistant", "ho")], template_kwargs={"a": 1}),
            )
        )
        kind = rng.random()
        if kind < 0.6:
            sampling = SamplingParams(
                max_tokens=rng.choice((1, 5, None)),
                logprobs=rng.choice((None, 1)),
                prompt_logprobs=rng.choice((None, 1)),
                stop_token_ids=rng.choice(([], [5])),
                logit_bias=rng.choice(({}, {1: 1.0})),
            )
            text = TextParams(rng.choice(([], ["ab", "xyz"])), rng.choice((True, False)))
            pasts = [
                ChoicePast(i, [6] * rng.choice((0, 2)), rng.choice((None, 0, 1))) for i in range(rng.choice((1, 2)))
            ]
            return Submit(request_id, attempt, prompt, sampling, text, pasts)
        return rng.choice(
            (
                Attach(request_id, attempt, {0: rng.choice((0, 1))}),
                Abort(request_id, attempt),
                Release(request_id, attempt),
                Encode(1, prompt),
                Decode(1, [5, 6]),
                GetLoads(1),
                Heartbeat(1, 0, True),
            )
        )

    def _valid_of_scheduler(self) -> Message:
        rng = self.rng
        entry = TokenLogprobs(5, -0.5, 1, [(5, -0.5)])
        known = list(self.running.values())
        if not known or rng.random() < 0.2:
            return rng.choice(
                (
                    Heartbeat(1, 1, True),
                    ModelChanged(MODEL),
                    Loads(1, *range(1, 10)),
                    CallFailed(1, ErrorCode.INTERNAL, "no"),
                    Failed(1, 1, ErrorCode.INTERNAL, "no"),
                )
            )
        request, _ = rng.choice(known)
        request_id, attempt = request.request_id, request.attempt
        kind = rng.random()
        if kind < 0.1:
            return PromptLogprobs(request_id, attempt, 0, [None, entry])
        if kind < 0.15:
            return Failed(request_id, attempt, ErrorCode.INTERNAL, "no")
        kept = self.service.core._requests.get(request_id)
        choice = next(iter(kept.choices.values())) if kept is not None else None
        start = len(choice.token_ids) if choice is not None else 0
        item = Output(request_id, attempt, 0, start, [rng.randrange(97)], rng.choice((None, [entry])))
        item.finish_reason = rng.choice((None, None, None, FinishReason.STOP))
        item.stop_reason = rng.choice((None, 5))
        return Outputs([item] * rng.choice((1, 2)))

    def _any(self) -> Message:
        kind = self.rng.random()
        if kind < 0.2:
            return Accepted(1, 1, [1])
        return self._valid_of_gateway() if kind < 0.6 else self._valid_of_scheduler()
