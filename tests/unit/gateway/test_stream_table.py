"""The gateway's ledger, under a clock that the test moves: nothing lost, nothing twice, nothing forever."""

import pytest
from support.gateway_fakes import MODEL, Bench, accepted, delta

from quartet.services.gateway.choice import Choice, Position
from quartet.services.gateway.events import Chunk, Completed, PromptChunk, Started, StreamError
from quartet.shared import messages as m
from quartet.shared.messages import Abort, ErrorCode, FinishReason, Release, Submit, TextPrompt, TokensPrompt
from quartet.shared.sampling_params import SamplingParams


def text_of(events, index=0):
    return "".join(e.text for e in events if isinstance(e, Chunk) and e.choice_index == index)


def ids_of(events, index=0):
    return [i for e in events if isinstance(e, Chunk) and e.choice_index == index for i in e.token_ids]


@pytest.fixture
def bench():
    return Bench()


def test_a_stream_from_start_to_completion(bench):
    peer = bench.peer()
    subscription = bench.open()
    submit = bench.accept(peer)
    assert submit.prompt == TextPrompt("hi") and submit.choices == [m.ChoicePast(0, [], 0, 0)]
    bench.say(peer, delta(submit, 0, [10], "a", 1, num_cached_tokens=16))
    first = subscription.pull()
    assert first[0] == Started(submit.request_id, [1, 2, 3], 7)
    assert text_of(first) == "a" and not peer.all(Release)
    assert subscription.pull() == []
    bench.say(peer, delta(submit, 1, [11, 12], "bc", 3, finish=FinishReason.STOP, stop_reason="c"))
    last = subscription.pull()
    assert (last[0].finish_reason, last[0].stop_reason, last[0].start) == (FinishReason.STOP, "c", 1)
    assert last[1] == Completed(3, 3, 16) and subscription.done
    assert peer.all(Release) == [Release(submit.request_id, submit.attempt)]


def test_nothing_is_told_before_the_request_was_accepted(bench):
    bench.peer()
    assert bench.open().pull() == []


def test_a_slow_client_gets_several_deltas_as_one_chunk(bench):
    peer = bench.peer()
    subscription = bench.open()
    submit = bench.accept(peer)
    bench.say(peer, *[delta(submit, i, [10 + i], "x", i + 1) for i in range(50)])
    _, chunk = subscription.pull()
    assert list(chunk.token_ids) == list(range(10, 60)) and chunk.text == "x" * 50


def test_release_waits_for_every_choice(bench):
    peer = bench.peer()
    subscription = bench.open(n=2)
    submit = bench.accept(peer)
    bench.say(peer, delta(submit, 0, [10], "a", 1, index=1, finish=FinishReason.LENGTH))
    assert not peer.all(Release) and not subscription.done
    bench.say(peer, delta(submit, 0, [11], "b", 1, index=0, finish=FinishReason.LENGTH))
    assert peer.all(Release)
    events = subscription.pull()
    assert (text_of(events, 0), text_of(events, 1)) == ("b", "a") and events[-1] == Completed(3, 2, 0)


def test_requests_go_to_the_tokenizer_with_the_fewest_streams(bench):
    one, two = bench.peer("one"), bench.peer("two")
    draining = bench.peer("three")
    draining.draining = True
    for _ in range(4):
        bench.open()
    assert [len(peer.all(Submit)) for peer in (one, two, draining)] == [2, 2, 0]


def test_a_new_request_waits_for_a_tokenizer(bench):
    subscription = bench.open()
    peer = bench.peer(ready=False)
    assert not peer.all(Submit) and not bench.table.ready
    peer.ready = True
    bench.table.on_status(peer)
    submit = bench.accept(peer)
    assert bench.table.ready and subscription.pull() == [Started(submit.request_id, [1, 2, 3], 7)]


# --- a tokenizer dies -----------------------------------------------------------------------------


