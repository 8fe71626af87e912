"""A fake tokenizer's end of the link, and a stream table under a clock that tests move."""

import asyncio
import contextlib
import functools

import msgspec

from quartet.services.gateway.choice import Choice
from quartet.services.gateway.grpc_face import GrpcFace
from quartet.services.gateway.settings import GatewaySettings
from quartet.services.gateway.stream import Stream
from quartet.services.gateway.stream_table import StreamTable, TableLimits
from quartet.shared.messages import (
    Abort,
    Accepted,
    Attach,
    Attached,
    ChoicePast,
    Decode,
    Decoded,
    Delta,
    Deltas,
    Encode,
    Encoded,
    ErrorCode,
    Failed,
    FinishReason,
    GetLoads,
    Loads,
    ModelInfo,
    Release,
    Submit,
    TextPrompt,
    TokensPrompt,
)
from quartet.shared.sampling_params import SamplingParams, TextParams

MODEL = ModelInfo("tiny", "fp", 1000, 512, 64, 16, 8, 256, "float32", "cpu")


class FakePeer:
    """Records what the gateway sends; `deltas` and the like are what the tokenizer would say."""

    def __init__(self, name="t1", ready=True, model=MODEL):
        self.name = name
        self.incarnation = hash(name) & 0xFFFFFFFF
        self.version = "1"
        self.model = model
        self.tokenizer_fingerprint = "tok"
        self.alive = True
        self.ready = ready
        self.draining = False
        self.stalled = False
        self.sent = []

    def send(self, message):
        if self.alive:
            self.sent.append(message)
        return self.alive

    def all(self, kind):
        return [message for message in self.sent if isinstance(message, kind)]

    def last(self, kind=Submit):
        return self.all(kind)[-1]


def accepted(submit, ids=(1, 2, 3)):
    return Accepted(submit.request_id, submit.attempt, list(ids))


def delta(submit, start, token_ids, text, total, *, index=0, finish=None, **fields):
    return Delta(
        submit.request_id, submit.attempt, index, start, list(token_ids), text, total, finish_reason=finish, **fields
    )


class Bench:
    """The table with its clock, and shorthands for what faces and links do."""

    def __init__(self, **limits):
        self.now = 1000.0
        self.wall = 5000.0
        self.table = StreamTable(TableLimits(**limits), lambda: self.now, lambda: self.wall)
        self.wakes = 0

    def wake(self):
        self.wakes += 1

    def peer(self, name="t1", **options):
        peer = FakePeer(name, **options)
        self.table.on_up(peer)
        return peer

    def down(self, peer):
        peer.alive = False
        self.table.on_down(peer, "gone")

    def open(self, prompt=None, n=1, choices=None, sampling=None, **options):
        return self.table.open(
            lambda request_id: Stream(
                request_id,
                prompt or TextPrompt("hi"),
                sampling or SamplingParams(seed=7),
                TextParams(),
                choices or [Choice(index) for index in range(n)],
                **options,
            ),
            self.wake,
        )

    def attach(self, request_id, positions=None, start=0, grace=None):
        return self.table.attach(request_id, positions or {}, start, grace, self.wake)

    def say(self, peer, *deltas):
        self.table.on_message(peer, Deltas(list(deltas)))

    def accept(self, peer, ids=(1, 2, 3)):
        submit = peer.last(Submit)
        self.table.on_message(peer, accepted(submit, ids))
        return submit

    def later(self, seconds):
        self.now += seconds
        self.wall += seconds
        self.table.tick()


class AnsweringPeer(FakePeer):
    """A tokenizer that accepts each submit and says `words`, one token a word, as long as it is not `silent`.

    What it says is queued in the event loop, as a link's messages are.
    """

    prompt_ids = (5, 6, 7)

    def __init__(self, table, words=("a", "b", "c"), **options):
        super().__init__(**options)
        self.table = table
        self.words = list(words)
        self.silent = False
        self.remembered = {}
        self.accepting = True

    def send(self, message):
        if super().send(message):
            asyncio.get_running_loop().call_soon(self._answer, message)
        return self.alive

    def _answer(self, message):
        if not self.alive:
            return
        match message:
            case Submit() if self.accepting:
                ids = message.prompt.token_ids if isinstance(message.prompt, TokensPrompt) else list(self.prompt_ids)
                self._say(Accepted(message.request_id, message.attempt, ids))
                self.remembered[message.request_id] = msgspec.structs.replace(message, prompt=TokensPrompt(ids))
                if not self.silent:
                    self.speak(message)
            case Attach():
                submit = self.remembered.get(message.request_id)
                if submit is None:
                    self._say(Failed(message.request_id, message.attempt, ErrorCode.NOT_FOUND, "not known"))
                    return
                submit = msgspec.structs.replace(
                    submit,
                    attempt=message.attempt,
                    choices=[self._past(choice.index, message.next_index) for choice in submit.choices],
                )
                self._say(Attached(message.request_id, message.attempt, submit))
                self.speak(submit)
            case Encode():
                self._say(Encoded(message.call_id, [1, 2], [b"a", b"\xc3"]))
            case Decode():
                self._say(Decoded(message.call_id, " ".join(map(str, message.token_ids))))
            case GetLoads():
                self._say(Loads(message.call_id, *range(1, 9), 256))
            case Abort() | Release():
                self.remembered.pop(message.request_id, None)

    def speak(self, submit, upto=None):
        """Says the words of each choice from its past on, up to word `upto`."""
        for choice in submit.choices:
            start = len(choice.output_token_ids)
            total = sum(len(word.encode()) for word in self.words[:start])
            for i in range(start, len(self.words) if upto is None else upto):
                total += len(self.words[i].encode())
                finish = FinishReason.LENGTH if i == len(self.words) - 1 else None
                item = delta(submit, i, [100 + i], self.words[i], total, index=choice.index, finish=finish)
                self._say(Deltas([item]))

    def _past(self, index, next_index):
        count = next_index.get(index, 0)
        return ChoicePast(index, [100 + i for i in range(count)], len("".join(self.words[:count]).encode()))

    def _say(self, message):
        self.table.on_message(self, message)


@contextlib.asynccontextmanager
async def gateway(address="127.0.0.1:0", words=("a", "b", "c"), table=None, **settings):
    """A gRPC face in this loop with one answering tokenizer: yields (address, table, peer)."""
    table = table or StreamTable(TableLimits(max_unread_bytes=settings.get("max_unread_bytes", 2**20)))
    face = GrpcFace(table, GatewaySettings(grpc_address=address, **settings), "1.2.3")
    await face.bind()
    peer = AnsweringPeer(table, words)
    table.on_up(peer)
    table.face = face
    await face.start()
    try:
        yield f"127.0.0.1:{face.port}" if not address.startswith("unix:") else address, table, peer
    finally:
        await face.stop(0)


def in_loop(test):
    """Runs an async test in a loop of its own."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


async def until(condition, seconds=5.0):
    """Gives the loop time until the condition holds; fails when it does not."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
