"""Whose turn it is: what each policy promises, and what holds under all of them."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from quartet.services.scheduler.policies.fair import MAX_TENANTS
from quartet.services.scheduler.request import RequestStatus

MakeSim = Callable[..., Any]
BUILT_IN = ["fcfs", "priority", "fair", "srf"]
ANY = [*BUILT_IN, "support.policies:Arbitrary", "support.policies:NewestFirst"]


def step(sim: Any, times: int = 1, seconds: float = 0.1) -> None:
    for _ in range(times):
        sim.schedule()
        sim.step()
        sim.now += seconds


@pytest.mark.parametrize("policy", ANY)
def test_the_preempted_come_first_a_bounded_number_of_times(
    make_sim: MakeSim, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C16: steady arrivals over a pool for about two, each of which the policy may prefer to those before."""
    sim = make_sim(model={"num_blocks": 16, "max_model_len": 64}, policy=policy)
    state, admit = sim.core.state, sim.core.state.admit

    def checked_admit(request: Any, hits: Any) -> None:
        assert request.status is RequestStatus.PREEMPTED or not state.preempted, "it passes a preempted one"
        admit(request, hits)

    monkeypatch.setattr(state, "admit", checked_admit)
    asked: list[Any] = []
    most = 0
    for i in range(900):
        if i % 9 == 0:
            asked.append(sim.ask([3 + i] * 6, max_tokens=26, priority=-i, tenant=str(i % 3)))
        step(sim)
        most = max([most, *(r.num_preemptions for r in state.preempted)])
    sim.run()
    for a in asked:
        sim.check_finished(a)
    assert state.totals.preemptions > 0 and most <= math.log2(16)


def test_an_old_one_is_not_taken_again_and_again(make_sim: MakeSim) -> None:
    """Each newcomer goes before it, and would have its blocks each time."""
    sim = make_sim(model={"num_blocks": 16, "max_model_len": 64}, policy="support.policies:NewestFirst")
    old = sim.ask([5] * 4, max_tokens=50)
    step(sim, 2)
    (request,) = sim.core.state.running
    for i in range(400):
        if old.done:
            break
        if len(sim.core.state.waiting) < 2:
            sim.ask([6 + i] * 4, max_tokens=40)
        step(sim)
    assert old.done and 1 <= request.num_preemptions <= math.log2(16)


# --- fair ---------------------------------------------------------------------------------------

ROWS = 4
FAIR = {"max_num_seqs": ROWS, "num_blocks": 200, "max_model_len": 128}


class Meter:
    """What each tenant was served since the meter began, as a client could tell."""

    def __init__(self, sim: Any, input_cost: float = 1.0, output_cost: float = 2.0) -> None:
        self.sim, self.input_cost, self.output_cost = sim, input_cost, output_cost
        self.start = {tenant: self._total(tenant) for tenant in "ab"}

    def _total(self, tenant: str) -> float:
        total = 0.0
        for asked in self.sim.asked.values():
            if asked.message.tenant == tenant:
                group = self.sim.core.ledger.groups.get(asked.message.request_id)
                started = asked.done or (group is not None and group.choices[0].was_scheduled)
                total += self.input_cost * len(asked.message.prompt_token_ids) * started
                total += self.output_cost * len(asked.outputs[0])
        return total

    def served(self, tenant: str) -> float:
        return self._total(tenant) - self.start[tenant]


def flood(sim: Any, tenant: str, count: int, num_prompt_tokens: int = 4, max_tokens: int = 8) -> list[Any]:
    prompts = [[3 + ord(tenant), i + 3, *[7] * (num_prompt_tokens - 2)] for i in range(count)]
    return [sim.ask(prompt, tenant=tenant, max_tokens=max_tokens) for prompt in prompts]


def backlogged(sim: Any) -> bool:
    return {r.group.tenant for r in sim.core.state.waiting} == {"a", "b"}


def largest_gap(sim: Any, meter: Meter, weight_of_a: float = 1.0) -> float:
    """Over all moments while both have requests that wait."""
    gap = 0.0
    while backlogged(sim):
        step(sim)
        gap = max(gap, abs(meter.served("a") / weight_of_a - meter.served("b")))
    return gap


def vtc_bound(num_prompt_tokens: int, max_tokens: int, input_cost: float = 1.0, output_cost: float = 2.0) -> float:
    """Theorem 4.4 of the paper: M is the most output tokens that those running can still bring."""
    return 2 * max(input_cost * num_prompt_tokens, output_cost * ROWS * max_tokens)