def test_a_dead_tokenizers_stream_goes_on_elsewhere(bench):
    one = bench.peer("one")
    subscription = bench.open(n=2)
    submit = bench.accept(one)
    bench.say(
        one,
        delta(submit, 0, [10, 11], "aé", 3, index=0),
        delta(submit, 0, [20], "z", 1, index=1, finish=FinishReason.STOP),
    )
    seen = subscription.pull()
    two = bench.peer("two")
    bench.down(one)
    again = two.last(Submit)
    assert again.request_id == submit.request_id and again.attempt > submit.attempt
    assert again.prompt == TokensPrompt([1, 2, 3]), "ids, not text: a template may tell the time"
    assert again.choices == [m.ChoicePast(0, [10, 11], 3, 0)], "only what is unfinished, with what the client has"
    bench.table.on_message(two, accepted(again))
    bench.say(two, delta(again, 2, [12], "b", 4, finish=FinishReason.LENGTH))
    seen += subscription.pull()
    assert text_of(seen) == "aéb" and ids_of(seen) == [10, 11, 12] and text_of(seen, 1) == "z"
    assert sum(isinstance(event, Started) for event in seen) == 1
    assert two.all(Release) and seen[-1] == Completed(3, 4, 0)


def test_before_it_was_accepted_the_text_is_submitted_again(bench):
    one, two = bench.peer("one"), bench.peer("two")
    bench.open()
    bench.down(one)
    assert two.last(Submit).prompt == TextPrompt("hi")


def test_a_tokenizer_that_cannot_be_sent_to_is_passed_over(bench):
    one, two = bench.peer("one"), bench.peer("two")
    one.send = lambda message: False
    bench.open()
    assert two.all(Submit)


def test_words_of_a_former_tokenizer_are_ignored(bench):
    one, two = bench.peer("one"), bench.peer("two")
    subscription = bench.open()
    submit = bench.accept(one)
    one.stalled = True
    bench.table.on_status(one)
    assert one.all(Abort), "should it wake up"
    again = bench.accept(two)
    bench.say(one, delta(submit, 0, [66], "x", 1))
    bench.say(two, delta(again, 0, [10], "a", 1))
    assert text_of(subscription.pull()) == "a"


def test_an_old_attempt_is_ignored(bench):
    one = bench.peer("one")
    subscription = bench.open()
    submit = bench.accept(one)
    bench.say(one, delta(submit, 5, [66], "x", 9))
    again = one.last(Submit)
    assert again.attempt > submit.attempt
    bench.say(one, delta(submit, 0, [66], "x", 1))
    bench.say(one, delta(again, 0, [10], "a", 1))
    assert text_of(subscription.pull()) == "a"


def test_attempts_rise_across_restarts_of_the_gateway(bench):
    peer = bench.peer()
    bench.open()
    assert peer.last(Submit).attempt >= 5_000_000, "wall clock in ms"
    later = Bench()
    later.wall = bench.wall + 1
    other = later.peer()
    later.open()
    assert other.last(Submit).attempt > peer.last(Submit).attempt


def test_two_submits_in_a_millisecond_have_two_attempts(bench):
    peer = bench.peer()
    bench.open()
    bench.open()
    first, second = peer.all(Submit)
    assert first.attempt < second.attempt


def test_a_stream_waits_for_a_successor_but_not_forever(bench):
    one = bench.peer("one")
    kept, lost = bench.open(), bench.open()
    for submit in one.all(Submit):
        bench.table.on_message(one, accepted(submit))
    bench.down(one)
    bench.later(59)
    assert len(kept.pull()) == 1, "still only Started"
    lost.close()
    bench.later(2)
    with pytest.raises(StreamError, match="60 s") as caught:
        kept.pull()
    assert caught.value.code == ErrorCode.UNAVAILABLE and caught.value.retry_after_ms > 0
    late = bench.peer("late")
    assert not late.all(Submit)


def test_the_deadline_counts_anew_after_each_recovery(bench):
    one = bench.peer("one")
    subscription = bench.open()
    bench.accept(one)
    bench.down(one)
    bench.later(50)
    two = bench.peer("two")
    bench.later(50)
    bench.down(two)
    bench.later(50)
    assert subscription.pull() and subscription.pull() == []


