"""Whose turn it is: what each policy promises, and what holds under all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

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
