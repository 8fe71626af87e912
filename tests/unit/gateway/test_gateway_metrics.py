"""Every request that the gateway is asked for is counted once, and once more when it ends."""

import contextlib
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway_fakes import Bench, accepted, delta
from support.metrics import collect, total, value

from quartet.services.gateway.events import StreamError
from quartet.services.gateway.metrics import OUTCOMES, tell
from quartet.shared.messages import Attached, ChoicePast, ErrorCode, Failed, FinishReason, Submit, TokensPrompt
from quartet.shared.sampling_params import SamplingParams, TextParams


def told(bench):
    return collect(functools.partial(tell, bench.table))


def check_sum(bench):
    samples = told(bench)
    ended = {outcome: value(samples, "requests_ended_total", outcome=outcome) for outcome in OUTCOMES}
    received = value(samples, "requests_received_total")
    assert received == sum(ended.values()) + value(samples, "requests_in_progress"), (received, ended)
    return ended


@pytest.fixture
def bench():
    return Bench(max_concurrent_requests=4)


def finish(bench, peer, submit, num_tokens=3, reason=FinishReason.STOP):
    bench.say(peer, delta(submit, 0, [10], "a", 1))
    bench.now += 1.0
    bench.say(peer, delta(submit, 1, range(11, 10 + num_tokens), "b", 2, finish=reason))


def test_a_request_that_finishes(bench):
    peer = bench.peer()
    bench.open(sampling=SamplingParams(seed=1, max_tokens=7))
    submit = bench.accept(peer)
    bench.now += 0.2
    finish(bench, peer, submit)
    assert check_sum(bench) == {"finished": 1, "aborted": 0, "failed": 0, "rejected": 0}
    samples = told(bench)
    assert value(samples, "request_success_total", finished_reason="stop") == 1
    assert value(samples, "time_to_first_token_seconds_sum") == pytest.approx(0.2)
    assert value(samples, "e2e_request_latency_seconds_sum") == pytest.approx(1.2)
    assert value(samples, "request_time_per_output_token_seconds_sum") == pytest.approx(0.5)
    assert value(samples, "request_prompt_tokens_sum") == 3
    assert value(samples, "request_generation_tokens_sum") == 3
    assert value(samples, "request_params_max_tokens_sum") == 7
    assert value(samples, "request_params_n_count") == 1
    assert value(samples, "request_resubmits_total") == 0


def test_who_leaves_aborts(bench):
    bench.peer()
    bench.open().close()
    other = bench.open()
    bench.table.abort(other.stream.request_id)
    ended = check_sum(bench)
    assert ended["aborted"] == 2
    assert value(told(bench), "request_success_total", finished_reason="abort") == 2


@pytest.mark.parametrize(
    ("code", "begun", "outcome"),
    [
        (ErrorCode.INVALID_ARGUMENT, False, "rejected"),
        (ErrorCode.RESOURCE_EXHAUSTED, False, "rejected"),
        (ErrorCode.RESOURCE_EXHAUSTED, True, "failed"),
        (ErrorCode.INTERNAL, False, "failed"),
        (ErrorCode.INTERNAL, True, "failed"),
    ],
)
def test_errors_reject_before_the_first_token_and_fail_after_it(bench, code, begun, outcome):
    peer = bench.peer()
    bench.open()
    submit = bench.accept(peer)
    if begun:
        bench.say(peer, delta(submit, 0, [10], "a", 1))
    bench.table.on_message(peer, Failed(submit.request_id, submit.attempt, code, "no"))
    assert check_sum(bench)[outcome] == 1


@pytest.mark.parametrize(("code", "reason"), [(ErrorCode.INTERNAL, "error"), (ErrorCode.CANCELLED, "abort")])
def test_choices_that_had_finished_count_where_the_others_fail(bench, code, reason):
    peer = bench.peer()
    bench.open(n=3)
    submit = bench.accept(peer)
    bench.say(peer, delta(submit, 0, [10], "a", 1, finish=FinishReason.STOP))
    bench.say(peer, delta(submit, 0, [10], "a", 1, index=1, finish=FinishReason.LENGTH))
    bench.table.on_message(peer, Failed(submit.request_id, submit.attempt, code, "no"))
    check_sum(bench)
    samples = told(bench)
    for name in ("stop", "length", reason):
        assert value(samples, "request_success_total", finished_reason=name) == 1