def test_a_frozen_tokenizer_without_a_substitute_has_until_the_deadline(bench):
    one = bench.peer("one")
    subscription = bench.open()
    submit = bench.accept(one)
    one.stalled = True
    bench.table.on_status(one)
    bench.later(59)
    one.stalled = False
    bench.table.on_status(one)
    bench.later(59)
    bench.say(one, delta(submit, 0, [10], "a", 1))
    assert text_of(subscription.pull()) == "a"
    one.stalled = True
    bench.table.on_status(one)
    bench.later(61)
    with pytest.raises(StreamError, match="no progress"):
        subscription.pull()
    assert one.all(Abort)


def test_ids_are_never_given_to_another_model(bench):
    one = bench.peer("one")
    subscription = bench.open()
    bench.accept(one)
    bench.down(one)
    other = bench.peer("other", model=m.ModelInfo("big", "fp2", 9, 9, 9, 16, 8, 256, "float32", "cpu"))
    assert not other.all(Submit)
    bench.later(61)
    subscription.pull()
    with pytest.raises(StreamError):
        subscription.pull()


def test_what_does_not_serve_the_same_is_refused(bench):
    bench.peer("one")
    hello = m.Hello(1, 1, m.Role.TOKENIZER, "two", 1, MODEL, "tok")
    assert bench.table.refuse(hello) is None
    hello.tokenizer_fingerprint = "other"
    assert "tokenizer differs" in bench.table.refuse(hello)
    hello = m.Hello(1, 1, m.Role.TOKENIZER, "two", 1, m.ModelInfo("b", "x", 9, 9, 9, 16, 8, 9, "f", "cpu"), "tok")
    assert "model b differs" in bench.table.refuse(hello)
    assert "only tokenizers" in bench.table.refuse(m.Hello(1, 1, m.Role.EXECUTOR, "e", 1))


# --- what tokenizers say --------------------------------------------------------------------------


def test_duplicates_are_dropped_and_overlaps_cut(bench):
    peer = bench.peer()
    subscription = bench.open()
    submit = bench.accept(peer)
    bench.say(peer, delta(submit, 0, [10, 11], "ab", 2), delta(submit, 0, [10, 11], "ab", 2))
    bench.say(peer, delta(submit, 1, [11, 12], "bcd", 4))
    events = subscription.pull()
    assert text_of(events) == "abcd" and ids_of(events) == [10, 11, 12]


def test_held_back_text_comes_later_and_resubmits_tell_what_the_client_has(bench):
    one = bench.peer("one")
    subscription = bench.open()
    submit = bench.accept(one)
    bench.say(one, delta(submit, 0, [10, 11], "a", 1), delta(submit, 2, [12], "", 1))
    two = bench.peer("two")
    bench.down(one)
    again = two.last(Submit)
    assert again.choices == [m.ChoicePast(0, [10, 11, 12], 1, 0)]
    bench.say(two, delta(again, 3, [], "bc", 3, finish=FinishReason.LENGTH))
    assert text_of(subscription.pull()) == "abc"


def test_text_alone_is_told_with_the_next_token(bench):
    """A client could not say by its next_index whether it has that text."""
    peer = bench.peer()
    subscription = bench.open()
    submit = bench.accept(peer)
    bench.say(peer, delta(submit, 0, [10], "a", 1), delta(submit, 1, [], "b", 2))
    assert text_of(subscription.pull()) == "a"
    again = bench.attach(submit.request_id, {0: position(1)})
    assert text_of(again.pull()) == ""
    bench.say(peer, delta(submit, 1, [11], "c", 3))
    assert text_of(again.pull()) == "bc"


@pytest.mark.parametrize("start, total", [(3, 3), (1, 9)], ids=["tokens", "text"])
def test_a_gap_makes_it_submit_again(bench, start, total):
    peer = bench.peer()
    subscription = bench.open()
    submit = bench.accept(peer)
    bench.say(peer, delta(submit, 0, [10], "a", 1), delta(submit, start, [13], "d", total))
    first, again = peer.all(Submit)
    assert again.attempt > first.attempt and again.choices == [m.ChoicePast(0, [10], 1, 0)]
    bench.say(peer, delta(again, 1, [11], "b", 2))
    assert text_of(subscription.pull()) == "ab"


