"""Whatever tokenizers and clients do, a client reads exactly the text that there is."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway_fakes import Bench, delta

from quartet.services.gateway.choice import Position
from quartet.services.gateway.events import Chunk, Completed
from quartet.shared.messages import Deltas, FinishReason, Release, Submit

# Texts of tokens as a detokenizer lets them out: some are held back, some have several bytes.
PIECES = ["a", "", "é", "bc", "", "", "def", "龜", "g", ""]
FLUSH = "h"
TEXT = "".join(PIECES) + FLUSH


class Simulated:
    """A tokenizer that works on one choice of one request."""

    def __init__(self, bench, submit, peer):
        self.bench, self.submit, self.peer = bench, submit, peer
        past = submit.choices[0]
        self.at = len(past.output_token_ids)
        assert past.output_token_ids == list(range(self.at))
        assert past.sent_bytes == len("".join(PIECES[: self.at]).encode())

    def delta(self, start, end):
        text = "".join(PIECES[start:end])
        finish = None
        if end == len(PIECES):
            text, finish = text + FLUSH, FinishReason.LENGTH
        total = len("".join(PIECES[:end]).encode()) + (len(FLUSH) if finish else 0)
        return delta(self.submit, start, range(start, end), text, total, finish=finish)

    def say(self, message):
        self.bench.table.on_message(self.peer, Deltas([message]))


class Client:
    def __init__(self, subscription):
        self.subscription = subscription
        self.text = ""
        self.next_index = 0
        self.finished = self.completed = False

    def read(self):
        for event in self.subscription.pull():
            if isinstance(event, Chunk):
                assert event.start == self.next_index and not self.finished
                assert list(event.token_ids) == list(range(event.start, event.start + len(event.token_ids)))
                self.next_index += len(event.token_ids)
                self.text += event.text
                self.finished = event.finish_reason is not None
            elif isinstance(event, Completed):
                assert self.finished and event.completion_tokens == len(PIECES)
                self.completed = True
        assert TEXT.startswith(self.text)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(1, 4)),
        st.tuples(st.just("repeat"), st.integers(1, 4)),
        st.tuples(st.just("skip"), st.integers(1, 3)),
        st.tuples(st.just("die"), st.just(0)),
        st.tuples(st.just("read"), st.just(0)),
        st.tuples(st.just("attach"), st.booleans()),
        st.tuples(st.just("wait"), st.integers(1, 20)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_a_client_reads_exactly_what_there_is(steps):
    bench = Bench(recovery_deadline=1e9, attach_grace=1e9)
    peer = bench.peer()
    client = Client(bench.open(detach_grace=1e9))
    submit = bench.accept(peer)
    tokenizer = Simulated(bench, submit, peer)
    gaps = 0

    def follow():
        nonlocal tokenizer
        submit = peer.last(Submit)
        if submit is not tokenizer.submit:
            assert submit.attempt > tokenizer.submit.attempt
            tokenizer = Simulated(bench, submit, peer)

    for kind, amount in [*steps, *[("say", 4), ("read", 0)] * 4]:
        ended = tokenizer.at >= len(PIECES)
        if kind == "say" and not ended:
            end = min(len(PIECES), tokenizer.at + amount)
            tokenizer.say(tokenizer.delta(tokenizer.at, end))
            tokenizer.at = end
            gaps = 0
        elif kind == "repeat":
            tokenizer.say(tokenizer.delta(max(0, tokenizer.at - amount), tokenizer.at))
        elif kind == "skip" and tokenizer.at + amount < len(PIECES) and gaps < 3:
            tokenizer.say(tokenizer.delta(tokenizer.at + amount, len(PIECES)))
            gaps += 1
            follow()
        elif kind == "die" and not ended:
            bench.down(peer)
            peer = bench.peer()
            follow()
        elif kind == "read":
            client.read()
        elif kind == "attach":
            if amount:
                client.subscription.close()
            position = Position(client.next_index, client.finished)
            client.subscription = bench.attach(submit.request_id, {0: position})
        elif kind == "wait":
            bench.later(amount)
    assert client.text == TEXT and client.completed
    assert peer.all(Release) and bench.table.num_open_streams == 0