def test_what_is_not_let_in_is_rejected(bench):
    bench.peer()
    for _ in range(4):
        bench.open()
    with pytest.raises(StreamError):
        bench.open()
    with pytest.raises(StreamError):
        bench.table.admit(3)
    assert check_sum(bench)["rejected"] == 4


def test_a_resubmit_is_no_further_request(bench):
    peer, other = bench.peer("t1"), bench.peer("t2")
    bench.open()
    first = next(p for p in (peer, other) if p.all(Submit))
    submit = bench.accept(first)
    bench.say(first, delta(submit, 0, [10], "a", 1))
    bench.down(first)
    second = other if first is peer else peer
    submit = bench.accept(second)
    bench.say(second, delta(submit, 1, [11], "b", 2, finish=FinishReason.LENGTH))
    assert check_sum(bench)["finished"] == 1
    samples = told(bench)
    assert value(samples, "request_resubmits_total") == 1
    assert value(samples, "time_to_first_token_seconds_count") == 1


def test_a_request_of_an_earlier_gateway_counts_here_and_has_no_latencies(bench):
    peer = bench.peer()
    bench.attach(77, {})
    attach = peer.sent[-1]
    past = [ChoicePast(0, [], 0, 0)]
    submit = Submit(77, attach.attempt, TokensPrompt([1, 2]), SamplingParams(seed=1), TextParams(), past)
    bench.table.on_message(peer, Attached(77, attach.attempt, submit))
    finish(bench, peer, submit)
    assert check_sum(bench)["finished"] == 1
    samples = told(bench)
    assert value(samples, "requests_attached_total") == 1
    assert total(samples, "e2e_request_latency_seconds_count") == 0
    assert total(samples, "time_to_first_token_seconds_count") == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=60))
def test_it_adds_up_whatever_happens(moves):
    bench = Bench(max_concurrent_requests=5, recovery_deadline=3.0)
    peers = [bench.peer("t1")]
    subscriptions = []
    for move, pick in moves:
        live = [p for p in peers if p.alive]
        streams = [s.stream for s in subscriptions if s.stream is not None and not s.stream.over]
        if move == 0:
            with contextlib.suppress(StreamError):
                subscriptions.append(bench.open(n=1 + pick % 2))
        elif move == 1 and subscriptions:
            subscriptions[pick % len(subscriptions)].close()
        elif move == 2 and streams:
            bench.table.abort(streams[pick % len(streams)].request_id)
        elif move == 3 and live:
            bench.down(live[pick % len(live)])
        elif move == 4:
            peers.append(bench.peer(f"t{len(peers) + 1}"))
        elif move == 5:
            bench.later(float(pick))
        elif streams:
            stream = streams[pick % len(streams)]
            peer = next((p for p in live if stream.tokenizer is not None and stream.tokenizer.peer is p), None)
            if peer is not None and move == 6:
                submit = next(s for s in reversed(peer.all(Submit)) if s.request_id == stream.request_id)
                if not stream.accepted:
                    bench.table.on_message(peer, accepted(submit))
                for choice in list(stream.choices.values()):
                    if not choice.finished:
                        done = delta(
                            submit,
                            choice.num_output_tokens,
                            [10],
                            "",
                            0,
                            index=choice.index,
                            finish=FinishReason.LENGTH,
                        )
                        bench.say(peer, done)
            elif peer is not None:
                code = (ErrorCode.INTERNAL, ErrorCode.INVALID_ARGUMENT, ErrorCode.UNAVAILABLE)[pick % 3]
                bench.table.on_message(peer, Failed(stream.request_id, stream.attempt, code, "no"))
        check_sum(bench)