def test_a_tokenizer_that_always_loses_something_is_given_up(bench):
    peer = bench.peer()
    subscription = bench.open()
    bench.accept(peer)
    subscription.pull()
    for _ in range(4):
        bench.say(peer, delta(peer.last(Submit), 3, [13], "d", 4))
    with pytest.raises(StreamError, match="lost") as caught:
        subscription.pull()
    assert caught.value.code == ErrorCode.INTERNAL and len(peer.all(Submit)) == 4


def test_a_failure_ends_the_stream_after_what_came_before(bench):
    peer = bench.peer()
    subscription = bench.open()
    submit = bench.accept(peer)
    bench.say(peer, delta(submit, 0, [10], "a", 1))
    bench.table.on_message(
        peer,
        m.Failed(submit.request_id, submit.attempt, ErrorCode.INVALID_ARGUMENT, "too long", "prompt"),
    )
    assert text_of(subscription.pull()) == "a"
    with pytest.raises(StreamError, match="prompt: too long"):
        subscription.pull()
    assert bench.table.num_open_streams == 0 and not peer.all(Abort)


def test_unavailable_is_tried_elsewhere_first(bench):
    one, two = bench.peer("one"), bench.peer("two")
    subscription = bench.open()
    submit = one.last(Submit)
    bench.table.on_message(one, m.Failed(submit.request_id, submit.attempt, ErrorCode.UNAVAILABLE, "drained"))
    again = two.last(Submit)
    bench.table.on_message(two, m.Failed(again.request_id, again.attempt, ErrorCode.UNAVAILABLE, "also"))
    with pytest.raises(StreamError, match="also"):
        subscription.pull()
    assert len(one.all(Submit)) == 1


def test_a_draining_tokenizers_refusal_is_waited_out(bench):
    one = bench.peer("one")
    bench.open()
    submit = one.last(Submit)
    one.draining = True
    bench.table.on_message(one, m.Failed(submit.request_id, submit.attempt, ErrorCode.UNAVAILABLE, "drained"))
    two = bench.peer("two")
    assert two.all(Submit)


def test_prompt_logprobs_are_kept_once_and_asked_for_from_where_they_stopped(bench):
    one = bench.peer("one")
    subscription = bench.open(sampling=SamplingParams(prompt_logprobs=0))
    submit = bench.accept(one, ids=range(5))
    entries = [None, *[m.TokenLogprobs(i, -1.0, 1) for i in range(4)]]
    bench.table.on_message(one, m.PromptLogprobs(submit.request_id, submit.attempt, 0, entries[:2]))
    two = bench.peer("two")
    bench.down(one)
    again = two.last(Submit)
    assert again.prompt_logprobs_start == 2
    bench.table.on_message(two, m.PromptLogprobs(again.request_id, again.attempt, 1, entries[1:]))
    chunks = [event for event in subscription.pull() if isinstance(event, PromptChunk)]
    assert [entry for chunk in chunks for entry in chunk.entries] == entries


# --- clients leave and come back ------------------------------------------------------------------


def test_a_client_that_leaves_ends_its_work_at_once(bench):
    peer = bench.peer()
    subscription = bench.open()
    submit = bench.accept(peer)
    subscription.close()
    assert peer.all(Abort) == [Abort(submit.request_id, submit.attempt)]
    assert bench.table.num_open_streams == 0 and bench.table.num_retained_streams == 0
    subscription.close()
    assert len(peer.all(Abort)) == 1


def test_a_client_that_leaves_while_its_request_waits_is_forgotten(bench):
    bench.open().close()
    assert not bench.peer().all(Submit)


def test_with_a_detach_grace_the_work_goes_on_for_a_while(bench):
    peer = bench.peer()
    subscription = bench.open(detach_grace=5.0)
    submit = bench.accept(peer)
    bench.say(peer, delta(submit, 0, [10], "a", 1))
    first = subscription.pull()
    subscription.close()
    bench.later(4)
    bench.say(peer, delta(submit, 1, [11], "b", 2))
    again = bench.attach(submit.request_id, {0: position(1)})
    assert text_of(first) + text_of(again.pull()) == "ab"
    again.close()
    bench.later(4)
    assert not peer.all(Abort)
    bench.later(2)
    assert peer.all(Abort) and bench.table.num_open_streams == 0


