"""What the fuzz has found, one case for each kind."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
from fuzz.arena_executor import ExecutorArena, column
from fuzz.arena_gateway import EVIL, GOOD, GatewayArena
from fuzz.world import MODEL

from quartet.services.scheduler.core import EXECUTOR, SchedulerCore
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.shared.messages import (
    Accepted,
    Attached,
    ChoicePast,
    Delta,
    Deltas,
    ErrorCode,
    Failed,
    FinishReason,
    Granted,
    NewRequest,
    PlanRefused,
    PromptLogprobs,
    StepPlan,
    StepResult,
    Submit,
    Takeover,
    TextPrompt,
    TokenLogprobs,
    TokensPrompt,
    encode,
)
from quartet.shared.sampling_params import SamplingParams, TextParams

ABSURD_SAMPLING = [
    {"max_tokens": 2**62},
    {"max_tokens": -1},
    {"min_tokens": 2**63},
    {"top_k": -1},
    {"top_k": 2**64 - 1},
    {"top_p": math.nan},
    {"temperature": math.inf},
    {"temperature": -1.0},
    {"repetition_penalty": 0.0},
    {"presence_penalty": 1e308},
    {"seed": -(2**63)},
    {"seed": 2**64 - 1},
    {"logprobs": -5},
    {"prompt_logprobs": 2**63},
    {"logit_bias": {5: math.nan}},
    {"logit_bias": {-5: 1.0}},
    {"stop_token_ids": [2**62]},
]


def scheduler() -> SchedulerCore:
    core = SchedulerCore(SchedulerSettings(), 1, lambda: 0.0)
    core.owner_up("t")
    core.executor_up(MODEL, 1)
    core.granted(Granted(5, b"", b""))
    return core


def request(**changes: Any) -> NewRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    return msgspec.structs.replace(NewRequest(1, 1, [1, 2, 3], sampling, [], [ChoicePast(0)]), **changes)


@pytest.mark.parametrize("sampling", ABSURD_SAMPLING)
def test_sampling_that_no_executor_can_compute_is_refused(sampling: dict[str, Any]) -> None:
    core = scheduler()
    params = msgspec.structs.replace(SamplingParams(max_tokens=4), **sampling)
    ((_, failed),) = core.new_request("t", request(sampling=params))
    assert isinstance(failed, Failed) and failed.code == ErrorCode.INVALID_ARGUMENT and not core.num_unfinished

    arena = ExecutorArena(random.Random(0))
    arena._send(Takeover(1))
    (granted,) = arena.answers
    assert isinstance(granted, Granted)
    arena.answers.clear()
    row = arena._row(0, [1, 2, 3], [1], **sampling)
    plan = StepPlan(granted.epoch, 0, b"", [row], b"", b"", b"", column([0], 2), column([3]))
    arena._send(plan)
    # The executor has no use for max_tokens and the like, but takes none that cannot be.
    assert isinstance(arena.answers.pop(), PlanRefused)
    arena.settle()


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [2**64 - 1]},
        {"prompt_logprobs_start": -1},
        {"prompt_logprobs_start": 2**62},
        {"choices": [ChoicePast(-1)]},
        {"choices": [ChoicePast(0, [-7])]},
        {"choices": []},
    ],
)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("with_model", [False, True])
def test_a_request_that_cannot_be_is_refused_also_when_it_is_known(
    changes: dict[str, Any], known: bool, with_model: bool
) -> None:
    core = scheduler()
    if not with_model:
        core = SchedulerCore(SchedulerSettings(), 1, lambda: 0.0)
        core.owner_up("t")
    if known:
        core.new_request("t", request())
    effects = core.new_request("t", request(attempt=2, **changes))
    assert any(isinstance(message, Failed) for _, message in effects) and not core.num_unfinished


def test_grants_that_nobody_asked_for_are_ignored() -> None:
    core = scheduler()
    core.new_request("t", request())
    plans = core.schedule()
    for epoch in (5, 4, -1, 0):  # said again, or made up
        assert core.granted(Granted(epoch, b"", b"")) == []
    assert core.granted_epoch == 5 and core.num_in_flight == len(plans) == 2


def test_a_block_table_that_is_cut_short_is_as_good_as_none() -> None:
    for block_ids, hashes in ((b"\1\0\0", b""), (b"\1\0\0\0", bytes(31)), (b"\1\0\0\0", bytes(33))):
        core = SchedulerCore(SchedulerSettings(), 1, lambda: 0.0)
        core.executor_up(MODEL, 1)
        core.granted(Granted(5, block_ids, hashes))
        assert core.granted_epoch == 5 and core.state.kv.pool.num_cached_blocks == 0


def test_a_token_outside_of_the_vocabulary_is_computed_again() -> None:
    core = scheduler()
    core.new_request("t", request())
    (_, plan), _ = core.schedule()
    assert isinstance(plan, StepPlan)
    effects = core.step_result(StepResult(5, plan.step_id, column([MODEL.vocab_size])))
    assert effects == [(EXECUTOR, Takeover(1))] and core.num_unfinished == 1


def test_a_plan_that_names_millions_of_rows_costs_nothing() -> None:
    arena = ExecutorArena(random.Random(0))
    arena._send(Takeover(1))
    (granted,) = arena.answers
    assert isinstance(granted, Granted)
    arena._send(StepPlan(granted.epoch, 0, b"", [], b"", b"", b"\xff" * 2**24, b"", b""))
    answer = arena.answers.pop()
    assert isinstance(answer, PlanRefused) and "more rows than there are" in answer.reason
    arena.settle()


# --- gateway --------------------------------------------------------------------------------------

ENTRY = TokenLogprobs(5, -0.5, 1, [(5, -0.5)])


def stream_at_evil(**sampling: Any) -> tuple[GatewayArena, Any, Submit]:
    """A stream whose tokenizer is about to say something that cannot be."""
    arena = GatewayArena(random.Random(0))
    arena.link._down(arena.link.peers[GOOD], "not there yet")
    from quartet.services.gateway.choice import Choice
    from quartet.services.gateway.stream import Stream

    subscription = arena.table.open(
        lambda i: Stream(i, TextPrompt("x"), SamplingParams(**sampling), TextParams(), [Choice(0)]), lambda: None
    )
    arena.clients[subscription.stream.request_id] = _Anyone()  # type: ignore[union-attr, assignment]
    arena._route()
    (submit,) = arena.evil_submits.values()
    return arena, subscription, submit


class _Anyone:
    only_good = False


def say(arena: GatewayArena, message: Any) -> None:
    arena.link.on_frame(EVIL, EVIL * 2, encode(message))


def delta(submit: Submit, **changes: Any) -> Deltas:
    item = Delta(submit.request_id, submit.attempt, 0, 0, [5], "a", 1)
    return Deltas([msgspec.structs.replace(item, **changes)])


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [-1]},
        {"token_ids": [1, 2**40]},
        {"start": 2**62},
        {"num_text_bytes": 2**63},
        {"num_text_bytes": -5},
        {"num_call_bytes": 2**63},
        {"num_call_bytes": -5},
        {"num_cached_tokens": -1},
        {"finish_reason": FinishReason.STOP, "stop_reason": 2**60},
        {"logprobs": [msgspec.structs.replace(ENTRY, logprob=math.nan)]},
        {"logprobs": [msgspec.structs.replace(ENTRY, top=[(5, math.inf)])]},
        {"logprobs": [msgspec.structs.replace(ENTRY, token_id=-1)]},
        {"logprobs": [msgspec.structs.replace(ENTRY, rank=2**63)]},
    ],
)
def test_a_delta_that_cannot_be_has_the_stream_submitted_again(changes: dict[str, Any]) -> None:
    arena, subscription, submit = stream_at_evil(logprobs=1)
    say(arena, Accepted(submit.request_id, submit.attempt, [1]))
    say(arena, delta(submit, **changes))
    arena._route()
    (again,) = arena.evil_submits.values()
    assert again.attempt > submit.attempt and again.choices == [ChoicePast(0, [], 0, 0)]
    for _ in range(3):
        arena._route()
        (again,) = arena.evil_submits.values()
        say(arena, delta(again, **changes))
    assert subscription.stream.error.code == ErrorCode.INTERNAL


def test_what_comes_before_the_accepted_does_not_hang_the_client() -> None:
    arena, _, submit = stream_at_evil()
    say(arena, delta(submit, finish_reason=FinishReason.LENGTH))
    arena._route()
    (again,) = arena.evil_submits.values()
    assert again.attempt > submit.attempt


@pytest.mark.parametrize("ids", [[], [-1], [2**50]])
def test_an_accepted_that_cannot_be_is_none(ids: list[int]) -> None:
    arena, subscription, submit = stream_at_evil()
    say(arena, Accepted(submit.request_id, submit.attempt, ids))
    assert not subscription.stream.accepted


def test_prompt_logprobs_cannot_outgrow_the_prompt() -> None:
    arena, subscription, submit = stream_at_evil(prompt_logprobs=1)
    say(arena, Accepted(submit.request_id, submit.attempt, [1, 2]))
    say(arena, PromptLogprobs(submit.request_id, submit.attempt, 0, [None, ENTRY, ENTRY]))
    assert subscription.stream.prompt_logprobs == []


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": 12345},  # it would take another stream's place
        {"prompt": TextPrompt("x")},
        {"prompt": TokensPrompt([])},
        {"prompt": TokensPrompt([2**60])},
        {"choices": [ChoicePast(-1)]},
        {"choices": [ChoicePast(0, [-1])]},
        {"choices": [ChoicePast(0, [1], 2**63)]},
        {"choices": [ChoicePast(0, [1], None, 2**63)]},
        {"sampling": SamplingParams(top_p=math.nan)},
        {"prompt_logprobs_start": -1},
    ],
)
def test_an_attached_that_cannot_be_is_no_answer(changes: dict[str, Any]) -> None:
    arena = GatewayArena(random.Random(0))
    subscription = arena.table.attach(777, {}, 0, None, lambda: None)
    arena._route()
    (search,) = arena.evil_searches
    submit = Submit(777, search.attempt, TokensPrompt([1]), SamplingParams(), TextParams(), [ChoicePast(0)])
    say(arena, Attached(777, search.attempt, msgspec.structs.replace(submit, **changes)))
    assert subscription.stream is None and not arena.table.num_open_streams
