"""The ledger: events in, messages out, with a clock that tests turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.services.tokenizer.core import TokenizerCore
from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.shared.messages import (
    Abort,
    Accepted,
    Attach,
    Attached,
    CallFailed,
    ChoicePast,
    Delta,
    Deltas,
    ErrorCode,
    Failed,
    Finish,
    FinishReason,
    GetLoads,
    Loads,
    Message,
    ModelInfo,
    NewRequest,
    Output,
    Outputs,
    PromptLogprobs,
    Release,
    Submit,
    TextPrompt,
    TokenLogprobs,
    TokensPrompt,
)
from quartet.shared.sampling_params import SamplingParams, TextParams

MakeModel = Callable[..., ModelInfo]
RID = 0xABC
PROMPT = [5, 6, 7]
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Bench:
    """A core with a scheduler and the gateways "g" and "h"; `sent` sorts what it says by receiver."""

    def __init__(self, loaded: LoadedTokenizer, model: ModelInfo | None, **options: Any) -> None:
        self.now = 100.0
        self.loaded = loaded
        self.core = TokenizerCore(loaded, lambda: self.now, **options)
        for gateway in ("g", "h"):
            self.core.gateway_up(gateway)
        if model is not None:
            self.core.scheduler_up()
            self.core.model_changed(model)

    def take(self) -> dict[Any, list[Message]]:
        sent: dict[Any, list[Message]] = {"g": [], "h": [], None: []}
        for to, message in self.core.take():
            sent[to].append(message)
        return sent

    def submit(
        self, attempt: int = 1, gateway: str = "g", choices: list[ChoicePast] | None = None, **fields: Any
    ) -> None:
        sampling = fields.pop("sampling", SamplingParams(max_tokens=20))
        text = fields.pop("text", TextParams())
        ids = fields.pop("ids", PROMPT)
        request_id = fields.pop("request_id", RID)
        choices = [ChoicePast(0)] if choices is None else choices
        submit = Submit(request_id, attempt, TokensPrompt(ids), sampling, text, choices, **fields)
        if self.core.submit(gateway, submit):
            self.core.encoded(request_id, attempt, ids)

    def output(self, start: int, text: str | list[int], attempt: int = 1, **fields: Any) -> None:
        ids = self.ids(text) if isinstance(text, str) else text
        request_id = fields.pop("request_id", RID)
        self.core.outputs(Outputs([Output(request_id, attempt, fields.pop("index", 0), start, ids, **fields)]))

    def ids(self, text: str) -> list[int]:
        """One id a byte."""
        return [3 + byte for byte in text.encode()]

    def deltas(self, gateway: str = "g") -> list[Delta]:
        sent = self.take()
        assert not sent[None], sent[None]
        (message,) = sent[gateway]
        assert isinstance(message, Deltas)
        return message.items


@pytest.fixture
def bench(tiny: LoadedTokenizer, model_info: MakeModel) -> Bench:
    return Bench(tiny, model_info())


def only(messages: list[Message], kind: type) -> Any:
    (message,) = [m for m in messages if isinstance(m, kind)]
    return message


# --- submit ---------------------------------------------------------------------------------------


def test_a_request_is_accepted_and_goes_right(bench: Bench) -> None:
    bench.submit(sampling=SamplingParams(max_tokens=None, seed=9), priority=3, cache_salt="s", tenant="t")
    sent = bench.take()
    assert sent["g"] == [Accepted(RID, 1, PROMPT)]
    (request,) = sent[None]
    assert request == NewRequest(
        RID, 1, PROMPT, SamplingParams(max_tokens=125, seed=9), [1], [ChoicePast(0)], 3, "s", "t", 0
    )


def test_outputs_become_deltas(bench: Bench) -> None:
    bench.submit()
    bench.take()
    bench.output(0, "he", num_cached_tokens=2)
    assert bench.deltas() == [Delta(RID, 1, 0, 0, bench.ids("he"), "he", 2, num_cached_tokens=2)]
    bench.output(2, [*bench.ids("y"), 1], finish_reason=STOP)
    (delta,) = bench.deltas()
    assert (delta.start, delta.text, delta.num_text_bytes, delta.finish_reason) == (2, "y", 3, STOP)
    assert delta.token_ids == [*bench.ids("y"), 1]


def test_one_steps_deltas_travel_together(bench: Bench) -> None:
    for request_id in (1, 2):
        bench.submit(request_id=request_id)
    bench.submit(request_id=3, gateway="h")
    bench.take()
    bench.core.outputs(Outputs([Output(i, 1, 0, 0, bench.ids("x")) for i in (1, 2, 3)]))
    sent = bench.take()
    assert [d.request_id for d in only(sent["g"], Deltas).items] == [1, 2]
    assert [d.request_id for d in only(sent["h"], Deltas).items] == [3]


def test_half_a_character_waits_and_the_end_flushes_it(bench: Bench) -> None:
    bench.submit()
    bench.take()
    data = "\N{GRINNING FACE}".encode()
    bench.output(0, [3 + b for b in data[:2]])
    assert bench.deltas()[0].text == ""
    bench.output(2, [3 + b for b in data[2:]])
    assert bench.deltas()[0].text == "\N{GRINNING FACE}"
    bench.output(4, [3 + data[0]], finish_reason=LENGTH)
    assert (delta := bench.deltas()[0]).text == "\ufffd" and delta.num_text_bytes == 7


def test_a_stop_string_ends_the_choice_on_both_sides(bench: Bench) -> None:
    bench.submit(text=TextParams(stop=["END"]))
    bench.take()
    bench.output(0, "abE")
    assert bench.deltas()[0].text == "ab"
    bench.output(3, "NDxyz")
    sent = bench.take()
    assert sent[None] == [Finish(RID, 1, 0, 5)]
    (delta,) = only(sent["g"], Deltas).items
    assert (delta.token_ids, delta.text, delta.finish_reason, delta.stop_reason) == (bench.ids("ND"), "", STOP, "END")
    bench.output(8, "more")
    assert bench.take() == {"g": [], "h": [], None: []}
    bench.core.release(Release(RID, 1))
    assert bench.take()[None] == [Release(RID, 1)]
    assert bench.core.num_retained == 0


def test_a_partial_stop_is_let_out_at_the_end(bench: Bench) -> None:
    bench.submit(text=TextParams(stop=["END"]))
    bench.take()
    bench.output(0, "abEN", finish_reason=LENGTH)
    assert bench.deltas()[0].text == "abEN"


def test_a_stop_string_in_the_last_output_truncates_what_the_scheduler_has(bench: Bench) -> None:
    bench.submit(text=TextParams(stop=["b"]))
    bench.take()
    bench.output(0, "abc", finish_reason=LENGTH)
    sent = bench.take()
    assert sent[None] == [Finish(RID, 1, 0, 2)]
    assert only(sent["g"], Deltas).items[0].finish_reason is STOP


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"ids": [5] * 128, "sampling": SamplingParams(max_tokens=1)}, "prompt_token_ids"),
        ({"ids": [5000]}, "prompt_token_ids"),
        ({"ids": []}, "prompt_token_ids"),
        ({"sampling": SamplingParams(logit_bias={5000: 1.0})}, "logit_bias"),
        ({"choices": [ChoicePast(0, [5000])]}, "past_token_ids"),
        ({"choices": []}, "n"),
    ],
)
def test_what_cannot_be_served_never_goes_right(bench: Bench, fields: dict[str, Any], field: str) -> None:
    bench.submit(**fields)
    sent = bench.take()
    (failed,) = sent["g"]
    assert isinstance(failed, Failed) and failed.code is ErrorCode.INVALID_ARGUMENT and failed.field == field
    assert sent[None] == [] and bench.core.num_retained == 0


def test_an_aborted_encoding_is_dropped(bench: Bench) -> None:
    submit = Submit(RID, 1, TextPrompt("x"), SamplingParams(), TextParams(), [ChoicePast(0)])
    assert bench.core.submit("g", submit) and bench.core.wants(RID, 1)
    bench.core.abort(Abort(RID, 1))
    assert not bench.core.wants(RID, 1)
    bench.core.encoded(RID, 1, PROMPT)
    bench.core.refused(RID, 1, ErrorCode.INTERNAL, "late")
    assert bench.core.take() == []


def test_a_refused_encoding_fails(bench: Bench) -> None:
    bench.core.submit("g", Submit(RID, 1, TextPrompt("x"), SamplingParams(), TextParams(), [ChoicePast(0)]))
    bench.core.refused(RID, 1, ErrorCode.INVALID_ARGUMENT, "messages: bad", "messages")
    assert bench.take()["g"] == [Failed(RID, 1, ErrorCode.INVALID_ARGUMENT, "messages: bad", "messages")]


def test_without_a_model_requests_wait_for_one(tiny: LoadedTokenizer, model_info: MakeModel) -> None:
    bench = Bench(tiny, None)
    bench.submit()
    bench.submit(request_id=2, ids=[5000])
    bench.core.scheduler_up()
    assert bench.core.take() == [] and bench.core.num_unfinished == 2
    bench.core.model_changed(model_info())
    sent = bench.take()
    assert [type(m) for m in sent["g"]] == [Accepted, Failed]
    assert [type(m) for m in sent[None]] == [NewRequest]


def test_while_draining_only_known_requests_are_taken(bench: Bench) -> None:
    bench.submit()
    bench.core.draining = True
    bench.take()
    bench.submit(request_id=2)
    assert only(bench.take()["g"], Failed).code is ErrorCode.UNAVAILABLE
    bench.submit(attempt=2)
    assert only(bench.take()["g"], Accepted).attempt == 2


# --- attempts -------------------------------------------------------------------------------------


def test_lower_and_equal_attempts_are_ignored(bench: Bench) -> None:
    bench.submit(attempt=5)
    bench.take()
    bench.submit(attempt=4)
    bench.submit(attempt=5)
    bench.core.abort(Abort(RID, 4))
    bench.core.release(Release(RID, 4))
    bench.output(0, "x", attempt=4)
    bench.core.failed(Failed(RID, 4, ErrorCode.INTERNAL, "old"))
    assert bench.core.take() == []
    bench.core.abort(Abort(RID, 5))
    assert bench.take()[None] == [Abort(RID, 5)]


def test_a_higher_attempt_moves_the_stream_with_what_is_known(bench: Bench) -> None:
    bench.submit()
    bench.output(0, "abcd")
    bench.take()
    bench.submit(attempt=2, gateway="h", choices=[ChoicePast(0, bench.ids("ab"), 2)])
    sent = bench.take()
    assert sent["g"] == [Failed(RID, 1, ErrorCode.ABORTED, "the stream was taken over by a later attempt")]
    assert sent["h"][0] == Accepted(RID, 2, PROMPT)
    assert only(sent["h"], Deltas).items == [Delta(RID, 2, 0, 2, bench.ids("cd"), "cd", 4)]
    (request,) = sent[None]
    assert request.attempt == 2 and request.choices == [ChoicePast(0, bench.ids("abcd"))]
    bench.output(4, "e", attempt=1)
    assert bench.core.take() == []
    bench.output(4, "e", attempt=2)
    assert bench.deltas("h")[0].text == "e"


def test_another_past_wins_over_what_is_known(bench: Bench) -> None:
    bench.submit()
    bench.output(0, "abcd")
    bench.take()
    bench.submit(attempt=2, choices=[ChoicePast(0, bench.ids("aX"), 2)])
    sent = bench.take()
    assert [type(m) for m in sent["g"]] == [Accepted]
    assert sent[None][0].choices == [ChoicePast(0, bench.ids("aX"))]


def test_a_resumed_request_sends_only_text_the_client_lacks(bench: Bench) -> None:
    bench.submit(choices=[ChoicePast(0, bench.ids("hello"), 3), ChoicePast(1, bench.ids("zz"))])
    sent = bench.take()
    assert [c.output_token_ids for c in sent[None][0].choices] == [bench.ids("hello"), bench.ids("zz")]
    bench.output(5, "!")
    (delta,) = bench.deltas()
    assert (delta.start, delta.text, delta.num_text_bytes) == (5, "lo!", 6)
    bench.output(2, "?", index=1)
    (delta,) = bench.deltas()
    assert (delta.text, delta.num_text_bytes) == ("?", 3)


def test_a_past_that_holds_a_stop_string_needs_no_step(bench: Bench) -> None:
    bench.submit(choices=[ChoicePast(0, bench.ids("abEND"), 1)], text=TextParams(stop=["END"]))
    sent = bench.take()
    assert sent[None] == []
    (delta,) = only(sent["g"], Deltas).items
    assert (delta.start, delta.token_ids, delta.text, delta.finish_reason) == (5, [], "b", STOP)


def test_a_past_that_ends_in_eos_is_answered_by_the_scheduler(bench: Bench) -> None:
    bench.submit(choices=[ChoicePast(0, [*bench.ids("ab"), 1], None)])
    assert bench.take()[None][0].choices[0].output_token_ids[-1] == 1
    bench.output(3, [], finish_reason=STOP)
    (delta,) = bench.deltas()
    assert (delta.start, delta.token_ids, delta.text, delta.finish_reason) == (3, [], "", STOP)


# --- the scheduler comes and goes -----------------------------------------------------------------


def test_a_new_scheduler_is_told_all_that_is_unfinished(bench: Bench) -> None:
    bench.submit(request_id=1, choices=[ChoicePast(0), ChoicePast(1)])
    bench.submit(request_id=2)
    bench.submit(request_id=3)
    bench.output(0, "ab", request_id=1)
    bench.output(0, "x", request_id=1, index=1, finish_reason=LENGTH)
    bench.output(0, "y", request_id=3, finish_reason=LENGTH)
    bench.core.scheduler_down()
    bench.submit(request_id=4)
    assert bench.take()[None] != []  # what was said before it went
    bench.core.scheduler_up()
    told = bench.take()[None]
    assert [(m.request_id, m.choices) for m in told] == [
        (1, [ChoicePast(0, bench.ids("ab"))]),
        (2, [ChoicePast(0)]),
        (4, [ChoicePast(0)]),
    ]
    bench.output(2, "c", request_id=1)
    assert bench.deltas()[0].text == "c"


def test_while_there_is_no_scheduler_nothing_is_queued_for_it(bench: Bench) -> None:
    bench.submit()
    bench.take()
    bench.core.scheduler_down()
    bench.core.abort(Abort(RID, 1))
    assert bench.core.take() == []
    bench.core.scheduler_up()
    assert bench.core.take() == []


def test_tokens_told_twice_are_dropped(bench: Bench) -> None:
    bench.submit()
    bench.take()
    bench.output(0, "abc")
    bench.take()
    bench.output(0, "ab")
    bench.output(0, "abc")
    bench.output(1, "b", finish_reason=LENGTH)
    assert bench.core.take() == []
    bench.output(1, "bcd")
    assert bench.deltas()[0] == Delta(RID, 1, 0, 3, bench.ids("d"), "d", 4)


def test_a_gap_makes_it_add_again_once(bench: Bench) -> None:
    bench.submit()
    bench.output(0, "a")
    bench.take()
    bench.output(3, "d")
    bench.output(4, "e")
    sent = bench.take()
    assert sent["g"] == []
    (request,) = sent[None]
    assert request.choices == [ChoicePast(0, bench.ids("a"))]
    bench.output(1, "bcde")
    assert bench.deltas()[0].text == "bcde"
    bench.output(9, "z")
    assert [type(m) for m in bench.take()[None]] == [NewRequest]


def test_a_schedulers_failure_is_passed_on(bench: Bench) -> None:
    bench.submit()
    bench.take()
    bench.core.failed(Failed(RID, 1, ErrorCode.RESOURCE_EXHAUSTED, "full", retry_after_ms=50))
    assert bench.take()["g"] == [Failed(RID, 1, ErrorCode.RESOURCE_EXHAUSTED, "full", retry_after_ms=50)]
    assert bench.core.num_retained == 0


# --- gateways come and go -------------------------------------------------------------------------


def test_a_request_outlives_its_gateway_by_the_grace(bench: Bench) -> None:
    bench.submit()
    bench.take()
    bench.core.gateway_down("g")
    bench.output(0, "abc")
    assert bench.core.take() == []
    bench.now += 29.9
    bench.core.tick()
    assert bench.core.take() == [] and bench.core.num_retained == 1
    bench.now += 0.2
    bench.core.tick()
    assert bench.take()[None] == [Abort(RID, 1)] and bench.core.num_retained == 0


@pytest.mark.parametrize("have", range(6))
def test_attach_brings_the_rest_from_any_point(bench: Bench, have: int) -> None:
    sampling = SamplingParams(max_tokens=None)
    bench.submit(text=TextParams(stop=["END"]), sampling=sampling)
    bench.output(0, "ab\u00e9E")
    bench.core.gateway_down("g")
    bench.take()
    bench.core.attach("h", Attach(RID, 7, {0: have}))
    sent = bench.take()
    ids = bench.ids("ab\u00e9E")
    attached = only(sent["h"], Attached)
    had = ["", "a", "ab", "ab", "ab\u00e9", "ab\u00e9"][have]
    assert attached.attempt == attached.submit.attempt == 7
    assert attached.submit.prompt == TokensPrompt(PROMPT)
    assert attached.submit.sampling.max_tokens == 125
    assert attached.submit.choices == [ChoicePast(0, ids[:have], len(had.encode()), 0)]
    deltas = [d for m in sent["h"] if isinstance(m, Deltas) for d in m.items]
    if have < 5:
        assert [(d.start, d.token_ids, d.text) for d in deltas] == [(have, ids[have:], "ab\u00e9".removeprefix(had))]
    else:
        assert deltas == []
    assert sent[None][0].attempt == 7 and sent[None][0].choices == [ChoicePast(0, ids)]
    bench.output(5, "N!", attempt=7)
    assert bench.deltas("h")[0].text == "EN!"
    bench.now += 60
    bench.core.tick()
    assert bench.core.num_retained == 1


def test_attach_to_a_finished_stream_brings_its_end(bench: Bench) -> None:
    bench.submit(text=TextParams(stop=["c"]), choices=[ChoicePast(0), ChoicePast(1)])
    bench.output(0, "abc")
    bench.output(0, [*bench.ids("x"), 2], index=1, finish_reason=STOP, stop_reason=2)
    bench.core.gateway_down("g")
    bench.take()
    bench.core.attach("h", Attach(RID, 2, {0: 1, 1: 2}))
    sent = bench.take()
    assert sent[None] == []
    first, second = only(sent["h"], Deltas).items
    assert (first.start, first.text, first.finish_reason, first.stop_reason) == (1, "b", STOP, "c")
    assert (second.start, second.token_ids, second.finish_reason, second.stop_reason) == (2, [], STOP, 2)
    bench.core.release(Release(RID, 2))
    assert bench.take()[None] == [Release(RID, 2)]


def test_attach_to_the_unknown_or_by_the_outdated_fails(bench: Bench) -> None:
    bench.core.attach("h", Attach(RID, 1, {}))
    assert only(bench.take()["h"], Failed).code is ErrorCode.NOT_FOUND
    bench.submit(attempt=3)
    bench.take()
    bench.core.attach("h", Attach(RID, 3, {}))
    assert only(bench.take()["h"], Failed).code is ErrorCode.ABORTED
    bench.core.attach("h", Attach(RID, 4, {0: 1}))
    assert only(bench.take()["h"], Failed).code is ErrorCode.NOT_FOUND


def test_a_failure_waits_for_whoever_attaches(bench: Bench) -> None:
    bench.submit()
    bench.core.gateway_down("g")
    bench.core.failed(Failed(RID, 1, ErrorCode.INTERNAL, "broke"))
    bench.take()
    bench.core.attach("h", Attach(RID, 2, {}))
    assert bench.take()["h"][-1] == Failed(RID, 2, ErrorCode.INTERNAL, "broke")
    assert bench.core.num_retained == 0


def test_a_finished_stream_is_kept_until_release_or_grace(bench: Bench) -> None:
    bench.submit()
    bench.output(0, "a", finish_reason=LENGTH)
    bench.take()
    assert bench.core.num_unfinished == 0 and bench.core.num_retained == 1
    bench.now += 31
    bench.core.tick()
    assert bench.take()[None] == [Release(RID, 1)] and bench.core.num_retained == 0


def test_what_is_retained_for_nobody_is_bounded(tiny: LoadedTokenizer, model_info: MakeModel) -> None:
    bench = Bench(tiny, model_info(), max_retained_bytes=40 * 250)
    for request_id in (1, 2, 3):
        bench.submit(request_id=request_id)
        bench.output(0, "x" * 97, request_id=request_id, finish_reason=LENGTH)
        bench.now += 1
    bench.take()
    bench.core.tick()
    assert bench.take()[None] == [Release(1, 1)]


def test_a_gateways_death_drops_what_it_had_not_yet_got_accepted(bench: Bench) -> None:
    bench.core.submit("g", Submit(RID, 1, TextPrompt("x"), SamplingParams(), TextParams(), [ChoicePast(0)]))
    bench.core.gateway_down("g")
    bench.core.encoded(RID, 1, PROMPT)
    assert bench.core.take() == [] and bench.core.num_unfinished == 0


# --- log-probabilities and calls ------------------------------------------------------------------


def lp(token_id: int, *top: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, [(t, -2.0) for t in top])


def test_logprobs_carry_bytes_and_survive_attach(bench: Bench) -> None:
    bench.submit(sampling=SamplingParams(max_tokens=9, logprobs=1), choices=[ChoicePast(0, bench.ids("p"))])
    bench.take()
    a, b, c = bench.ids("abc")
    bench.output(1, [a, b], logprobs=[lp(a, b), lp(b, 3 + 0xF0)])
    (delta,) = bench.deltas()
    assert delta.logprobs is not None
    assert [entry.text for entry in delta.logprobs] == [[b"a", b"b"], [b"b", b"\xf0"]]
    bench.core.attach("h", Attach(RID, 2, {}))
    bare, told = only(bench.take()["h"], Deltas).items
    assert (bare.start, bare.text, bare.logprobs) == (0, "p", None)
    assert (told.start, told.text, [entry.token_id for entry in told.logprobs]) == (1, "ab", [a, b])
    bench.output(3, [c], attempt=2, logprobs=[lp(c)])
    assert bench.deltas("h")[0].logprobs == [TokenLogprobs(c, -1.0, 1, [], [b"c"])]


def test_logprobs_end_where_a_stop_string_does(bench: Bench) -> None:
    bench.submit(sampling=SamplingParams(max_tokens=9, logprobs=0), text=TextParams(stop=["b"]))
    bench.take()
    bench.output(0, "abc", logprobs=[lp(i) for i in bench.ids("abc")])
    (delta,) = only(bench.take()["g"], Deltas).items
    assert len(delta.token_ids) == len(delta.logprobs) == 2


def test_prompt_logprobs_go_on_where_they_stopped(bench: Bench) -> None:
    bench.submit(sampling=SamplingParams(max_tokens=1, prompt_logprobs=0))
    bench.take()
    bench.core.prompt_logprobs(PromptLogprobs(RID, 1, 0, [None, lp(6)]))
    (message,) = bench.take()["g"]
    assert message.start == 0 and message.entries[1].text == [bytes([3])]
    bench.core.scheduler_down()
    bench.core.scheduler_up()
    assert bench.take()[None][0].prompt_logprobs_start == 2
    bench.core.prompt_logprobs(PromptLogprobs(RID, 1, 1, [lp(6), lp(7)]))
    (message,) = bench.take()["g"]
    assert message.start == 2 and len(message.entries) == 1
    bench.core.attach("h", Attach(RID, 2, {}))
    message = only(bench.take()["h"], PromptLogprobs)
    assert message.start == 0 and len(message.entries) == 3


def test_loads_are_asked_of_the_scheduler(bench: Bench) -> None:
    bench.core.call_scheduler("g", GetLoads(77))
    bench.core.call_scheduler("h", GetLoads(77))
    _, second = bench.take()[None]
    bench.core.call_answered(Loads(second.call_id, *range(9)))
    assert bench.take()["h"] == [Loads(77, *range(9))]
    bench.core.scheduler_down()
    assert only(bench.take()["g"], CallFailed).code is ErrorCode.UNAVAILABLE
    bench.core.call_scheduler("g", GetLoads(78))
    assert bench.take()["g"] == [CallFailed(78, ErrorCode.UNAVAILABLE, "there is no scheduler")]


def test_a_call_that_is_not_answered_fails(bench: Bench) -> None:
    bench.core.call_scheduler("g", GetLoads(77))
    bench.take()
    bench.now += 6
    bench.core.tick()
    assert only(bench.take()["g"], CallFailed).call_id == 77


# --- all at once ----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_happens_the_client_gets_the_undisturbed_text(
    tiny: LoadedTokenizer, model_info: MakeModel, data: st.DataObject
) -> None:
    """A scheduler that loses, repeats and restarts, gateways that die or submit again: each client's
    tokens are told once, in order, and its text is the text of an undisturbed run."""
    token = st.one_of(st.sampled_from([100, 101, 3 + 0xF0, 3 + 0x9F]), st.integers(2, 265))
    ids = data.draw(st.lists(token, min_size=1, max_size=20))
    text = TextParams(stop=data.draw(st.lists(st.text("ab", min_size=1, max_size=3), max_size=1)))
    quiet = Bench(tiny, model_info())
    quiet.submit(text=text)
    quiet.output(0, ids, finish_reason=LENGTH)
    (expected,) = only(quiet.take()["g"], Deltas).items

    bench = Bench(tiny, model_info())
    attempt, gateway = 1, "g"
    got_ids: list[int] = []
    got_text = ""
    past: list[int] | None = None  # what the scheduler was told last; None: it knows nothing
    finish: Delta | None = None
    bench.submit(text=text)

    def read() -> None:
        nonlocal past, finish, got_text
        for to, message in bench.core.take():
            if isinstance(message, NewRequest):
                past = message.choices[0].output_token_ids[:]
            elif isinstance(message, Deltas) and to == gateway:
                for delta in message.items:
                    assert finish is None and delta.attempt == attempt and delta.start == len(got_ids)
                    got_ids.extend(delta.token_ids)
                    got_text += delta.text
                    assert delta.num_text_bytes == len(got_text.encode())
                    finish = delta if delta.finish_reason else None

    for _ in range(200):
        read()
        if finish is not None:
            break
        event = data.draw(st.sampled_from(["step", "step", "step", "lose", "repeat", "restart", "attach", "submit"]))
        if event == "restart":
            bench.core.scheduler_down()
            past = None
            bench.core.scheduler_up()
        elif event in ("attach", "submit"):
            attempt += 1
            bench.core.gateway_down(gateway)
            gateway = "h" if gateway == "g" else "g"
            bench.core.gateway_up(gateway)
            if event == "attach":
                bench.core.attach(gateway, Attach(RID, attempt, {0: len(got_ids)}))
            else:
                choices = [ChoicePast(0, got_ids[:], len(got_text.encode()))]
                bench.submit(attempt=attempt, gateway=gateway, choices=choices, text=text)
        elif past is not None:
            start = max(0, len(past) - 2) if event == "repeat" else len(past)
            end = min(len(ids), start + data.draw(st.integers(1, 4)))
            if event != "lose":
                bench.output(start, ids[start:end], attempt=attempt, finish_reason=LENGTH if end == len(ids) else None)
            past = ids[:end] if end < len(ids) or event != "lose" else past
    else:
        # Whatever was drawn, an undisturbed scheduler brings it to its end.
        bench.core.scheduler_up()
        read()
        if finish is None and past is not None:
            bench.output(len(past), ids[len(past) :], attempt=attempt, finish_reason=LENGTH)
            read()
    assert finish is not None
    assert (got_ids, got_text) == (expected.token_ids, expected.text)
    assert (finish.finish_reason, finish.stop_reason) == (expected.finish_reason, expected.stop_reason)


# --- nobody to wait for -----------------------------------------------------------------------


def test_requests_do_not_wait_for_a_scheduler_for_ever(tiny: LoadedTokenizer, model_info: MakeModel) -> None:
    bench = Bench(tiny, model_info(), recovery_deadline=20.0)
    bench.submit(request_id=1)
    bench.submit(request_id=2, gateway="h")
    bench.output(0, "x", request_id=2, finish_reason=LENGTH)
    bench.core.scheduler_down()
    bench.take()
    bench.now += 19.9
    bench.core.tick()
    assert bench.core.take() == []
    bench.now += 0.1
    bench.core.tick()
    sent = bench.take()
    failed = only(sent["g"], Failed)
    assert (failed.request_id, failed.code) == (1, ErrorCode.UNAVAILABLE) and "20 s" in failed.message
    assert sent["h"] == [] and bench.core.num_retained == 1
    bench.core.scheduler_up()
    assert bench.take()[None] == []


def test_a_drain_does_not_wait_for_a_gateway_that_is_gone(bench: Bench) -> None:
    bench.submit(request_id=1)
    bench.submit(request_id=2, gateway="h")
    assert bench.core.num_owed == 2
    bench.core.gateway_down("g")
    assert (bench.core.num_owed, bench.core.num_unfinished) == (1, 2)
    bench.output(0, "x", request_id=2, finish_reason=LENGTH)
    assert bench.core.num_owed == 0
