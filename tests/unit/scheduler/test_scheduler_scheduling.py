"""The token budget, short prompts behind long ones, and preemption (cases C1, C8, C10, C13, C15, C16)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quartet.services.scheduler.request import RequestStatus
from quartet.services.scheduler.schedule import StepScheduler
from quartet.shared.messages import Abort, Finish, FinishReason, GetLoads, Release

MakeSim = Callable[..., Any]


def step(sim: Any, times: int = 1) -> None:
    for _ in range(times):
        sim.schedule()
        sim.step()


@pytest.mark.parametrize("length", [63, 64, 65, 200])
def test_a_prompt_longer_than_the_budget_is_cut(make_sim: MakeSim, length: int) -> None:
    """C1"""
    roomy = make_sim(model={"max_model_len": 512, "num_blocks": 256, "max_num_batched_tokens": 512})
    whole = roomy.ask(list(range(3, 3 + length)))
    roomy.run()
    for behind_another in (False, True):
        sim = make_sim(model={"max_model_len": 512, "num_blocks": 256, "max_num_batched_tokens": 64})
        if behind_another:
            sim.ask([9] * 150)
        asked = sim.ask(list(range(3, 3 + length)))
        sim.run()
        sim.check_finished(asked)
        assert asked.outputs == whole.outputs
        assert sim.executor.largest_plan <= 64


def test_a_long_prefill_starves_nobody(make_sim: MakeSim) -> None:
    """C15, I5: A decodes, B brings 6,000 tokens, C a short prompt one step later."""
    sim = make_sim(
        model={"max_model_len": 8192, "num_blocks": 4096, "max_num_batched_tokens": 256}, short_prompt_share=0.25
    )
    a = sim.ask([5], max_tokens=60)
    step(sim, 4)
    b = sim.ask([6] * 6000, max_tokens=2)
    step(sim)
    c = sim.ask([7] * 10, max_tokens=5)
    got = len(a.outputs[0])
    for steps in range(1, 8):
        step(sim)
        assert len(a.outputs[0]) == got + steps, "a decode missed a step"
    assert c.outputs[0], "a short prompt waits for a long one"
    assert not b.outputs[0]
    sim.run()
    for asked in (a, b, c):
        sim.check_finished(asked)


def test_without_short_prompts_the_whole_budget_is_used(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_model_len": 512, "num_blocks": 256}, short_prompt_share=0.25)
    sim.ask([6] * 320, max_tokens=1)
    assert sim.run() == 10
    assert {sum(work.values()) for _, work in sim.executor.plan_log} == {32}


@pytest.mark.parametrize(("share", "most"), [(0.75, 24), (0.5, 16), (1.0, 32)])
def test_steps_are_shorter_while_requests_decode(make_sim: MakeSim, share: float, most: int) -> None:
    sim = make_sim(model={"max_model_len": 512, "num_blocks": 256}, mixed_step_share=share)
    a = sim.ask([5], max_tokens=60)
    step(sim, 4)
    before = len(sim.executor.plan_log)
    b = sim.ask([6] * 320, max_tokens=1)
    while not b.done:
        step(sim)
    plans = [sum(work.values()) for _, work in sim.executor.plan_log[before:]]
    assert max(plans) == most and plans.count(most) >= 320 // most - 1
    sim.run()
    for asked in (a, b):
        sim.check_finished(asked)


def test_many_decodes_do_not_starve_a_prompt(make_sim: MakeSim) -> None:
    """Their tokens alone are more than the share."""
    model = {"max_model_len": 512, "num_blocks": 256, "max_num_batched_tokens": 16, "max_num_seqs": 16}
    sim = make_sim(model=model, mixed_step_share=0.5)
    decoding = [sim.ask([5 + i], max_tokens=200) for i in range(14)]
    step(sim, 20)
    prompt = sim.ask([40] * 60, max_tokens=1)
    step(sim, 35)
    assert prompt.done and not any(asked.done for asked in decoding)
    assert sim.executor.largest_plan == 16
    sim.run()


def test_a_stream_of_short_prompts_does_not_starve_the_long_one(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_model_len": 512, "num_blocks": 256, "max_num_seqs": 8}, short_prompt_share=0.5)
    long = sim.ask([6] * 320, max_tokens=1)
    for i in range(60):
        if long.done:
            break
        sim.ask([8 + i] * 8, max_tokens=1)
        sim.ask([8 + i] * 9, max_tokens=1)
        step(sim)
    assert long.done
    sim.run()
    sim.check_finished(long)


def test_decodes_come_before_prefills_in_a_tiny_budget(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_num_batched_tokens": 4, "max_num_seqs": 8})
    assert sim.core.state.max_num_seqs == 4
    decodes = [sim.ask([5, i], max_tokens=30) for i in range(3)]
    step(sim, 8)
    got = [len(a.outputs[0]) for a in decodes]
    long = sim.ask([6] * 50, max_tokens=1)
    step(sim, 6)
    assert [len(a.outputs[0]) - g for a, g in zip(decodes, got, strict=True)] == [6, 6, 6]
    sim.run()
    sim.check_finished(long)


def test_priority_goes_first(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_num_seqs": 1}, policy="priority")
    low, high = sim.ask([5], priority=5, max_tokens=3), sim.ask([6], priority=-1, max_tokens=3)
    while not high.done:
        assert not low.outputs[0]
        step(sim)
    sim.run()
    sim.check_finished(low)


def test_first_come_first_served(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_num_seqs": 1})
    asked = [sim.ask([5, i], max_tokens=3) for i in range(4)]
    order = []
    while len(order) < 4:
        step(sim)
        order += [i for i, a in enumerate(asked) if a.done and i not in order]
    assert order == [0, 1, 2, 3]


def test_two_plans_are_in_flight_and_no_more(make_sim: MakeSim) -> None:
    sim = make_sim()
    sim.ask([5], max_tokens=10)
    sim.schedule()
    assert len(sim.executor.queue) == 2
    sim.schedule()
    assert len(sim.executor.queue) == 2


def test_nothing_is_computed_past_a_known_end(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = sim.ask([5, 6, 7], max_tokens=4)
    sim.run()
    sim.check_finished(asked)
    assert sim.executor.num_computed_tokens == 3 + 3


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_exhausted_memory_loses_no_token(make_sim: MakeSim, policy: str) -> None:
    """C8: a pool for two, six at once, two aborted on the way."""
    for seed in range(20):
        sim = make_sim(model={"num_blocks": 16, "max_model_len": 64}, seed=seed, policy=policy)
        asked = [sim.ask([5 + i] * 4, max_tokens=28) for i in range(6)]
        leave_at = {sim.random.randrange(60): asked[i] for i in sim.random.sample(range(6), 2)}
        for i in range(60):
            step(sim)
            if i in leave_at and not leave_at[i].done:
                sim.abort(leave_at[i])
        sim.run()
        for a in asked:
            if not a.aborted:
                sim.check_finished(a)
        sim.check_idle()
        assert sim.core.state.totals.preemptions > 0


def test_a_preempted_request_comes_back_first_and_not_forever(make_sim: MakeSim) -> None:
    """C16: steady arrivals over a pool for about two."""
    sim = make_sim(model={"num_blocks": 16, "max_model_len": 64})
    asked: list[Any] = []
    most = 0
    for i in range(900):
        if i % 9 == 0:
            asked.append(sim.ask([3 + i] * 6, max_tokens=26))
        step(sim)
        for request in sim.core.state.preempted:
            most = max(most, request.num_preemptions)
            running = list(sim.core.state.running)
            assert all(r.policy_key < request.policy_key for r in running), "a younger one took its place"
    sim.run()
    for a in asked:
        sim.check_finished(a)
    assert 1 <= most <= 4


def test_two_half_done_prefills_do_not_wait_for_each_other(make_sim: MakeSim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever let both in, as suspects that run alone are."""
    monkeypatch.setattr(StepScheduler, "_fits", lambda *_: True)
    sim = make_sim(model={"num_blocks": 14, "max_num_batched_tokens": 8}, short_prompt_share=0.5)
    older, younger = sim.ask([6] * 40, max_tokens=1), sim.ask([5] * 30, max_tokens=1)
    sim.run()
    sim.check_finished(older)
    sim.check_finished(younger)
    assert sim.core.state.totals.preemptions == 1


