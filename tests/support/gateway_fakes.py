"""A fake tokenizer's end of the link, and a stream table under a clock that tests move."""

from quartet.services.gateway.stream import Choice, Stream
from quartet.services.gateway.stream_table import StreamTable, TableLimits
from quartet.shared.messages import (
    Accepted,
    Delta,
    Deltas,
    FinishReason,
    ModelInfo,
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


class ScriptedPeer(FakePeer):
    """A tokenizer that answers: every submit is accepted and gets `script` one delta after another."""

    def __init__(self, table, **options):
        super().__init__(**options)
        self.table = table
        self.silent = False
        self.prompt_ids = [5, 6, 7]

    def play(self, submit, words, *, finish=FinishReason.LENGTH, index=0, cached=0):
        """Says one token a word from the choice's past on; the last word finishes the choice."""
        past = next(choice for choice in submit.choices if choice.index == index)
        start = len(past.output_token_ids)
        total = sum(len(word.encode()) for word in words[:start])
        items = []
        for i, word in enumerate(words[start:], start):
            total += len(word.encode())
            last = i == len(words) - 1
            items.append(delta(submit, i, [100 + i], word, total, index=index, finish=finish if last else None))
            items[-1].num_cached_tokens = cached
        self.table.on_message(self, Deltas(items))

    def accept(self, submit):
        ids = submit.prompt.token_ids if isinstance(submit.prompt, TokensPrompt) else self.prompt_ids
        self.table.on_message(self, Accepted(submit.request_id, submit.attempt, ids))
