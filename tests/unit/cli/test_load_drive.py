"""How requests are sent: a server stands in that answers when the test says so."""

import asyncio
import itertools
import math
import statistics
import time

import pytest
from support.gateway_fakes import in_loop, until

from quartet.services.cli.bench.drive import GIVE_UP_AFTER, Arrivals, Run, drive
from quartet.services.cli.bench.mixes import Conversation, Turn
from quartet.services.cli.bench.record import Record


class Server:
    """Answers at once, or when `release` is called, in the order of the requests."""

    def __init__(self, held=False, error=""):
        self.prompts = []
        self.waiting = []
        self.held = held
        self.error = error
        self.most = self.running = 0

    async def send(self, prompt, output_tokens, keep_answer):
        self.prompts.append(prompt)
        self.running += 1
        self.most = max(self.most, self.running)
        record = Record(time.perf_counter())
        try:
            if self.held:
                self.waiting.append(asyncio.get_running_loop().create_future())
                await self.waiting[-1]
        finally:
            self.running -= 1
        now = record.ended = time.perf_counter()
        record.times, record.output_tokens, record.error = [now], output_tokens, self.error
        record.answer_ids = [0] * output_tokens if keep_answer else []
        return record

    def release(self):
        self.waiting.pop(0).set_result(None)


def singles(number):
    return (Conversation([], [Turn([i + 1], 2)], "ids") for i in range(number))


@in_loop
async def test_a_closed_loop_keeps_its_places_full():
    server, run = Server(held=True), Run()
    driving = asyncio.ensure_future(drive(singles(7), server.send, Arrivals(concurrency=3), run=run))
    for done in range(7):
        await until(lambda done=done: len(server.waiting) == run.running == min(3, 7 - done))
        server.release()
    await driving
    assert server.most == 3 and server.prompts == [[i + 1] for i in range(7)]
    assert len(run.records) == 7 and run.running == run.cancelled == 0
    assert run.client()["cpu_us_per_token"] > 0


@in_loop
async def test_all_at_once():
    server = Server(held=True)
    driving = asyncio.ensure_future(drive(singles(50), server.send))
    await until(lambda: len(server.waiting) == 50)
    while server.waiting:
        server.release()
    assert len((await driving).records) == 50


@in_loop
async def test_arrivals_are_poisson_and_the_seeds():
    class Times(Server):
        async def send(self, *arguments):
            times.append(time.perf_counter())
            return await super().send(*arguments)

    times = []
    arrivals = Arrivals(rate=400.0, seed="s")
    due = list(itertools.islice(arrivals.times(), 200))
    assert due != list(itertools.islice(Arrivals(rate=400.0, seed="t").times(), 200))
    gaps = [after - before for before, after in itertools.pairwise(itertools.islice(arrivals.times(), 20_000))]
    # A Poisson process has exponential gaps: their mean and deviation are alike.
    assert statistics.fmean(gaps) == pytest.approx(1 / 400, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 400, rel=0.05)
    started = time.perf_counter()
    run = await drive(singles(200), Times().send, arrivals)
    late = [at - started - expected for at, expected in zip(times, due, strict=True)]
    assert min(late) > -1e-3, "none is early"
    assert sorted(record.due - started for record in run.records) == pytest.approx(due, abs=0.05)
    # A machine that stood still meanwhile is told, and the rest are not sent later for it.
    assert statistics.median(late) < run.max_lag + 0.05
    assert 0 <= run.max_lag <= max(late) + 0.05


@in_loop
async def test_nothing_is_sent_after_the_duration():
    server = Server()
    run = await drive(singles(10**5), server.send, Arrivals(rate=100.0, duration=0.2))
    assert len(run.records) < 100
    server = Server(held=True)
    driving = asyncio.ensure_future(drive(singles(5), server.send, Arrivals(concurrency=2, duration=0.5)))
    await until(lambda: len(server.waiting) == 2)
    await asyncio.sleep(0.51)
    server.release()
    server.release()
    assert len((await driving).records) == 2, "those that had begun are waited for, no other one begins"


@in_loop
async def test_a_turn_has_all_before_it():
    turns = [Turn([1, 2], 3), Turn([4], 2, 0.01), Turn([5], 1)]
    server = Server()
    run = await drive([Conversation([9], turns, "ids")], server.send)
    assert server.prompts == [[9, 1, 2], [9, 1, 2, 0, 0, 0, 4], [9, 1, 2, 0, 0, 0, 4, 0, 0, 5]]
    assert [r.answer_ids for r in run.records] == [[], [], []], "answers are not kept when their use is over"


@in_loop
async def test_a_conversation_ends_with_an_error():
    server = Server(error="HTTP 400")
    run = await drive([Conversation([], [Turn([1], 1), Turn([2], 1)], "ids")], server.send)
    assert len(run.records) == 1


@in_loop
async def test_stop_cancels_what_runs_and_keeps_the_rest():
    server, stop = Server(held=True), asyncio.Event()
    driving = asyncio.ensure_future(drive(singles(9), server.send, Arrivals(concurrency=4), stop))
    await until(lambda: len(server.waiting) == 4)
    server.release()
    await until(lambda: len(server.prompts) == 5)
    stop.set()
    run = await driving
    assert len(run.records) == 1 and run.cancelled == 4 and server.running == 0


@in_loop
async def test_a_server_that_is_gone_is_given_up():
    server = Server(error="connection refused")
    run = await drive(singles(10**6), server.send, Arrivals(concurrency=2))
    assert run.gave_up and GIVE_UP_AFTER <= len(run.records) <= GIVE_UP_AFTER + 2
    server = Server(error="HTTP 429")
    run = await drive(singles(3 * GIVE_UP_AFTER), server.send, Arrivals(concurrency=2))
    assert not run.gave_up and len(run.records) == 3 * GIVE_UP_AFTER, "who refuses is there"


@in_loop
async def test_a_bug_of_the_sender_is_not_swallowed():
    async def send(*_):
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        await drive(singles(1), send)
    assert caught.group_contains(ZeroDivisionError)
    assert math.isinf(Arrivals().rate)
