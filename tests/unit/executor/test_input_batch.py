"""Plans as messages.py documents them: applied exactly, or refused with nothing changed."""

from typing import Any

import numpy as np
import pytest
import torch

from quartet.services.executor.input_batch import InputBatch, Step
from quartet.services.executor.plan_columns import PlanError
from quartet.shared.messages import StepPlan
from quartet.shared.sampling_params import SamplingParams

CPU = torch.device("cpu")


@pytest.fixture
def batch() -> InputBatch:
    return InputBatch(
        max_num_seqs=8, max_model_len=30, max_num_batched_tokens=32, num_blocks=20, block_size=4, vocab_size=100
    )


def store(batch: InputBatch, rows: Any, token_ids: Any, failed: Any) -> None:
    batch.expect_sampled(rows)
    batch.store_sampled(rows, batch.num_tokens[rows] - 1, token_ids, failed)


def sampled(batch: InputBatch, step: Step, token_ids: list[int]) -> None:
    rows = step.sampled_rows
    store(batch, rows, np.array(token_ids), np.zeros(len(rows), bool))


def snapshot(batch: InputBatch) -> list[Any]:
    table = batch.block_table
    columns = (batch.in_use, batch.num_tokens, batch.num_computed_tokens, batch.num_prompt_tokens, batch.token_ids)
    return [column.tolist() for column in (*columns, table.table, table.num_blocks)]


def running(batch: InputBatch, plans: Any) -> None:
    """Row 2 has 5 prompt tokens computed and one sampled; row 5 has 6 of 10 prompt tokens computed."""
    new = [plans.new_row(2, [1, 2, 3, 4, 5], [7, 8]), plans.new_row(5, range(10, 20), [3, 4])]
    sampled(batch, batch.apply(plans.plan(new=new, prefill=[(2, 5), (5, 6)])), [50])


def test_a_mixed_step_becomes_a_flat_batch(batch: InputBatch, plans: Any) -> None:
    running(batch, plans)
    new = [plans.new_row(0, [30, 31, 32, 33, 34, 35], [9, 10], num_computed=4)]
    step = batch.apply(plans.plan(1, new=new, blocks=[(5, 11)], decode=[2], prefill=[(5, 4), (0, 2)]))
    assert step.samples.tolist() == [True, True, True]
    forward = batch.forward_batch(step, CPU)
    assert forward.token_ids.tolist() == [50, 16, 17, 18, 19, 34, 35]
    assert forward.positions.tolist() == [5, 6, 7, 8, 9, 4, 5]
    assert forward.slot_mapping.tolist() == [8 * 4 + 1, 4 * 4 + 2, 4 * 4 + 3, 11 * 4, 11 * 4 + 1, 10 * 4, 10 * 4 + 1]
    assert forward.query_start_loc.tolist() == forward.query_start_loc_list == [0, 1, 5, 7]
    assert forward.seq_lens.tolist() == forward.seq_lens_list == [6, 10, 6]
    assert forward.block_tables.tolist() == [[7, 8, 0], [3, 4, 11], [9, 10, 0]]
    assert forward.logits_indices.tolist() == [0, 4, 6]
    assert forward.num_decodes == 1
    dtypes = (forward.token_ids.dtype, forward.query_start_loc.dtype, forward.block_tables.dtype)
    assert dtypes == (torch.int64, torch.int32, torch.int32)


def test_a_chunk_that_does_not_reach_the_end_does_not_sample(batch: InputBatch, plans: Any) -> None:
    new = [plans.new_row(1, range(9), [1, 2, 3]), plans.new_row(4, range(3), [4])]
    step = batch.apply(plans.plan(new=new, prefill=[(1, 8), (4, 3)]))
    assert step.samples.tolist() == [False, True]
    assert batch.forward_batch(step, CPU).logits_indices.tolist() == [10]
    sampled(batch, step, [70])
    step = batch.apply(plans.plan(1, decode=[4], prefill=[(1, 1)]))
    assert step.rows.tolist() == [4, 1] and step.samples.all()


def test_decode_reads_what_was_sampled_last(batch: InputBatch, plans: Any) -> None:
    running(batch, plans)
    for step_id, token_id in ((1, 60), (2, 61)):
        step = batch.apply(plans.plan(step_id, decode=[2]))
        sampled(batch, step, [token_id])
    step = batch.apply(plans.plan(3, blocks=[(2, 12)], decode=[2]))
    forward = batch.forward_batch(step, CPU)
    assert (forward.token_ids.tolist(), forward.positions.tolist()) == ([61], [7])


def test_blocks_are_appended_in_order_even_several_to_a_row(batch: InputBatch, plans: Any) -> None:
    running(batch, plans)
    batch.apply(plans.plan(1, blocks=[(5, 11), (2, 15), (5, 12), (5, 1)], decode=[2]))
    assert batch.block_table.table[5, :6].tolist() == [3, 4, 11, 12, 1, 0]
    assert batch.block_table.table[2, :4].tolist() == [7, 8, 15, 0]


def test_a_removed_row_leaves_nothing_to_its_successor(batch: InputBatch, plans: Any) -> None:
    running(batch, plans)
    sampling = SamplingParams(logit_bias={1: 1.0}, repetition_penalty=2.0, min_tokens=3)
    step = batch.apply(
        plans.plan(1, removed=[2], new=[plans.new_row(2, [9], [1], sampling=sampling)], prefill=[(2, 1)])
    )
    assert batch.block_table.table[2].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    sampled(batch, step, [3])
    assert batch.token_ids[2, :2].tolist() == [9, 3]
    batch.apply(plans.plan(2, removed=[2], new=[plans.new_row(2, [8], [1])], prefill=[(2, 1)]))
    assert not (batch.sampling.logit_bias or batch.sampling.token_counts or batch.sampling.min_tokens[2])


