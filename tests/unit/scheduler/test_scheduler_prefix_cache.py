"""Which prompts hit which blocks (cases C3, C5, C6), and that a hit is never wrong content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

MakeSim = Callable[..., Any]
SIXTEEN = {"block_size": 16, "num_blocks": 32, "max_num_batched_tokens": 64}


def answer(sim: Any, prompt: list[int], **options: Any) -> tuple[list[int], int]:
    """(outputs, cached tokens) of a request that runs alone."""
    asked = sim.ask(prompt, **options)
    sim.run()
    sim.check_finished(asked)
    return asked.outputs[0], asked.cached[0]


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_a_full_hit_computes_the_last_token_again(make_sim: MakeSim, length: int, cached: int) -> None:
    sim = make_sim(model=SIXTEEN)
    prompt = list(range(10, 10 + length))
    first, none = answer(sim, prompt)
    second, hit = answer(sim, prompt)
    assert (none, hit) == (0, cached)
    assert first == second


def test_salts_are_domains(make_sim: MakeSim) -> None:
    sim = make_sim()
    prompt = list(range(10, 22))
    for salt in ("", "x", "y", "cache_salt", "x\0y"):
        assert answer(sim, prompt, salt=salt)[1] == 0
    for salt in ("", "x", "y", "cache_salt", "x\0y"):
        assert answer(sim, prompt, salt=salt)[1] == 8


def test_a_match_stops_at_the_first_missing_block(make_sim: MakeSim) -> None:
    sim = make_sim(model={"num_blocks": 8})
    prompt = list(range(10, 23))  # three full blocks and a token
    assert answer(sim, prompt, max_tokens=1)[1] == 0
    pool, size = sim.core.state.kv.pool, sim.model.block_size
    request_hashes = sorted(pool._cached.items(), key=lambda item: item[1].block_id)
    first = request_hashes[0][1]
    # Block 1 of the chain is lost while 2 and 3 stay.
    del pool._cached[first.block_hash]
    first.block_hash = None
    assert answer(sim, prompt, max_tokens=1)[1] == 0
    assert answer(sim, prompt, max_tokens=1)[1] == 3 * size


def test_a_chain_that_was_pushed_out_from_its_end_hits_at_its_start(make_sim: MakeSim) -> None:
    sim = make_sim(model={"num_blocks": 6})
    prompt = list(range(10, 23))
    answer(sim, prompt, max_tokens=1)
    answer(sim, [500] * 14, max_tokens=1)  # four of the six blocks
    assert answer(sim, prompt, max_tokens=1)[1] in (4, 8)


def test_equal_tokens_at_another_position_do_not_hit(make_sim: MakeSim) -> None:
    sim = make_sim()
    answer(sim, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert answer(sim, [5, 6, 7, 8, 9])[1] == 0


def test_outputs_are_hit_too(make_sim: MakeSim) -> None:
    sim = make_sim()
    outputs, _ = answer(sim, [1, 2, 3], max_tokens=10)
    # Twelve of the thirteen tokens were computed: the last output never is.
    assert answer(sim, [1, 2, 3, *outputs], max_tokens=1)[1] == 12


def test_the_switch_is_off(make_sim: MakeSim) -> None:
    sim = make_sim(enable_prefix_caching=False)
    for _ in range(2):
        assert answer(sim, list(range(10, 22)))[1] == 0


def test_a_block_is_shared_while_its_first_holder_still_runs(make_sim: MakeSim) -> None:
    sim = make_sim()
    first = sim.ask(list(range(10, 19)), max_tokens=40)
    for _ in range(4):
        sim.schedule()
        sim.step()
    second = sim.ask(list(range(10, 19)), max_tokens=3, seed=1)
    sim.run()
    assert second.cached[0] == 8
    sim.check_finished(first)
    sim.check_finished(second)


def test_a_step_that_has_not_returned_is_not_hit(make_sim: MakeSim) -> None:
    sim = make_sim()
    sim.ask(list(range(10, 19)), max_tokens=1)
    sim.schedule()
    other = sim.ask(list(range(10, 19)), seed=1)
    sim.schedule()
    assert len(sim.executor.queue) == 2
    sim.run()
    assert other.cached[0] == 0


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it(make_sim: MakeSim) -> None:
    sim = make_sim()
    prompt = list(range(10, 22))
    answer(sim, prompt)
    asked = sim.ask(prompt, prompt_logprobs=0)
    sim.run()
    assert asked.cached[0] == 0
    assert [e and e.token_id for e in asked.prompt_logprobs] == [None, *prompt[1:]]
    assert answer(sim, prompt)[1] == 8


def test_siblings_share_the_first_ones_prompt_blocks(make_sim: MakeSim) -> None:
    sim = make_sim()
    asked = sim.ask(list(range(10, 23)), n=4, max_tokens=5)
    sim.run()
    sim.check_finished(asked)
    assert asked.cached == {0: 0, 1: 12, 2: 12, 3: 12}
    assert len({tuple(ids) for ids in asked.outputs.values()}) == 4
    # 13 prompt tokens once, then one token of the prompt per sibling, and four decodes each.
    assert sim.executor.num_computed_tokens == 13 + 3 * 1 + 4 * 4


def test_who_does_not_read_finds_nothing_and_who_does_not_write_leaves_nothing(make_sim: MakeSim) -> None:
    sim = make_sim()
    prompt = list(range(10, 22))
    assert answer(sim, prompt, write=False)[1] == 0
    assert answer(sim, prompt, read=False)[1] == 0
    assert answer(sim, prompt, write=False)[1] == 8, "the second one has written"
    assert answer(sim, prompt, read=False)[1] == 0
    sim.scheduler_dies()
    assert answer(sim, prompt)[1] == 8


def test_what_is_not_written_is_not_offered_to_the_next_scheduler(make_sim: MakeSim) -> None:
    sim = make_sim()
    prompt = list(range(10, 22))
    answer(sim, prompt, write=False)
    sim.scheduler_dies()
    assert answer(sim, prompt)[1] == 0


@pytest.mark.parametrize("flags", [{"read": False}, {"write": False}])
def test_choices_that_share_nothing_do_not_wait_for_each_other(make_sim: MakeSim, flags: dict[str, bool]) -> None:
    sim = make_sim(model={"max_num_batched_tokens": 64})
    asked = sim.ask(list(range(10, 26)), n=3, **flags)
    sim.schedule()
    assert len(sim.core.state.running) == 3
    sim.run()
    sim.check_finished(asked)


def test_a_reset_forgets_what_was_computed_before_it(make_sim: MakeSim) -> None:
    sim = make_sim()
    prompt = list(range(10, 22))
    answer(sim, prompt, max_tokens=1)
    assert sim.reset_prefix_cache() == 3 and sim.reset_prefix_cache() == 0
    assert answer(sim, prompt, max_tokens=1)[1] == 0
    assert answer(sim, prompt, max_tokens=1)[1] == 8


def test_what_runs_during_a_reset_goes_on_and_leaves_nothing(make_sim: MakeSim) -> None:
    sim = make_sim()
    prompt = list(range(10, 22))
    running = sim.ask(prompt, max_tokens=12)
    for _ in range(5):
        sim.schedule()
        sim.step()
    assert sim.reset_prefix_cache() == 4
    sim.run()
    sim.check_finished(running)
    assert answer(sim, prompt, max_tokens=1)[1] == 0
    assert answer(sim, prompt, max_tokens=1)[1] == 8


def test_a_sibling_is_not_waited_for_when_a_reset_took_what_it_shares(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_num_batched_tokens": 8})
    asked = sim.ask(list(range(10, 26)), n=2, max_tokens=30)
    sim.schedule()
    assert len(sim.core.state.running) == 1
    sim.reset_prefix_cache()
    for _ in range(4):
        sim.step()
        sim.schedule()
    assert len(sim.core.state.running) == 2
    sim.run()
    sim.check_finished(asked)


@pytest.mark.parametrize("while_away", [True, False])
def test_after_a_reset_the_next_scheduler_is_offered_nothing_of_before(make_sim: MakeSim, while_away: bool) -> None:
    sim = make_sim()
    prompt = list(range(10, 22))
    answer(sim, prompt)
    executor = sim.executor
    running = sim.ask(prompt, salt="x", max_tokens=20)
    sim.schedule()
    if while_away:
        sim.executor_dies(planned=True)
        sim.reset_prefix_cache()
        sim.executor_up(executor)
    else:
        sim.reset_prefix_cache()
        sim.scheduler_dies()
    sim.run()
    sim.check_finished(running)
    assert answer(sim, prompt)[1] == 0
    assert answer(sim, prompt)[1] == 8