def position(next_index, finished=False):
    return Position(next_index, finished)


def test_attach_takes_over_and_follows_live(bench):
    peer = bench.peer()
    subscription = bench.open()
    submit = bench.accept(peer)
    bench.say(peer, delta(submit, 0, [10], "a", 1), delta(submit, 1, [11], "b", 2))
    subscription.pull()
    again = bench.attach(submit.request_id, {0: position(1)})
    with pytest.raises(StreamError) as caught:
        subscription.pull()
    assert caught.value.code == ErrorCode.ABORTED
    subscription.close()
    assert not peer.all(Abort), "the first client's end is not the request's"
    bench.say(peer, delta(submit, 2, [12], "c", 3, finish=FinishReason.LENGTH))
    events = again.pull()
    assert isinstance(events[0], Started) and text_of(events) == "bc" and ids_of(events) == [11, 12]
    assert events[-1] == Completed(3, 3, 0)


def test_attach_needs_a_border_that_was_told(bench):
    peer = bench.peer()
    bench.open()
    submit = bench.accept(peer)
    bench.say(peer, delta(submit, 0, [10, 11], "ab", 2))
    for bad in ({0: position(1)}, {0: position(3)}, {1: position(0)}):
        with pytest.raises(StreamError, match="positions") as caught:
            bench.attach(submit.request_id, bad)
        assert caught.value.code == ErrorCode.INVALID_ARGUMENT
    assert text_of(bench.attach(submit.request_id).pull()) == "ab"


def test_a_last_chunk_without_tokens_is_sent_again_only_to_a_client_without_it(bench):
    peer = bench.peer()
    bench.open()
    submit = bench.accept(peer)
    bench.say(peer, delta(submit, 0, [10], "", 0), delta(submit, 1, [], "ab", 2, finish=FinishReason.LENGTH))
    without = bench.attach(submit.request_id, {0: position(1)}).pull()
    assert text_of(without) == "ab" and without[1].finish_reason == FinishReason.LENGTH
    having = bench.attach(submit.request_id, {0: position(1, finished=True)}).pull()
    assert [type(event) for event in having] == [Started, Completed]


def test_finished_streams_are_kept_for_a_while(bench):
    peer = bench.peer()
    bench.open()
    submit = bench.accept(peer)
    bench.say(peer, delta(submit, 0, [10], "a", 1, finish=FinishReason.LENGTH))
    bench.later(29)
    assert text_of(bench.attach(submit.request_id).pull()) == "a"
    bench.later(2)
    assert bench.table.num_retained_streams == 0
    assert bench.attach(submit.request_id).pull() == []
    assert peer.all(m.Attach), "now only a tokenizer might know"


def test_finished_streams_are_bounded_in_bytes():
    bench = Bench(max_retained_bytes=4000)
    peer = bench.peer()
    ids = []
    for _ in range(4):
        bench.open()
        submit = bench.accept(peer)
        ids.append(submit.request_id)
        bench.say(peer, delta(submit, 0, [10], "x" * 1000, 1000, finish=FinishReason.LENGTH))
    bench.later(0)
    assert bench.table.num_retained_streams == 2
    assert text_of(bench.attach(ids[-1]).pull()) == "x" * 1000


def test_a_client_that_does_not_read_costs_a_bounded_number_of_bytes():
    bench = Bench(max_unread_bytes=1000)
    peer = bench.peer()
    subscription = bench.open()
    submit = bench.accept(peer)
    for i in range(20):
        bench.say(peer, delta(submit, i, [10], "x" * 100, 100 * (i + 1)))
        subscription.pull()
    for i in range(20, 40):
        bench.say(peer, delta(submit, i, [10], "x" * 100, 100 * (i + 1)))
    assert peer.all(Abort) and bench.table.num_open_streams == 0
    assert len(text_of(subscription.pull())) == 900
    with pytest.raises(StreamError, match="max_unread_bytes") as caught:
        subscription.pull()
    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED


def test_more_requests_than_allowed_are_refused():
    bench = Bench(max_concurrent_requests=2)
    bench.open()
    first = bench.open()
    with pytest.raises(StreamError, match="max_concurrent_requests") as caught:
        bench.open()
    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED and caught.value.retry_after_ms > 0
    first.close()
    bench.open()


def test_abort_finishes_what_is_unfinished(bench):
    peer = bench.peer()
    subscription = bench.open(n=2)
    submit = bench.accept(peer)
    bench.say(peer, delta(submit, 0, [10], "a", 1, finish=FinishReason.STOP), delta(submit, 0, [11], "b", 1, index=1))
    bench.table.abort(submit.request_id)
    bench.table.abort(12345)
    events = subscription.pull()
    reasons = {e.choice_index: e.finish_reason for e in events if isinstance(e, Chunk)}
    assert reasons == {0: FinishReason.STOP, 1: FinishReason.ABORT}
    assert text_of(events, 1) == "b" and subscription.done
    assert peer.all(Abort) and not peer.all(Release)


# --- a past that the client brings ----------------------------------------------------------------


def test_a_clients_past_is_submitted_and_only_what_is_new_is_sent(bench):
    peer = bench.peer()
    choices = [Choice(0, [10, 11], 2), Choice(1, finished_at=4)]
    subscription = bench.open(TokensPrompt([1, 2]), choices=choices)
    submit = bench.accept(peer, [1, 2])
    assert submit.choices == [m.ChoicePast(0, [10, 11], 2, 0)]
    bench.say(peer, delta(submit, 2, [12], "c", 3, finish=FinishReason.LENGTH))
    events = subscription.pull()
    assert (events[1].start, text_of(events), ids_of(events)) == (2, "c", [12])
    assert events[-1] == Completed(2, 7, 0)
    assert text_of(bench.attach(submit.request_id, {0: position(2)}).pull()) == "c"
    with pytest.raises(StreamError, match="known from 2"):
        bench.attach(submit.request_id)


def test_a_past_of_unknown_length_in_bytes(bench):
    one = bench.peer("one")
    bench.open(TokensPrompt([1]), choices=[Choice(0, [10, 11], None)])
    submit = bench.accept(one, [1])
    assert submit.choices[0].sent_bytes is None
    bench.say(one, delta(submit, 2, [12], "cd", 9))
    two = bench.peer("two")
    bench.down(one)
    assert two.last(Submit).choices == [m.ChoicePast(0, [10, 11, 12], 9, 0)]


def test_a_past_in_which_all_has_finished_is_completed_at_once(bench):
    peer = bench.peer()
    subscription = bench.open(TokensPrompt([1, 2]), choices=[Choice(0, finished_at=4)])
    assert [type(event) for event in subscription.pull()] == [Started, Completed]
    assert not peer.all(Submit) and subscription.done


# --- a request of an earlier gateway --------------------------------------------------------------

ID = 0xABCD


def attached(asked, choices, prompt=(1, 2), **fields):
    submit = Submit(asked.request_id, 3, TokensPrompt(list(prompt)), SamplingParams(seed=9), m.TextParams(), choices)
    return m.Attached(asked.request_id, asked.attempt, submit, **fields)


def test_a_tokenizer_remembers(bench):
    one, two = bench.peer("one"), bench.peer("two")
    subscription = bench.attach(ID, {0: position(2), 1: position(5, finished=True)})
    asked = two.last(m.Attach)
    assert asked.next_index == {0: 2, 1: 5} and one.last(m.Attach).attempt != asked.attempt
    assert subscription.pull() == []
    bench.table.on_message(two, attached(asked, [m.ChoicePast(0, [10, 11], 4)]))
    bench.say(two, delta(asked, 2, [12], "c", 5, finish=FinishReason.LENGTH))
    events = subscription.pull()
    assert events[0] == Started(ID, [1, 2], 9)
    assert events[1].start == 2 and text_of(events) == "c" and events[-1] == Completed(2, 8, 0)
    assert two.last(Release) == Release(ID, asked.attempt)