def test_a_failed_row_keeps_its_place_in_plans_under_way(batch: InputBatch, plans: Any) -> None:
    running(batch, plans)
    batch.apply(plans.plan(1, decode=[2]))
    store(batch, np.array([2]), np.array([0xFFFFFFFF]), np.array([True]))
    batch.apply(plans.plan(2, decode=[2]))
    assert batch.failed[2]
    batch.apply(plans.plan(3, removed=[2], new=[plans.new_row(2, [1], [1])]))
    assert not batch.failed[2]


def test_the_context_can_be_filled_to_its_last_token(batch: InputBatch, plans: Any) -> None:
    new = [plans.new_row(0, range(29), range(1, 9))]
    sampled(batch, batch.apply(plans.plan(new=new, prefill=[(0, 29)])), [5])
    sampled(batch, batch.apply(plans.plan(1, decode=[0])), [6])
    with pytest.raises(PlanError, match="would compute 31 tokens and knows 30"):
        batch.apply(plans.plan(2, decode=[0]))


def test_rows_that_only_leave_make_an_empty_step(batch: InputBatch, plans: Any) -> None:
    running(batch, plans)
    step = batch.apply(plans.plan(1, removed=[2, 5]))
    assert len(step.rows) == 0 and not batch.in_use.any()


def bad_plans(plans: Any) -> dict[str, StepPlan]:
    p, row = plans.plan, plans.new_row
    malformed = p(1, decode=[2])
    malformed.block_ids = b"\1\0\0"
    unpaired = p(1, decode=[2])
    unpaired.prefill_counts = plans.column([1])
    short_root = row(0, [1], [1])
    short_root.hash_root = b"x"
    cut_tokens = row(0, [1], [1])
    cut_tokens.token_ids = b"\1\0"
    return {
        "removed: row 3 is not in use": p(1, removed=[3]),
        "removed: row 9 is out of range": p(1, removed=[9]),
        "removed: a row is named twice": p(1, removed=[2, 2]),
        "new row 2 is in use": p(1, new=[row(2, [1], [1])]),
        "new row 0 is in use": p(1, new=[row(0, [1], [1]), row(0, [2], [2])]),
        "new row 8 is out of range": p(1, new=[row(8, [1], [1])]),
        "new row -1 is out of range": p(1, new=[row(-1, [1], [1])]),
        "new row 0 has 31 tokens": p(1, new=[row(0, range(31), range(1, 9))]),
        "new row 0 has 0 tokens": p(1, new=[row(0, [], [1])]),
        "new row 0 has token 100": p(1, new=[row(0, [1, 100], [1])]),
        "new row 0 has token 2147483647": p(1, new=[row(0, [0xFFFFFFFF], [1])]),
        "new row 0 has 3 prompt tokens of 2": p(1, new=[row(0, [1, 2], [1], num_prompt=3)]),
        "new row 0 has 2 tokens of 2 computed": p(1, new=[row(0, [1, 2], [1], num_computed=2)]),
        "new row 0 has 5 tokens in 1 blocks": p(1, new=[row(0, range(6), [1], num_computed=5)]),
        "malformed choice_index or hash_root": p(1, new=[short_root]),
        "token_ids of a new row has 2 bytes": p(1, new=[cut_tokens]),
        "block_rows: row 1 is not in use": p(1, blocks=[(1, 3)]),
        "block ids 21..21": p(1, blocks=[(2, 21)]),
        "block ids 0..0": p(1, new=[row(0, [1], [0])]),
        "row 2 has 9 blocks; 8 fit": p(1, blocks=[(2, 1 + i) for i in range(7)]),
        "block_ids has 3 bytes": malformed,
        "prefill_rows has 0 entries and prefill_counts 1": unpaired,
        "decode_rows: row 3 is not in use": p(1, decode=[2, 3]),
        "decode_rows: row 63 is out of range": p(1, decode=[63]),
        "row 5 decodes with 10 tokens known and 6 computed": p(1, decode=[5]),
        "decode_rows: row 2 is not in use": p(1, removed=[2], decode=[2]),
        "prefill_rows: row 6 is not in use": p(1, prefill=[(6, 1)]),
        "prefill_rows: a row is named twice": p(1, prefill=[(5, 1), (5, 1)]),
        "a prefill row computes no token": p(1, prefill=[(5, 0)]),
        "row 5 would compute 11 tokens and knows 10": p(1, blocks=[(5, 9)], prefill=[(5, 5)]),
        "row 5 would compute 10 tokens in 2 blocks": p(1, prefill=[(5, 4)]),
        "row 2 would compute 7 tokens and knows 6": p(1, decode=[2], prefill=[(2, 1)]),
        "33 tokens in one step": p(
            1, new=[row(0, range(29), range(1, 9)), row(1, range(4), [9])], prefill=[(0, 29), (1, 4)]
        ),
    }


@pytest.mark.parametrize("index", range(33))
def test_a_contradiction_is_refused_and_changes_nothing(batch: InputBatch, plans: Any, index: int) -> None:
    running(batch, plans)
    before = snapshot(batch)
    cases = bad_plans(plans)
    assert len(cases) == 33
    reason, plan = list(cases.items())[index]
    with pytest.raises(PlanError, match=reason.replace("(", "\\(")):
        batch.apply(plan)
    assert snapshot(batch) == before
    batch.apply(plans.plan(1, decode=[2], prefill=[(5, 2)]))


def test_clear_leaves_no_row(batch: InputBatch, plans: Any) -> None:
    running(batch, plans)
    batch.clear()
    running(batch, plans)