@pytest.mark.parametrize("shape_of_b", [(4, 8), (40, 2), (3, 16)])
def test_a_flood_takes_no_more_than_its_share(make_sim: MakeSim, shape_of_b: tuple[int, int]) -> None:
    gaps = {}
    for policy in ("fair", "fcfs"):
        sim = make_sim(model=FAIR, policy=policy, enable_prefix_caching=False)
        asked = flood(sim, "a", 150) + flood(sim, "b", 40, *shape_of_b)
        meter = Meter(sim)
        gaps[policy] = largest_gap(sim, meter)
        sim.run()
        for a in asked:
            sim.check_finished(a)
    assert gaps["fair"] <= vtc_bound(40, 16) < gaps["fcfs"]
    assert gaps["fair"] <= vtc_bound(max(4, shape_of_b[0]), max(8, shape_of_b[1]))


def test_a_tenant_of_more_weight_has_more(make_sim: MakeSim) -> None:
    sim = make_sim(model=FAIR, policy="fair", policy_options=["weight.a=3"], enable_prefix_caching=False)
    flood(sim, "a", 150), flood(sim, "b", 50)
    meter = Meter(sim)
    assert largest_gap(sim, meter, weight_of_a=3) <= vtc_bound(4, 8)
    assert 2.5 < meter.served("a") / meter.served("b") < 3.5


def test_costs_are_what_is_shared(make_sim: MakeSim) -> None:
    """With output free of charge but for a trifle, prompts are what is shared."""
    options = ["input_cost=1", "output_cost=0.001"]
    sim = make_sim(model=FAIR, policy="fair", policy_options=options, enable_prefix_caching=False)
    flood(sim, "a", 100, 4, 8), flood(sim, "b", 20, 40, 8)
    meter = Meter(sim, 1, 0.001)
    assert largest_gap(sim, meter) <= vtc_bound(40, 8, 1, 0.001)
    assert meter.served("a") > 300


@pytest.mark.parametrize("saturated", [True, False])
def test_who_comes_late_is_neither_starved_nor_given_credit(make_sim: MakeSim, saturated: bool) -> None:
    """`saturated`: the other has kept requests waiting meanwhile, or has never had to."""
    sim = make_sim(model=FAIR, policy="fair", enable_prefix_caching=False)
    flood(sim, "a", 150 if saturated else 0)
    for absence in range(3):
        for _ in range(50):
            if not saturated and not sim.core.state.num_unfinished:
                flood(sim, "a", ROWS)
            step(sim)
        own = flood(sim, "b", 20)
        flood(sim, "a", 40)
        meter = Meter(sim)
        step(sim, 20)
        assert own[0].outputs[0], f"starved after absence {absence}"
        assert largest_gap(sim, meter) <= vtc_bound(4, 8), f"credit after absence {absence}"
        while not all(a.done for a in own):
            step(sim)


def test_nothing_idles_while_anyone_waits(make_sim: MakeSim) -> None:
    steps = {}
    for policy in ("fair", "fcfs"):
        sim = make_sim(model=FAIR, policy=policy, enable_prefix_caching=False)
        flood(sim, "b", 8), flood(sim, "a", 80)
        steps[policy] = sim.run()
    assert steps["fair"] == steps["fcfs"]


