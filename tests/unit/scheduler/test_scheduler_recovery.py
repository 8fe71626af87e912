"""Owners, executors and schedulers that die; requests that are added again; poison that is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from quartet.services.scheduler.request import RequestStatus
from quartet.shared.messages import (
    Abort,
    ErrorCode,
    Finish,
    FinishReason,
    Granted,
    PlanRefused,
    Release,
    StepResult,
    Takeover,
)

MakeSim = Callable[..., Any]


def step(sim: Any, times: int = 1) -> None:
    for _ in range(times):
        sim.schedule()
        sim.step()


def only_group(sim: Any) -> Any:
    (group,) = sim.core.ledger.groups.values()
    return group


def test_an_executor_dies_and_streams_go_on(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = [sim.ask([5 + i] * 6, max_tokens=12, n=2) for i in range(3)]
    step(sim, 5)
    sim.executor_dies()
    sim.schedule()
    sim.executor_up()
    sim.run()
    for a in asked:
        sim.check_finished(a)


def test_a_new_scheduler_hits_what_is_still_in_memory(make_sim: MakeSim) -> None:
    sim = make_sim(model={"block_size": 16, "num_blocks": 64, "max_num_batched_tokens": 64})
    asked = [sim.ask([5 + i] * (20 + 7 * i), max_tokens=40) for i in range(4)]
    step(sim, 25)
    assert all(10 < len(a.outputs[0]) < 40 for a in asked)
    sim.schedule()
    computed, delivered = sim.executor.num_computed_tokens, sum(len(a.outputs[0]) for a in asked)
    sim.scheduler_dies()
    sim.run()
    for a in asked:
        sim.check_finished(a)
    rest = 4 * 40 - delivered
    again = sim.executor.num_computed_tokens - computed - rest
    assert again <= 4 * (16 + 2), f"{again} tokens computed again"


def test_a_failed_step_costs_only_what_it_touched(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = sim.ask([5] * 30, max_tokens=20)
    step(sim, 8)
    sim.schedule()
    computed = sim.executor.num_computed_tokens
    sim.step_fails()
    step(sim, 1)
    assert sim.executor.num_computed_tokens - computed < 8, "the prefix was computed again"
    sim.run()
    sim.check_finished(asked)


def test_a_refused_plan_leads_to_a_takeover_and_blames_nobody(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = sim.ask([5] * 6, max_tokens=20)
    for _ in range(4):
        step(sim, 2)
        sim.schedule()
        refusal = PlanRefused(sim.executor.epoch, sim.executor.queue[0].step_id, "simulated")
        sim.event(sim.core.plan_refused(refusal))
        sim.event(sim.core.plan_refused(refusal))  # of an older epoch by now
    assert next(iter(only_group(sim).choices.values())).num_deaths == 0
    sim.run()
    sim.check_finished(asked)


def test_a_result_that_answers_nothing_leads_to_a_takeover(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = sim.ask([5] * 6)
    sim.schedule()
    epoch = sim.executor.epoch
    for wrong in (StepResult(epoch, 7, b""), StepResult(epoch + 1, 0, b""), StepResult(epoch + 2, 0, b"abc")):
        sim.event(sim.core.step_result(StepResult(epoch - 1, 0, b"")))
        sim.event(sim.core.step_result(wrong))
        sim.schedule()
    assert sim.executor.epoch == epoch + 3
    sim.run()
    sim.check_finished(asked)


def test_a_malformed_offer_of_blocks_is_not_believed(make_sim: MakeSim) -> None:
    sim = make_sim(executor=False)
    sim.core.executor_up(sim.model)
    sim.core.granted(Granted(1, b"\1\0\0\0\2\0\0\0", b"x" * 32))
    assert sim.core.state.kv.pool.num_cached_blocks == 0


def test_nan_fails_that_request_only(make_sim: MakeSim) -> None:
    sim = make_sim()
    good, bad = sim.ask([5], max_tokens=9), sim.ask([6], max_tokens=9)
    step(sim, 3)
    (row,) = [r.req_index for r in sim.core.state.running if r.request_id == bad.message.request_id]
    sim.executor.fail_rows.add(row)
    sim.run()
    sim.check_finished(good)
    assert bad.failed.code is ErrorCode.INTERNAL and "NaN" in bad.failed.message
    sim.check_idle()


def test_a_row_whose_structured_output_leads_nowhere_is_the_requests_own_fault(make_sim: MakeSim) -> None:
    sim = make_sim()
    good, bad = sim.ask([5], max_tokens=9), sim.ask([6], max_tokens=9)
    step(sim, 3)
    (row,) = [r.req_index for r in sim.core.state.running if r.request_id == bad.message.request_id]
    sim.executor.fail_rows.add(row)
    sim.executor.invalid_rows.add(row)
    sim.run()
    sim.check_finished(good)
    assert (bad.failed.code, bad.failed.field) == (ErrorCode.INVALID_ARGUMENT, "structured")
    sim.check_idle()


# --- deaths -----------------------------------------------------------------------------------


def die_when(sim: Any, poison: Any, steps: int = 200) -> int:
    """Runs; the executor dies whenever a plan would decode the poison. Gives the number of deaths."""
    deaths = 0
    for _ in range(steps):
        sim.schedule()
        if not sim.executor.queue:
            break
        rows = {r.req_index for r in sim.core.state.running if r.request_id == poison.message.request_id}
        if rows & set(sim.executor._decode_rows(sim.executor.queue[0])):
            deaths += 1
            sim.executor_dies()
            sim.executor_up()
        else:
            sim.step()
    return deaths


def test_poison_is_found_and_takes_nobody_with_it(make_sim: MakeSim) -> None:
    sim = make_sim()
    others = [sim.ask([5 + i] * 5, max_tokens=20) for i in range(3)]
    step(sim, 4)
    poison = sim.ask([99] * 5, max_tokens=20)
    deaths = die_when(sim, poison)
    assert deaths == 3
    assert poison.failed.code is ErrorCode.INTERNAL and "died" in poison.failed.message
    for a in others:
        sim.check_finished(a)
    sim.check_idle()


def test_an_executor_that_dies_often_blames_nobody(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = [sim.ask([5 + i] * 5, max_tokens=40) for i in range(4)]
    for _ in range(8):
        step(sim, 7)
        sim.executor_dies()
        sim.executor_up()
    sim.run()
    for a in asked:
        sim.check_finished(a)


def test_an_executor_that_was_asked_to_leave_or_only_cut_off_blames_nobody(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = sim.ask([5] * 5, max_tokens=30)
    sim.executor_up(incarnation=1)
    for incarnation, planned in ((1, False), (2, True), (2, False), (2, False)):
        step(sim, 3)
        sim.schedule()
        assert sim.core.num_in_flight and not sim.core.state.died
        sim.executor_dies(planned=planned)
        sim.executor_up(incarnation=incarnation)
    sim.schedule()
    sim.executor_dies()
    sim.executor_up(incarnation=3)
    assert [r.num_deaths for r in sim.core.state.died] == [1]
    sim.run()
    sim.check_finished(asked)


def test_requests_do_not_wait_for_an_executor_for_ever(make_sim: MakeSim) -> None:
    sim = make_sim(recovery_deadline=20.0)
    done = sim.ask([5], max_tokens=2)
    sim.run()
    sim.now = 5.0
    sim.executor_dies()
    assert sim.core.next_deadline() is None
    waiting = sim.ask([6], max_tokens=9)
    assert sim.core.next_deadline() == 25.0
    sim.now = 24.9
    sim.event(sim.core.tick())
    assert waiting.failed is None
    sim.now = 25.0
    sim.event(sim.core.tick())
    assert waiting.failed.code is ErrorCode.UNAVAILABLE and "20 s" in waiting.failed.message
    sim.executor_up()
    assert sim.core.next_deadline() is None
    sim.check_finished(done)
    again = sim.ask([7], max_tokens=9)
    sim.run()
    sim.check_finished(again)


def test_an_executor_that_stands_still_counts_as_none(make_sim: MakeSim) -> None:
    sim = make_sim(recovery_deadline=20.0)
    asked = sim.ask([5], max_tokens=9)
    sim.core.executor_stands_still(True)
    assert sim.core.next_deadline() == 20.0
    sim.core.executor_stands_still(False)
    assert sim.core.next_deadline() is None
    sim.run()
    sim.check_finished(asked)


def test_suspects_run_alone_until_they_have_passed_where_they_died(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = [sim.ask([5 + i] * 5, max_tokens=20) for i in range(3)]
    step(sim, 3)
    for _ in range(2):
        sim.schedule()
        sim.executor_dies()
        sim.executor_up()
    assert len(sim.core.state.suspects) == 3
    seen = len(sim.executor.plan_log)
    while sim.core.state.suspects:
        step(sim)
    assert all(len(work) == 1 for _, work in sim.executor.plan_log[seen:][:-2])
    sim.run()
    for a in asked:
        sim.check_finished(a)


# --- owners and attempts ------------------------------------------------------------------------


@pytest.mark.parametrize("lose", [0, 1, 3, 100])
def test_another_owner_gets_what_it_lacks(make_sim: MakeSim, lose: int) -> None:
    sim = make_sim()
    asked = sim.ask([5] * 6, max_tokens=20, n=2, logprobs=0)
    step(sim, 9)
    computed = sim.executor.num_computed_tokens
    sim.owner_dies("t0")
    step(sim, 2)
    sim.move(asked, "t1", lose=lose)
    sim.run()
    sim.check_finished(asked)
    assert sim.executor.num_computed_tokens <= computed + 2 * 20, "known tokens were computed again"


def test_a_past_that_contradicts_wins(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = sim.ask([5] * 6, max_tokens=20)
    step(sim, 6)
    request = next(iter(only_group(sim).choices.values()))
    request.token_ids[-1] ^= 1  # not what was delivered
    sim.move(asked, "t1")
    assert request.status is RequestStatus.DROPPED
    sim.run()
    sim.check_finished(asked)


def test_requests_of_a_dead_owner_end_after_the_grace(make_sim: MakeSim) -> None:
    sim = make_sim(owner_grace=10.0)
    sim.ask([5], max_tokens=200)
    step(sim, 3)
    sim.now = 100.0
    sim.owner_dies("t0")
    assert sim.core.next_deadline() == 110.0
    sim.now = 109.9
    sim.event(sim.core.tick())
    assert sim.core.num_unfinished == 1
    sim.now = 110.0
    sim.event(sim.core.tick())
    assert sim.core.next_deadline() is None
    sim.run()
    sim.check_idle()


def test_a_finished_request_is_retained_until_release(make_sim: MakeSim) -> None:
    sim = make_sim()
    sim.auto_release = False
    asked = sim.ask([5], max_tokens=5)
    sim.run()
    assert sim.core.state.kv.num_free_blocks == sim.model.num_blocks
    asked.finished.clear()
    computed = sim.executor.num_computed_tokens
    sim.owner_dies("t0")
    sim.move(asked, "t1", lose=2)
    assert asked.finished == {0: FinishReason.LENGTH} and sim.executor.num_computed_tokens == computed
    sim.event(sim.core.release(Release(asked.message.request_id, asked.attempt)))
    sim.check_idle()


def test_a_stop_string_is_kept_with_the_choice(make_sim: MakeSim) -> None:
    sim = make_sim()
    sim.auto_release = False
    asked = sim.ask([5], max_tokens=50, n=2)
    step(sim, 10)
    sim.event(sim.core.finish(Finish(asked.message.request_id, 1, 0, 3)))
    del asked.outputs[0][:]
    asked.attempt = 2
    sim.add(asked)
    assert asked.finished == {0: FinishReason.STOP} and len(asked.outputs[0]) == 3
    sim.run()
    assert len(asked.outputs[1]) == 50


def test_a_past_that_is_complete_is_answered_without_a_step(make_sim: MakeSim) -> None:
    donor = make_sim()
    whole = donor.ask([5], max_tokens=6)
    donor.run()
    outputs = whole.outputs[0]
    sim = make_sim()
    full = sim.ask([5], max_tokens=6, pasts={0: outputs})
    stopped = sim.ask([5], max_tokens=9, pasts={0: outputs[:3]}, stop_token_ids=[outputs[2]])
    assert full.finished == {0: FinishReason.LENGTH} and stopped.finished == {0: FinishReason.STOP}
    assert sim.run() == 0
    sim.check_idle()


def test_choices_that_are_no_longer_asked_for_end(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = sim.ask([5], max_tokens=50, n=3)
    step(sim, 6)
    asked.finished[1] = FinishReason.STOP
    sim.move(asked, "t1")
    assert sorted(only_group(sim).choices) == [0, 2]
    sim.run()


def test_lower_attempts_are_ignored(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = sim.ask([5], max_tokens=20)
    step(sim, 3)
    sim.move(asked, "t1")
    request_id = asked.message.request_id
    sim.event(sim.core.abort(Abort(request_id, 1)))
    sim.event(sim.core.release(Release(request_id, 1)))
    sim.event(sim.core.finish(Finish(request_id, 1, 0, 1)))
    sim.event(sim.core.new_request("t0", msgspec.structs.replace(asked.message, attempt=1)))
    assert only_group(sim).owner.key == "t1"
    sim.run()
    sim.check_finished(asked)
    # It stays so when the request is gone.
    asked.attempt = 1
    sim.add(asked)
    assert not sim.core.ledger.groups


def test_a_scheduler_asks_for_the_batch_once_per_executor(make_sim: MakeSim) -> None:
    sim = make_sim(executor=False)
    effects = sim.core.executor_up(sim.model)
    assert [type(message) for _, message in effects] == [Takeover]
    assert sim.core.schedule() == [] and sim.core.granted_epoch is None