def test_a_preempted_request_waits_for_its_tokens_in_flight(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = sim.ask([5] * 5, max_tokens=12)
    step(sim, 3)
    assert len(sim.executor.queue) == 1
    (request,) = sim.core.state.running
    sim.core.state.preempt(request)
    sim.schedule()
    assert not sim.core.state.running
    sim.run()
    sim.check_finished(asked)


@pytest.mark.parametrize(("times", "comes_back"), [(1, True), (3, True), (4, False)])
def test_the_margin_doubles_with_each_preemption(make_sim: MakeSim, times: int, comes_back: bool) -> None:
    sim = make_sim(model={"num_blocks": 16, "max_model_len": 64})
    first, second = sim.ask([5] * 8, max_tokens=50), sim.ask([6] * 4, max_tokens=20)
    step(sim, 2)
    (victim,) = [r for r in sim.core.state.running if r.request_id == second.message.request_id]
    sim.core.state.preempt(victim)
    victim.num_preemptions = times
    step(sim, 3)
    # Some 13 blocks are free beside the first: room for a margin of 8, not of 16.
    assert (victim.status is RequestStatus.RUNNING) == comes_back
    sim.run()
    sim.check_finished(first)
    sim.check_finished(second)


def test_aborted_streams_leave_nothing(make_sim: MakeSim) -> None:
    """C10"""
    sim = make_sim(model={"num_blocks": 24, "max_num_seqs": 4})
    for i in range(400):
        asked = sim.ask([5, i % 900], max_tokens=50)
        while not asked.outputs[0]:
            step(sim)
        sim.abort(asked)
    last = sim.ask([5, 6])
    sim.run()
    sim.check_finished(last)
    sim.event(sim.core.get_loads("t0", GetLoads(7)))
    loads = sim.loads
    assert (loads.call_id, loads.num_running, loads.num_waiting, loads.num_preempted) == (7, 0, 0, 0)
    assert loads.num_free_blocks == loads.num_blocks == 24 and loads.num_requests_retained == 0


def test_unknown_ids_are_ignored(make_sim: MakeSim) -> None:
    """C13"""
    sim = make_sim()
    steady = sim.ask([5], max_tokens=100)
    for i in range(200):
        asked = sim.ask([6, i])
        sim.abort(asked)
        for message in (Abort(asked.message.request_id, 1), Abort(i, 1)):
            sim.event(sim.core.abort(message))
        sim.event(sim.core.finish(Finish(asked.message.request_id, 1, 0, 1)))
        sim.event(sim.core.release(Release(asked.message.request_id, 1)))
        step(sim)
    sim.run()
    sim.check_finished(steady)
    sim.check_idle()


def test_an_abort_drops_what_is_in_flight(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = sim.ask([5], max_tokens=20)
    step(sim, 3)
    sim.schedule()
    sim.abort(asked)
    assert sim.core.state.kv.num_free_blocks == sim.model.num_blocks
    sim.run()
    sim.check_idle()


def test_a_full_house_of_rows_turns_over(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_num_seqs": 1})
    asked = [sim.ask([5, i], max_tokens=1) for i in range(5)]
    sim.run()
    for a in asked:
        sim.check_finished(a)


def test_eos_stop_ids_and_min_tokens(make_sim: MakeSim) -> None:
    sim = make_sim()
    plain = sim.ask([5], max_tokens=12)
    sim.run()
    third = plain.outputs[0][2]
    assert third not in plain.outputs[0][:2]
    stopped = sim.ask([5], max_tokens=12, stop_token_ids=[third])
    later = sim.ask([5], max_tokens=12, stop_token_ids=[third], min_tokens=5)
    sim.run()
    assert stopped.outputs[0] == plain.outputs[0][:3] and stopped.finished[0] is FinishReason.STOP
    assert len(later.outputs[0]) >= 5


def test_scoring_generates_nothing(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_num_batched_tokens": 4})
    asked = sim.ask([5, 6, 7, 8, 9, 10], max_tokens=0, prompt_logprobs=0)
    sim.run()
    assert asked.outputs == {0: []} and asked.finished == {0: FinishReason.LENGTH}
    assert [e and e.token_id for e in asked.prompt_logprobs] == [None, 6, 7, 8, 9, 10]
    sim.check_idle()


def test_prompt_logprobs_go_on_where_they_stopped(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_num_batched_tokens": 4})
    asked = sim.ask(list(range(5, 25)), max_tokens=2, prompt_logprobs=0)
    step(sim, 2)
    assert 0 < len(asked.prompt_logprobs) < 20
    sim.executor_dies()
    sim.executor_up()
    step(sim, 1)
    sim.move(asked, "other")
    sim.run()
    sim.check_finished(asked)
    assert [e and e.token_id for e in asked.prompt_logprobs] == [None, *range(6, 25)]
