"""What is refused at the door, and that known requests never are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from quartet.shared.messages import ErrorCode

MakeSim = Callable[..., Any]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        ([], 1, ["no tokens"]),
        ([5] * 256, 1, ["256 prompt tokens", "max_tokens 1", "257", "max_model_len is 256"]),
        ([5] * 300, 1, ["300 prompt tokens", "max_model_len is 256"]),
        ([5], 256, ["max_tokens 256", "257"]),
        ([5, 1000], 1, ["1000", "vocabulary of 1000"]),
        ([-1], 1, ["-1"]),
    ],
)
def test_what_never_fits_names_its_limit(
    make_sim: MakeSim, prompt: list[int], max_tokens: int, words: list[str]
) -> None:
    sim = make_sim(model={"num_blocks": 100})
    asked = sim.ask(prompt, max_tokens=max_tokens)
    assert asked.failed is not None and asked.failed.code is ErrorCode.INVALID_ARGUMENT
    assert all(word in asked.failed.message for word in words), asked.failed.message
    assert asked.failed.field in ("prompt", "max_tokens")
    sim.check_idle()


def test_a_prompt_that_just_fits_runs(make_sim: MakeSim) -> None:
    sim = make_sim(model={"num_blocks": 100})
    asked = sim.ask([5] * 255, max_tokens=1)
    sim.run()
    sim.check_finished(asked)


def test_more_blocks_than_there_are(make_sim: MakeSim) -> None:
    sim = make_sim(model={"num_blocks": 4})
    fits = sim.ask([5] * 10, max_tokens=7)  # the 17th token is never computed
    too_many = sim.ask([5] * 10, max_tokens=8)
    assert fits.failed is None
    assert "need 5 KV blocks; there are 4" in too_many.failed.message
    sim.run()
    sim.check_finished(fits)


def test_a_full_queue_says_when_to_come_again(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_num_seqs": 2}, max_waiting=3)
    taken = [sim.ask([5, i]) for i in range(5)]
    refused = sim.ask([5, 9])
    assert refused.failed.code is ErrorCode.RESOURCE_EXHAUSTED and refused.failed.retry_after_ms > 0
    assert "max_waiting is 3" in refused.failed.message
    past = sim.ask([5, 9], pasts={0: []})
    assert past.failed is not None
    sim.run()
    for asked in taken:
        sim.check_finished(asked)


def test_one_with_outputs_passes_a_full_queue(make_sim: MakeSim) -> None:
    donor = make_sim()
    outputs = donor.ask([5, 9], max_tokens=6)
    donor.run()
    sim = make_sim(model={"max_num_seqs": 1}, max_waiting=0)
    sim.ask([7])
    known = sim.ask([5, 9], max_tokens=6, pasts={0: outputs.outputs[0][:2]})
    assert known.failed is None
    sim.run()
    assert known.outputs == outputs.outputs


def test_a_new_scheduler_takes_all_that_the_old_one_had(make_sim: MakeSim) -> None:
    sim = make_sim(model={"max_num_seqs": 2}, max_waiting=3)
    taken = [sim.ask([5, i]) for i in range(5)]
    sim.schedule()
    sim.scheduler_dies()
    sim.run()
    for asked in taken:
        sim.check_finished(asked)


def test_without_an_executor_requests_wait_and_are_judged_when_one_comes(make_sim: MakeSim) -> None:
    sim = make_sim(executor=False)
    good, long = sim.ask([5]), sim.ask([5] * 300)
    assert good.failed is None and long.failed is None
    sim.executor_up()
    assert "max_model_len" in long.failed.message
    sim.run()
    sim.check_finished(good)


def test_a_smaller_executor_fails_only_what_it_cannot_run(make_sim: MakeSim, fake_executor: Any) -> None:
    sim = make_sim()
    small, large = sim.ask([5], max_tokens=4), sim.ask([5] * 100, max_tokens=50)
    sim.schedule()
    sim.executor_dies()
    sim.model = msgspec.structs.replace(sim.model, num_blocks=20)
    sim.executor_up(fake_executor(sim.model))
    assert "there are 20" in large.failed.message
    sim.run()
    sim.check_finished(small)


def test_another_model_ends_what_the_old_one_began(make_sim: MakeSim, fake_executor: Any) -> None:
    sim = make_sim()
    asked = sim.ask([5], max_tokens=4)
    sim.schedule()
    sim.executor_dies()
    sim.model = msgspec.structs.replace(sim.model, model_fingerprint="g")
    sim.executor_up(fake_executor(sim.model))
    assert asked.failed.code is ErrorCode.ABORTED
    sim.check_idle()


def test_draining_refuses_what_is_new_only(make_sim: MakeSim) -> None:
    sim = make_sim()
    running = sim.ask([5], max_tokens=9)
    sim.schedule()
    sim.core.draining = True
    late = sim.ask([6])
    assert late.failed.code is ErrorCode.UNAVAILABLE
    sim.move(running, "other")
    sim.run()
    sim.check_finished(running)
