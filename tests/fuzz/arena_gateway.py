"""The gateway's link: a good tokenizer that answers, and one that sends rubbish about its own streams and others'."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable

from fuzz.mutate import Mutator
from fuzz.world import Failure, FakeWire, check_number, continuation, dial_in, identity

from quartet.services.gateway import convert
from quartet.services.gateway.choice import Choice
from quartet.services.gateway.events import Chunk, Completed, StreamError
from quartet.services.gateway.service import Gateway
from quartet.services.gateway.settings import GatewaySettings
from quartet.services.gateway.stream import Stream
from quartet.services.gateway.subscription import Subscription
from quartet.shared.messages import (
    Abort,
    Accepted,
    Attach,
    Attached,
    CallFailed,
    ChoicePast,
    Decoded,
    Delta,
    Deltas,
    Encode,
    Encoded,
    ErrorCode,
    Failed,
    FinishReason,
    Heartbeat,
    Loads,
    Message,
    ModelChanged,
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

GOOD, EVIL, STRANGER = b"good", b"evil", b"stranger"
ENTRY = TokenLogprobs(5, -0.5, 1, [(5, -0.5)], [b"a", b"a"])
WORD = "ab"


class Client:
    """A stream and what it has told; `only_good` as long as it has never been with the other one."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.only_good = True
        self.token_ids: list[int] = []
        self.text = ""


