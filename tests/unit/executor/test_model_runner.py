"""Whole steps over a stand-in model whose next token is a function of (token, position) alone."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quartet.services.executor.engine import TorchEngine
from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.input_batch import InputBatch
from quartet.services.executor.model_runner import ModelRunner
from quartet.services.executor.plan_columns import PlanError
from quartet.shared.block_hash import block_hash, hash_root, pack_token_ids
from quartet.shared.messages import FAILED_TOKEN_ID, StepResult
from quartet.shared.sampling_params import SamplingParams

VOCAB = 97
SCALE = 3.0
NAN_TOKEN = 96

Unpack = Callable[[bytes], list[int]]


def next_token(token_id: int, position: int) -> int:
    return (token_id * 31 + position * 7 + 1) % (VOCAB - 1)


class FakeModel:
    """Hidden states are logits: SCALE at the next token, 0 elsewhere; NaN after NAN_TOKEN."""

    def __init__(self) -> None:
        self.raises = False
        self.num_tokens: list[int] = []

    def forward(self, batch: ForwardBatch, kv_cache: Any, attention: Any) -> torch.Tensor:
        if self.raises:
            raise RuntimeError("no memory left")
        self.num_tokens.append(len(batch.token_ids))
        follow = [next_token(t, p) for t, p in zip(batch.token_ids.tolist(), batch.positions.tolist(), strict=True)]
        hidden = torch.zeros(len(follow), VOCAB)
        hidden[torch.arange(len(follow)), torch.tensor(follow)] = SCALE
        hidden[batch.token_ids == NAN_TOKEN] = math.nan
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()


class FakeAttention:
    def prepare(self, batch: ForwardBatch) -> None: ...


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def runner(model: FakeModel) -> ModelRunner:
    batch = InputBatch(
        max_num_seqs=8, max_model_len=64, max_num_batched_tokens=32, num_blocks=20, block_size=4, vocab_size=VOCAB
    )
    attention: Any = FakeAttention()
    kv_cache: Any = None
    return ModelRunner(TorchEngine(model, kv_cache, attention, batch, torch.device("cpu")), batch)


def offered(runner: ModelRunner) -> set[int]:
    return set(np.frombuffer(runner.offers()[0], "<u4").tolist())


def test_prefill_in_chunks_then_decode(runner: ModelRunner, plans: Any, unpack: Unpack) -> None:
    prompt = [5, 6, 7, 8, 9, 10]
    result = runner.execute(plans.plan(0, new=[plans.new_row(3, prompt, [1, 2])], prefill=[(3, 4)]))
    assert result == StepResult(1, 0, b"")
    first = unpack(runner.execute(plans.plan(1, prefill=[(3, 2)])).token_ids)
    assert first == [next_token(10, 5)]
    second = unpack(runner.execute(plans.plan(2, decode=[3])).token_ids)
    assert second == [next_token(first[0], 6)]
    third = unpack(runner.execute(plans.plan(3, decode=[3])).token_ids)
    assert third == [next_token(second[0], 7)]


def test_results_come_in_batch_order(runner: ModelRunner, plans: Any, unpack: Unpack) -> None:
    new = [plans.new_row(i, [10 + i], [1 + i]) for i in (6, 1, 4)]
    first = runner.execute(plans.plan(0, new=new, prefill=[(6, 1), (1, 1), (4, 1)]))
    assert unpack(first.token_ids) == [next_token(10 + i, 0) for i in (6, 1, 4)]
    entering = [plans.new_row(2, [50], [12]), plans.new_row(0, [51, 52], [13])]
    result = runner.execute(plans.plan(1, new=entering, decode=[6, 1, 4], prefill=[(2, 1), (0, 2)]))
    decoded = [next_token(next_token(10 + i, 0), 1) for i in (1, 4, 6)]
    assert unpack(result.token_ids) == [*decoded, next_token(50, 0), next_token(52, 1)]


def test_a_recomputed_row_goes_on_where_it_was(runner: ModelRunner, plans: Any, unpack: Unpack) -> None:
    sampling = SamplingParams(temperature=50.0, seed=3, repetition_penalty=1.5, frequency_penalty=1.0)

    def run(num_steps: int, ids: list[int], num_computed: int = 0) -> list[int]:
        runner.reset()
        row = plans.new_row(0, ids, range(1, 11), num_prompt=3, num_computed=num_computed, sampling=sampling)
        out = unpack(runner.execute(plans.plan(0, new=[row], prefill=[(0, len(ids) - num_computed)])).token_ids)
        for step_id in range(1, num_steps):
            out += unpack(runner.execute(plans.plan(step_id, decode=[0])).token_ids)
        return out

    whole = run(20, [1, 2, 3])
    assert len(set(whole)) > 10
    assert run(10, [1, 2, 3, *whole[:10]]) == whole[10:]
    assert run(10, [1, 2, 3, *whole[:10]], num_computed=8) == whole[10:]


@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 5], [8, 1]])
@pytest.mark.parametrize("start", [0, 1, 5, 8])
def test_prompt_logprobs_cover_every_position_once(
    runner: ModelRunner, plans: Any, chunks: list[int], start: int
) -> None:
    prompt = [3, 4, 5, 6, 7, 8, next_token(8, 5), 9, 10]
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=2, logit_bias={9: 50.0}, repetition_penalty=2.0)
    row = plans.new_row(1, prompt, [1, 2, 3], sampling=sampling, prompt_logprobs_start=start)
    entries: list[Any] = []
    for step_id, count in enumerate(chunks):
        result = runner.execute(plans.plan(step_id, new=[row] if step_id == 0 else [], prefill=[(1, count)]))
        for part in result.prompt_logprobs:
            assert part.req_index == 1 and part.start == start + len(entries)
            entries += part.entries
    assert len(entries) == len(prompt) - start
    normalizer = math.log(math.exp(SCALE) + VOCAB - 1)
    for position, entry in enumerate(entries, start):
        if position == 0:
            assert entry is None
            continue
        likely = next_token(prompt[position - 1], position - 1)
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx((SCALE if entry.token_id == likely else 0) - normalizer, abs=1e-4)
        assert entry.rank == (1 if entry.token_id == likely else 2)
        assert len(entry.top) == 2 and entry.top[0][0] == likely


def test_prompt_logprobs_end_with_the_prompt(runner: ModelRunner, plans: Any) -> None:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    row = plans.new_row(0, [1, 2, 3, 4, 5], [1, 2], num_prompt=3, sampling=sampling, prompt_logprobs_start=0)
    (part,) = runner.execute(plans.plan(0, new=[row], prefill=[(0, 5)])).prompt_logprobs
    assert (part.start, len(part.entries)) == (0, 3)
    assert runner.execute(plans.plan(1, decode=[0])).prompt_logprobs == []


def test_prompt_logprobs_of_a_one_token_prompt(runner: ModelRunner, plans: Any) -> None:
    row = plans.new_row(0, [1], [1], sampling=SamplingParams(prompt_logprobs=1), prompt_logprobs_start=0)
    (part,) = runner.execute(plans.plan(0, new=[row], prefill=[(0, 1)])).prompt_logprobs
    assert (part.start, part.entries) == (0, [None])


def test_prompt_logprobs_in_slices_are_those_in_one_piece(
    runner: ModelRunner, plans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = plans.new_row(0, range(20), range(1, 6), sampling=SamplingParams(prompt_logprobs=3), prompt_logprobs_start=0)
    whole = runner.execute(plans.plan(0, new=[row], prefill=[(0, 20)])).prompt_logprobs
    runner.reset()
    monkeypatch.setattr("quartet.services.executor.model_runner._MAX_LOGITS", 3 * VOCAB)
    assert runner.execute(plans.plan(0, new=[row], prefill=[(0, 20)])).prompt_logprobs == whole


def test_logprobs_come_when_any_row_asks(runner: ModelRunner, plans: Any) -> None:
    asking = plans.new_row(1, [5], [2], sampling=SamplingParams(temperature=0.0, logprobs=1))
    result = runner.execute(plans.plan(0, new=[plans.new_row(0, [4], [1]), asking], prefill=[(0, 1), (1, 1)]))
    assert result.logprobs is not None and result.logprobs[0] is None
    assert result.logprobs[1] is not None and result.logprobs[1].token_id == next_token(5, 0)
    alone = runner.execute(plans.plan(1, decode=[0]))
    assert alone.logprobs is None


def test_nan_fails_its_row_alone_and_for_good(runner: ModelRunner, plans: Any, unpack: Unpack) -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=1)
    new = [
        plans.new_row(0, [4, 5, 6, 7], [1, 11], sampling=sampling),
        plans.new_row(1, [4, 5, 6, NAN_TOKEN], [2, 12], sampling=sampling),
    ]
    result = runner.execute(plans.plan(0, new=new, prefill=[(0, 4), (1, 4)]))
    good = next_token(7, 3)
    assert unpack(result.token_ids) == [good, FAILED_TOKEN_ID]
    assert [row for row, _ in result.errors] == [1] and "not finite" in result.errors[0][1]
    assert result.logprobs is not None and result.logprobs[0] is not None and result.logprobs[1] is None
    assert offered(runner) == {1}
    # The next plan was under way already.
    result = runner.execute(plans.plan(1, decode=[0, 1]))
    assert unpack(result.token_ids) == [next_token(good, 4), FAILED_TOKEN_ID]
    assert [row for row, _ in result.errors] == [1]


def test_blocks_are_offered_after_the_step_that_filled_them(runner: ModelRunner, plans: Any) -> None:
    root = hash_root([("salt", "a")])
    ids = list(range(10, 19))
    runner.execute(plans.plan(0, new=[plans.new_row(0, ids, [3, 4, 5], root=root)], prefill=[(0, 7)]))
    assert offered(runner) == {3}
    runner.execute(plans.plan(1, prefill=[(0, 2)]))
    first = block_hash(root, pack_token_ids(ids[:4]))
    assert runner.offers() == (
        plans.column([3, 4]),
        first + block_hash(first, pack_token_ids(ids[4:8])),
    )
    # Decoding fills the third block: position 8 is the prompt's last, 9 to 11 are sampled ones.
    for step_id in range(2, 5):
        assert offered(runner) == {3, 4}
        runner.execute(plans.plan(step_id, decode=[0]))
    assert offered(runner) == {3, 4, 5}


def test_a_failed_step_leaves_whole_blocks_only(runner: ModelRunner, model: FakeModel, plans: Any) -> None:
    runner.execute(plans.plan(0, new=[plans.new_row(0, range(8), [1, 2, 9])], prefill=[(0, 8)]))
    model.raises = True
    with pytest.raises(RuntimeError, match="no memory left"):
        runner.execute(plans.plan(1, new=[plans.new_row(1, range(30, 38), [2, 3])], decode=[0], prefill=[(1, 8)]))
    runner.reset()
    model.raises = False
    assert offered(runner) == {1}
    runner.execute(plans.plan(0, epoch=2, new=[plans.new_row(1, range(30, 38), [2, 3])], prefill=[(1, 8)]))
    assert offered(runner) == {1, 2, 3}


def test_a_refused_plan_touches_neither_rows_nor_hashes(runner: ModelRunner, model: FakeModel, plans: Any) -> None:
    runner.execute(plans.plan(0, new=[plans.new_row(0, range(8), [1, 2])], prefill=[(0, 8)]))
    with pytest.raises(PlanError):
        runner.execute(plans.plan(1, new=[plans.new_row(1, [1, 2], [1])], prefill=[(1, 3)]))
    assert offered(runner) == {1, 2}
    assert model.num_tokens == [8]


def test_takeover_midway_leaves_no_row(runner: ModelRunner, plans: Any, unpack: Unpack) -> None:
    runner.execute(plans.plan(0, new=[plans.new_row(0, range(10), [1, 2, 3])], prefill=[(0, 5)]))
    runner.reset()
    with pytest.raises(PlanError, match="not in use"):
        runner.execute(plans.plan(0, epoch=2, prefill=[(0, 5)]))
    row = plans.new_row(0, range(10), [1, 2, 3], num_computed=4)
    assert unpack(runner.execute(plans.plan(0, epoch=2, new=[row], prefill=[(0, 6)])).token_ids) == [next_token(9, 9)]


def test_an_empty_step_runs_no_forward_pass(runner: ModelRunner, model: FakeModel, plans: Any) -> None:
    runner.execute(plans.plan(0, new=[plans.new_row(0, [1], [1])], prefill=[(0, 1)]))
    assert runner.execute(plans.plan(1, removed=[0])) == StepResult(1, 1, b"")
    assert model.num_tokens == [1]


def test_warm_up_leaves_nothing_behind(runner: ModelRunner, model: FakeModel, plans: Any) -> None:
    runner.warm_up()
    assert model.num_tokens == [32, 1]
    assert runner.offers() == (b"", b"")
    assert runner.times.num_steps == runner.times.num_tokens == 0
    runner.execute(plans.plan(0, new=[plans.new_row(0, [1], [1])], prefill=[(0, 1)]))


def test_steps_are_counted_and_timed(runner: ModelRunner, plans: Any) -> None:
    runner.execute(plans.plan(0, new=[plans.new_row(0, [1, 2, 3], [1])], prefill=[(0, 2)]))
    seconds = dict(runner.times.seconds)
    assert seconds["host"] > 0 and seconds["forward"] > 0 and seconds["sampling"] == 0
    runner.execute(plans.plan(1, prefill=[(0, 1)]))
    assert runner.times.seconds["sampling"] > 0
    assert all(runner.times.seconds[phase] > seconds[phase] for phase in ("host", "forward", "logits"))
    assert (runner.times.num_steps, runner.times.num_tokens, runner.times.num_sampled) == (2, 3, 1)


@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(1, 1), (4, 1), (5, 2), (64, 1)])
def test_warm_up_fits_the_smallest_pools(model: FakeModel, max_model_len: int, num_blocks: int) -> None:
    batch = InputBatch(
        max_num_seqs=1,
        max_model_len=max_model_len,
        max_num_batched_tokens=32,
        num_blocks=num_blocks,
        block_size=4,
        vocab_size=VOCAB,
    )
    attention: Any = FakeAttention()
    kv_cache: Any = None
    ModelRunner(TorchEngine(model, kv_cache, attention, batch, torch.device("cpu")), batch).warm_up()