def test_an_attached_stream_can_be_submitted_again(bench):
    one = bench.peer("one")
    bench.attach(ID, {0: position(2)})
    asked = one.last(m.Attach)
    bench.table.on_message(one, attached(asked, [m.ChoicePast(0, [10, 11], 4)]))
    two = bench.peer("two")
    bench.down(one)
    again = two.last(Submit)
    assert again.choices == [m.ChoicePast(0, [10, 11], 4)] and again.attempt > asked.attempt


def test_a_second_memory_of_it_is_aborted_and_outlived(bench):
    one, two = bench.peer("one"), bench.peer("two")
    bench.attach(ID, {0: position(2)})
    bench.table.on_message(one, attached(one.last(m.Attach), [m.ChoicePast(0, [10, 11], 4)]))
    late = two.last(m.Attach)
    bench.table.on_message(two, attached(late, [m.ChoicePast(0, [10, 11], 4)]))
    assert two.last(Abort) == Abort(ID, late.attempt)
    submits = one.all(Submit) + two.all(Submit)
    assert len(submits) == 1 and submits[0].attempt > late.attempt


def test_who_loses_a_stream_to_a_second_memory_forgets_it(bench):
    one, two = bench.peer("one"), bench.peer("two")
    bench.attach(ID, {0: position(2)})
    first, late = one.last(m.Attach), two.last(m.Attach)
    bench.table.on_message(one, attached(first, [m.ChoicePast(0, [10, 11], 4)]))
    two.ready, one.ready = True, False
    bench.table.on_message(two, attached(late, [m.ChoicePast(0, [10, 11], 4)]))
    assert two.last(Submit).attempt > late.attempt and not one.all(Abort)
    bench.accept(two)
    assert one.all(Abort) == [Abort(ID, first.attempt)]


def test_who_loses_a_stream_by_a_gap_forgets_it(bench):
    one = bench.peer("one")
    bench.open()
    submit = bench.accept(one)
    one.ready = False
    bench.say(one, delta(submit, 1, [11], "b", 2))
    two = bench.peer("two")
    bench.table.on_status(two)
    assert two.last(Submit).attempt > submit.attempt and not one.all(Abort)
    bench.accept(two)
    assert one.all(Abort) == [Abort(submit.request_id, submit.attempt)]


def test_nobody_remembers(bench):
    one, two = bench.peer("one"), bench.peer("two")
    bench.later(10)
    subscription = bench.attach(ID)
    for peer in (one, two):
        asked = peer.last(m.Attach)
        bench.table.on_message(peer, m.Failed(ID, asked.attempt, ErrorCode.NOT_FOUND, "no"))
    with pytest.raises(StreamError, match="000000000000abcd") as caught:
        subscription.pull()
    assert caught.value.code == ErrorCode.NOT_FOUND


def test_nobody_answers(bench):
    bench.peer("one")
    subscription = bench.attach(ID)
    bench.later(2)
    assert subscription.pull() == []
    bench.later(2)
    with pytest.raises(StreamError) as caught:
        subscription.pull()
    assert caught.value.code == ErrorCode.NOT_FOUND


def test_a_restarted_gateway_waits_for_tokenizers_to_dial_in(bench):
    one = bench.peer("one")
    subscription = bench.attach(ID, {0: position(1)})
    bench.table.on_message(one, m.Failed(ID, one.last(m.Attach).attempt, ErrorCode.NOT_FOUND, "no"))
    assert subscription.pull() == [], "one that comes later may know it"
    two = bench.peer("two", ready=False)
    bench.table.on_message(two, attached(two.last(m.Attach), [m.ChoicePast(0, [10], 1)]))
    assert subscription.pull() == [Started(ID, [1, 2], 9)]


def test_an_answer_that_nobody_waits_for_any_more_is_aborted(bench):
    one = bench.peer("one")
    bench.attach(ID).close()
    asked = one.last(m.Attach)
    bench.table.on_message(one, attached(asked, [m.ChoicePast(0, [], 0)]))
    assert one.all(Abort) == [Abort(ID, asked.attempt)] and bench.table.num_open_streams == 0


def test_a_second_attach_takes_the_search_over(bench):
    one = bench.peer("one")
    first = bench.attach(ID, {0: position(1)})
    second = bench.attach(ID, {0: position(2)})
    with pytest.raises(StreamError) as caught:
        first.pull()
    assert caught.value.code == ErrorCode.ABORTED
    first.close()
    bench.table.on_message(one, attached(one.last(m.Attach), [m.ChoicePast(0, [10, 11], 1)]))
    assert second.pull()