class GatewayArena:
    def __init__(self, rng: random.Random, evil: str = "tokenizer") -> None:
        self.rng = rng
        self.mutator = Mutator(rng)
        self.gateway = Gateway(
            GatewaySettings(run_dir=tempfile.gettempdir(), grpc_address="127.0.0.1:0", http_address="")
        )
        self.table = self.gateway.table
        self.now = 1000.0
        self.table._clock = self.table._searches._clock = lambda: self.now
        self.link = self.gateway.link.link
        self.wire = FakeWire(self.link)
        self.clients: dict[int, Client] = {}
        self.submits: dict[int, tuple[Submit, int]] = {}
        self.evil_submits: dict[int, Submit] = {}
        self.evil_searches: list[Attach] = []
        self.finished = 0
        self.excused = 0
        dial_in(self.link, GOOD, GOOD * 2, identity(Role.TOKENIZER, "t", fingerprint="x"))
        self._dial_evil()

    @property
    def dropped(self) -> int:
        return self.link.frames_dropped

    def attack(self) -> None:
        session, route = self.mutator.session(EVIL * 2, [GOOD * 2]), EVIL
        if self.rng.random() < 0.1:
            route = STRANGER
        self.link.on_frame(route, session, self.mutator.frame(self._valid(), self._valid))
        self._route()

    def work(self, num_plans: int = 2) -> None:
        peer = self.link.peers.get(EVIL)
        if peer is None or peer.session != EVIL * 2 or not peer.ready or peer.draining:
            self._dial_evil()
        while len(self.clients) < 8:
            self._ask()
        if self.rng.random() < 0.05:
            self._attach()
        self._route()
        for request_id in list(self.submits):
            self._speak(request_id)
        self._route()
        for client in list(self.clients.values()):
            self._pull(client)
        if self.rng.random() < 0.2:
            self.now += 0.2
            self.table.tick()

    def check(self) -> None:
        if GOOD not in self.link.peers:
            raise Failure("the good tokenizer has lost its session")
        for peer, tokenizer in self.table.tokenizers.items():
            if self.link.peers.get(peer.route) is not peer:  # type: ignore[attr-defined]
                raise Failure("a tokenizer that is gone is still used")
            for request_id, stream in tokenizer.streams.items():
                if stream.tokenizer is not tokenizer or self.table._open.get(request_id) is not stream:
                    raise Failure("a stream is with a tokenizer that does not have it")

    def settle(self) -> None:
        self.wire.gone.add(EVIL)
        if EVIL in self.link.peers:
            self.link._down(self.link.peers[EVIL], "the attack is over")
        for client in self.clients.values():
            # What it said of its own streams was its to say; they go on at the good one with that past.
            client.only_good = client.only_good and client.subscription.stream is not None
        for _ in range(200):
            self.now += 0.1
            self.table.tick()
            self._route()
            for request_id in list(self.submits):
                self._speak(request_id)
            for client in list(self.clients.values()):
                self._pull(client)
        if self.clients:
            raise Failure(f"{len(self.clients)} streams stand still")
        self.check()
        if self.table.num_open_streams:
            raise Failure(f"{self.table.num_open_streams} streams are left over")

    # --- clients ----------------------------------------------------------------------------------

    def _ask(self) -> None:
        want_logprobs = self.rng.random() < 0.3
        sampling = SamplingParams(
            max_tokens=self.rng.randint(1, 10),
            logprobs=1 if want_logprobs else None,
            prompt_logprobs=1 if want_logprobs else None,
        )

        def make(request_id: int) -> Stream:
            return Stream(request_id, TextPrompt("hi"), sampling, TextParams(), [Choice(0)])

        subscription = self.table.open(make, lambda: None)
        assert subscription.stream is not None
        self.clients[subscription.stream.request_id] = Client(subscription)

    def _attach(self) -> None:
        """A search that nobody but the other one may answer."""
        subscription = self.table.attach(self.rng.getrandbits(64), {}, 0, None, lambda: None)
        self.clients[-self.rng.getrandbits(62) - 1] = client = Client(subscription)
        client.only_good = False
        done: Callable[[object], None] = lambda answer: None  # noqa: E731
        self.table.calls.start(lambda call_id: Encode(call_id, TextPrompt("x")), done)

    def _pull(self, client: Client) -> None:
        try:
            for event in client.subscription.pull():
                convert.response_from(event).SerializeToString()
                if isinstance(event, Chunk):
                    if event.start != len(client.token_ids):
                        raise Failure(f"token {event.start} follows {len(client.token_ids)}")
                    client.token_ids += event.token_ids
                    client.text += event.text
                    for entry in event.logprobs or ():
                        check_number(entry.logprob)
                        for _, logprob in entry.top:
                            check_number(logprob)
                elif isinstance(event, Completed):
                    self._ended(client)
        except StreamError as error:
            if client.only_good:
                raise Failure(f"a good stream failed: {error.message}") from error
            self.excused += 1
            self._remove(client)

    def _ended(self, client: Client) -> None:
        if client.only_good:
            self.finished += 1
            expected = continuation([1], len(client.token_ids))
            if client.token_ids != expected or client.text != WORD * len(expected):
                raise Failure(f"{client.token_ids} {client.text!r} where {expected} was due")
        self._remove(client)

    def _remove(self, client: Client) -> None:
        client.subscription.close()
        self.clients = {request_id: other for request_id, other in self.clients.items() if other is not client}

    # --- tokenizers -------------------------------------------------------------------------------

    def _dial_evil(self) -> None:
        dial_in(self.link, EVIL, EVIL * 2, identity(Role.TOKENIZER, "evil", fingerprint="x"))

    def _route(self) -> None:
        """What the gateway has sent reaches whom it was sent to."""
        while self.wire.sent:
            route, session, payload = self.wire.sent.popleft()
            message = decode(payload)
            if session != route * 2:
                continue
            if route == EVIL:
                self._to_evil(message)
            elif route == GOOD:
                self._to_good(message)

    def _to_evil(self, message: Message) -> None:
        match message:
            case Submit():
                self.evil_submits[message.request_id] = message
                self.clients[message.request_id].only_good = False
            case Attach():
                self.evil_searches.append(message)
            case Abort() | Release():
                self.evil_submits.pop(message.request_id, None)

    def _to_good(self, message: Message) -> None:
        match message:
            case Submit():
                ids = message.prompt.token_ids if isinstance(message.prompt, TokensPrompt) else [1]
                self.submits[message.request_id] = (message, -1)
                self._say(Accepted(message.request_id, message.attempt, ids))
                if message.sampling.prompt_logprobs is not None and message.prompt_logprobs_start == 0:
                    self._say(PromptLogprobs(message.request_id, message.attempt, 0, [None]))
            case Attach():
                self._say(Failed(message.request_id, message.attempt, ErrorCode.NOT_FOUND, "not known"))
            case Abort() | Release():
                self.submits.pop(message.request_id, None)
            case Encode():
                self._say(Encoded(message.call_id, [1], [b"a"]))

    def _say(self, message: Message) -> None:
        self.link.on_frame(GOOD, GOOD * 2, encode(message))

    def _speak(self, request_id: int) -> None:
        """One more token of a stream."""
        submit, place = self.submits[request_id]
        past = submit.choices[0]
        if place < 0:
            place = len(past.output_token_ids)
        total = submit.sampling.max_tokens or 1
        end = place >= total - 1
        text_bytes = (past.sent_bytes or 0) + len(WORD) * (place + 1 - len(past.output_token_ids))
        token_ids = [] if place >= total else continuation([1], place + 1)[-1:]
        text = WORD if token_ids else ""
        item = Delta(
            submit.request_id,
            submit.attempt,
            past.index,
            place,
            token_ids,
            text,
            text_bytes if text else past.sent_bytes or 0,
        )
        if submit.sampling.logprobs is not None:
            item.logprobs = [ENTRY] * len(token_ids)
        if end:
            item.finish_reason = FinishReason.LENGTH
        self.submits[request_id] = (submit, place + 1)
        if end:
            del self.submits[request_id]
        self._say(Deltas([item]))

    # --- the other one ----------------------------------------------------------------------------

    def _valid(self) -> Message:
        rng = self.rng
        kind = rng.random()
        if self.evil_searches and kind < 0.1:
            search = self.evil_searches.pop()
            past = ChoicePast(0, [1, 2], 2)
            submit = Submit(
                search.request_id, search.attempt, TokensPrompt([1]), SamplingParams(), TextParams(), [past]
            )
            return Attached(search.request_id, search.attempt, submit)
        if not self.evil_submits or kind < 0.2:
            return rng.choice(
                (
                    Loads(1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
                    Encoded(rng.randint(1, 9), [1], [b"a"]),
                    Decoded(1, "x"),
                    CallFailed(rng.randint(1, 9), ErrorCode.INTERNAL, "no"),
                    Heartbeat(1, 1, True),
                    ModelChanged(None),
                    Failed(1, 1, ErrorCode.INTERNAL, "no"),
                )
            )
        submit = rng.choice(list(self.evil_submits.values()))
        request_id, attempt, past = submit.request_id, submit.attempt, submit.choices[0]
        if kind < 0.3:
            return Accepted(request_id, attempt, [1])
        if kind < 0.35:
            return PromptLogprobs(request_id, attempt, 0, [None, ENTRY])
        if kind < 0.4:
            return Failed(request_id, attempt, rng.choice((ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL)), "no", "n", 5)
        stream = self.table._open.get(request_id)
        choice = stream.choices.get(past.index) if stream is not None else None
        place = choice.num_output_tokens if choice is not None else 0
        text_bytes = (choice.base_bytes or 0) + len(choice.text) if choice is not None else 0
        item = Delta(request_id, attempt, past.index, place, [rng.randrange(97)], "é", text_bytes + 2)
        item.logprobs = rng.choice((None, [ENTRY]))
        item.finish_reason = rng.choice((None, None, None, FinishReason.LENGTH, FinishReason.STOP))
        item.stop_reason = rng.choice((None, 5, "stop"))
        return Deltas([item] * rng.choice((1, 1, 2)))
