"""Random lives of the whole line around the core; the simulation checks every event and every token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st


def random_prompt(sim: Any, longest: int) -> list[int]:
    """Often one of a few beginnings, so that blocks are shared."""
    r = sim.random
    length = r.choice([1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, r.randint(1, longest)])
    base = [10 + r.randrange(3)] * length
    if r.random() < 0.5:
        base[r.randrange(length) :] = []
        base += [r.randrange(3, 1000) for _ in range(r.randint(1, 5))]
    return base[:longest]


def random_request(sim: Any, longest: int, max_tokens: int) -> Any:
    r = sim.random
    sampling: dict[str, Any] = {"max_tokens": r.randint(1, max_tokens), "seed": r.randrange(3)}
    if r.random() < 0.3:
        sampling["ignore_eos"] = False
        sampling["stop_token_ids"] = [r.randrange(1000) for _ in range(60)]
        sampling["min_tokens"] = r.randint(0, sampling["max_tokens"])
    if r.random() < 0.2:
        sampling["logprobs"] = 0
    if r.random() < 0.1:
        sampling["prompt_logprobs"] = 0
        sampling["max_tokens"] = r.choice([0, sampling["max_tokens"]])
        sampling["min_tokens"] = 0
    asked = sim.ask(
        random_prompt(sim, longest),
        owner=r.choice(sorted(sim.owners)) if sim.owners else sim.new_owner(),
        n=r.choice([1, 1, 1, 2, 4]),
        salt=r.choice(["", "", "x"]),
        priority=r.randrange(3),
        tenant=r.choice(["", "a", "a", "b"]),
        read=r.random() < 0.9,
        write=r.random() < 0.9,
        **sampling,
    )
    if r.random() < 0.2:
        asked.finish_at = {i: r.randint(1, 6) for i in asked.outputs}
    return asked


def check_preemptions(sim: Any) -> None:
    most = max((r.num_preemptions for r in sim.core.state.preempted), default=0)
    assert most <= math.ceil(math.log2(sim.model.num_blocks)), f"preempted {most} times"


def live(sim: Any, num_events: int, longest: int, max_tokens: int, deaths: bool) -> None:
    r = sim.random
    orphans: list[Any] = []
    for _ in range(num_events):
        sim.now += r.random()
        open_requests = [a for a in sim.asked.values() if not a.done and a not in orphans]
        if sim.executor is None:
            if r.random() < 0.3:
                sim.executor_up()
        elif not sim.executor.queue or r.random() < 0.6:
            sim.schedule()
        kind = r.random()
        if kind < 0.12 and len(open_requests) < 20:
            random_request(sim, longest, max_tokens)
        elif kind < 0.14 and open_requests:
            sim.abort(r.choice(open_requests))
        elif kind < 0.145 and deaths:
            if sim.executor is not None:
                sim.executor_dies()
        elif kind < 0.15 and deaths:
            sim.scheduler_dies()
        elif kind < 0.155 and deaths and sim.executor is not None:
            sim.step_fails()
        elif kind < 0.165 and deaths and sim.owners:
            owner = r.choice(sorted(sim.owners))
            sim.owner_dies(owner)
            orphans += [a for a in open_requests if a.owner == owner]
        elif kind < 0.18 and deaths and open_requests:
            sim.move(r.choice(open_requests), sim.new_owner(), lose=r.randrange(3))
        elif kind < 0.19:
            sim.reset_prefix_cache()
        elif sim.executor is not None:
            sim.step()
        if orphans and r.random() < 0.2:
            sim.move(orphans.pop(), sim.new_owner(), lose=r.randrange(3))
        # Suspects run alone and so take the place of others, whatever that makes of their number.
        if not deaths:
            check_preemptions(sim)
    for asked in orphans:
        sim.move(asked, sim.new_owner())
    if sim.executor is None:
        sim.executor_up()
    sim.run()
    for asked in sim.asked.values():
        if not asked.aborted and not (asked.failed and "times with this request" in asked.failed.message):
            sim.check_finished(asked)
    sim.check_idle()


MODELS = {
    "roomy": {"num_blocks": 200},
    "tight": {"num_blocks": 14, "max_model_len": 48},
    "one row": {"num_blocks": 20, "max_num_seqs": 1, "max_model_len": 64},
    "small budget": {"num_blocks": 40, "max_num_batched_tokens": 5, "max_model_len": 96},
    "block of 1": {"num_blocks": 60, "block_size": 1, "max_model_len": 40},
}


POLICIES = ["fcfs", "priority", "fair", "srf", "support.policies:Arbitrary", "support.policies:NewestFirst"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", MODELS)
@settings(
    max_examples=5,
    deadline=None,
    # Seeds do not shrink.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32),
    deaths=st.booleans(),
    caching=st.booleans(),
    share=st.sampled_from([0.0, 0.25, 1.0]),
    mixed=st.sampled_from([0.1, 0.75, 1.0]),
)
def test_every_output_is_right(
    make_sim: Callable[..., Any],
    kind: str,
    policy: str,
    seed: int,
    deaths: bool,
    caching: bool,
    share: float,
    mixed: float,
) -> None:
    settings = {"policy": policy, "enable_prefix_caching": caching}
    settings |= {"short_prompt_share": share, "mixed_step_share": mixed}
    sim = make_sim(model=MODELS[kind], seed=seed, **settings)
    longest = min(40, sim.model.max_model_len - 12)
    live(sim, 300, longest, 12, deaths)