# --- draining and calls ---------------------------------------------------------------------------


def test_a_draining_gateway_takes_nothing_new_and_leaves_requests_to_the_right(bench):
    peer = bench.peer()
    subscription = bench.open()
    bench.accept(peer)
    bench.table.draining = True
    assert not bench.table.ready
    with pytest.raises(StreamError, match="shutting down"):
        bench.open()
    subscription.pull()
    bench.table.end_all("stopped")
    with pytest.raises(StreamError, match="stopped") as caught:
        subscription.pull()
    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert not peer.all(Abort), "a successor may attach to them"


def test_a_call_is_made_again_when_its_tokenizer_goes(bench):
    one, two = bench.peer("one"), bench.peer("two")
    answers = []
    bench.table.calls.start(lambda call_id: m.Decode(call_id, [1]), answers.append)
    asked, other = (one, two) if one.sent else (two, one)
    bench.down(asked)
    again = other.last(m.Decode)
    bench.table.on_message(other, m.Decoded(again.call_id, "x"))
    bench.table.on_message(other, m.Decoded(again.call_id, "x"))
    assert answers == [m.Decoded(again.call_id, "x")]


def test_a_call_that_nobody_can_answer_fails(bench):
    answers = []
    bench.table.calls.start(m.GetLoads, answers.append)
    assert answers[0].code == ErrorCode.UNAVAILABLE
    peer = bench.peer()
    bench.table.calls.start(m.GetLoads, answers.append)
    bench.table.on_message(peer, m.CallFailed(peer.last(m.GetLoads).call_id, ErrorCode.INTERNAL, "bad"))
    assert answers[1].message == "bad"


def test_cached_tokens_are_those_that_the_first_choice_found(bench):
    peer = bench.peer()
    subscription = bench.open(n=2)
    submit = bench.accept(peer)
    end = FinishReason.LENGTH
    bench.say(
        peer,
        delta(submit, 0, [10], "a", 1, index=1, finish=end, num_cached_tokens=48),
        delta(submit, 0, [10], "a", 1, index=0, num_cached_tokens=16),
        delta(submit, 1, [11], "b", 2, index=0, finish=end, num_cached_tokens=64),
    )
    assert subscription.pull()[-1] == Completed(3, 3, 16)


# --- draining tokenizers ---


def drain(bench, peer):
    peer.draining = True
    bench.table.on_status(peer)


def test_streams_leave_a_draining_tokenizer_for_another(bench):
    one = bench.peer("one")
    subscription = bench.open()
    submit = bench.accept(one)
    bench.say(one, delta(submit, 0, [10], "a", 1))
    two = bench.peer("two")
    drain(bench, one)
    again = two.last(Submit)
    assert again.attempt > submit.attempt and again.choices[0].output_token_ids == [10]
    assert not one.all(Abort), "the scheduler would end it before the other tokenizer has it"
    bench.say(one, delta(submit, 1, [66], "x", 2))
    bench.table.on_message(two, accepted(again))
    assert one.all(Abort) == [Abort(submit.request_id, submit.attempt)]
    bench.say(two, delta(again, 1, [11], "b", 2, finish=FinishReason.STOP))
    events = subscription.pull()
    assert text_of(events) == "ab" and ids_of(events) == [10, 11]
    assert len(one.all(Abort)) == 1


def test_streams_stay_with_a_draining_tokenizer_that_is_alone(bench):
    one = bench.peer("one")
    subscription = bench.open()
    submit = bench.accept(one)
    drain(bench, one)
    bench.say(one, delta(submit, 0, [10], "a", 1, finish=FinishReason.STOP))
    assert text_of(subscription.pull()) == "a" and len(one.all(Submit)) == 1


def test_streams_move_when_a_successor_comes_up(bench):
    one = bench.peer("one")
    bench.open()
    bench.accept(one)
    drain(bench, one)
    two = bench.peer("two")
    assert len(two.all(Submit)) == 1