def test_short_prompts_of_another_do_not_use_the_reserve_to_pass(
    make_sim: MakeSim, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = make_sim(model=FAIR, policy="fair", short_prompt_share=0.5, enable_prefix_caching=False)
    state, policy, admit = sim.core.state, sim.core.state.policy, sim.core.state.admit
    admitted = []

    def checked_admit(request: Any, hits: Any) -> None:
        tenant = request.group.tenant
        if tenant == "a" and any(r.group.tenant == "b" for r in state.waiting):
            assert policy.counter("a") <= policy.counter("b")
        admitted.append(tenant)
        admit(request, hits)

    flood(sim, "a", ROWS, max_tokens=80)
    step(sim, 3)
    long = [sim.ask([9, i, *[9] * 40], tenant="b", max_tokens=1) for i in range(3 * ROWS)]
    flood(sim, "a", 20)
    monkeypatch.setattr(state, "admit", checked_admit)
    while not all(a.done for a in long):
        step(sim)
    assert set(admitted) == {"a", "b"}


def test_memory_is_taken_from_who_has_had_most(make_sim: MakeSim) -> None:
    sim = make_sim(model={"num_blocks": 24, "max_model_len": 80}, policy="fair", enable_prefix_caching=False)
    heavy = [sim.ask([5, i], tenant="a", max_tokens=60) for i in range(3)]
    step(sim, 12)
    light = sim.ask([6, 7], tenant="b", max_tokens=40)
    while not light.done:
        step(sim)
        assert all(r.group.tenant == "a" for r in sim.core.state.preempted)
    assert sim.core.state.totals.preemptions > 0
    sim.run()
    for a in heavy:
        sim.check_finished(a)


def test_prompt_tokens_in_the_cache_cost_nothing(make_sim: MakeSim) -> None:
    sim = make_sim(policy="fair")
    for _ in range(2):
        sim.ask([5] * 33, tenant="a", max_tokens=1)
        sim.run()
    assert sim.core.state.policy.counter("a") == (33 + 2) + (33 - 32 + 2)


def test_a_new_scheduler_charges_only_what_is_new(make_sim: MakeSim) -> None:
    sim = make_sim(policy="fair", enable_prefix_caching=False)
    asked = sim.ask([5] * 20, tenant="a", max_tokens=10)
    step(sim, 5)
    had = len(asked.outputs[0])
    sim.scheduler_dies()
    sim.run()
    sim.check_finished(asked)
    assert sim.core.state.policy.counter("a") == 2 * (10 - had)


def test_tenants_that_are_gone_are_forgotten_in_time(make_sim: MakeSim) -> None:
    sim = make_sim(policy="fair")
    for i in range(MAX_TENANTS + 50):
        sim.abort(sim.ask([5], tenant=str(i)))
    steady = sim.ask([5], tenant="steady")
    policy = sim.core.state.policy
    assert len(policy._counters) <= MAX_TENANTS and len(policy._num_waiting) == 1
    sim.run()
    sim.check_finished(steady)
    assert not policy._num_waiting


# --- srf ----------------------------------------------------------------------------------------


def test_a_short_one_overtakes(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_num_seqs": 1}, policy="srf")
    running = sim.ask([5], max_tokens=6)
    step(sim)
    long, short = sim.ask([6] * 10, max_tokens=60), sim.ask([7] * 10, max_tokens=6)
    shorter = sim.ask([8] * 2, max_tokens=6)
    ended = []
    while len(ended) < 4:
        step(sim)
        ended += [a for a in (running, long, short, shorter) if a.done and a not in ended]
    assert ended == [running, shorter, short, long]


@pytest.mark.parametrize(("ageing", "starves"), [(10, False), (0.01, True)])
def test_a_long_one_grows_old_and_has_its_turn(make_sim: MakeSim, ageing: float, starves: bool) -> None:
    """100 tokens at 10 a second: after 10 seconds nothing that comes goes before it."""
    sim = make_sim(model={"max_num_seqs": 1}, policy="srf", policy_options=[f"ageing={ageing}"])
    sim.ask([5], max_tokens=6)
    step(sim)
    long = sim.ask([6] * 50, max_tokens=51)
    shorts: list[Any] = []
    while not long.outputs[0] and sim.now < 60:
        if len(sim.core.state.waiting) < 3:
            shorts.append(sim.ask([7, 3 + len(shorts)], max_tokens=6))
        step(sim)
    assert (sim.now > 59) if starves else (5 < sim.now < 15)
    sim.run()
    for asked in (long, *shorts):
        sim.check_finished(asked)


@pytest.mark.parametrize(("older", "after", "younger", "taken"), [(50, 40, 45, 1), (58, 36, 12, 0)])
def test_memory_is_taken_from_who_has_most_left(
    make_sim: MakeSim, older: int, after: int, younger: int, taken: int
) -> None:
    """Left now: the older one had more when it came, and is nearly done or not."""
    options = {"policy": "srf", "policy_options": ["ageing=0.01"], "enable_prefix_caching": False}
    sim = make_sim(model={"num_blocks": 16, "max_model_len": 64}, **options)
    asked = [sim.ask([5] * 4, max_tokens=older)]
    step(sim, after)
    asked.append(sim.ask([6] * 4, max_tokens=younger))
    while not asked[1 - taken].done:
        step(sim)
        assert all(r.request_id == asked[taken].message.request_id for r in sim.core.state.preempted)
    assert sim.core.state.totals.preemptions > 0
    sim.run()
    sim.check_finished(asked[taken])


# --- one's own ----------------------------------------------------------------------------------


def test_the_example_in_the_docs(make_sim: MakeSim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[3] / "docs" / "examples")
    options = {"policy": "batch_last:BatchLast", "policy_options": ["patience=5"]}
    sim = make_sim(model={"max_num_seqs": 1}, **options)
    running = sim.ask([5], max_tokens=6)
    step(sim)
    batch = sim.ask([6], tenant="batch-nightly", max_tokens=2)
    step(sim, 2)
    soon = sim.ask([7], tenant="someone", max_tokens=2)
    sim.now += 6
    late = sim.ask([8], tenant="someone", max_tokens=2)
    ended = []
    while len(ended) < 4:
        step(sim)
        ended += [a for a in (running, batch, soon, late) if a.done and a not in ended]
    assert ended == [running, soon, batch, late]
