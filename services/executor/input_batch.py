"""The persistent batch: a row per running request, changed by each plan's delta."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quartet.services.executor.block_table import BlockTable
from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.plan_columns import NewRowColumns, PlanColumns, PlanError, unpack_plan
from quartet.services.executor.sampling_rows import SamplingRows
from quartet.shared.block_hash import HASH_BYTES
from quartet.shared.messages import StepPlan
from quartet.shared.sampling_params import NO_CAPS, InvalidField, TextParams, validate

_MAX_BIT_SET_BYTES = 2**16 // 8
# In token_ids: drawn by a step whose result is not here yet.
UNKNOWN = -1

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Step:
    """What an applied plan computes, rows in batch order (decode rows first).

    rows, counts [R]: req_index and its number of tokens; starts, ends [R]: the position of its first one, and
    that behind its last; samples [R]: whether the row samples. flat_rows, positions, slot_mapping [T]: each token's.
    sampled_rows, output_indices [S]: the rows that sample, and the place of the token to draw among their outputs.
    """

    rows: IntArray
    counts: IntArray
    starts: IntArray
    ends: IntArray
    samples: BoolArray
    num_decodes: int
    flat_rows: IntArray
    positions: IntArray
    slot_mapping: IntArray
    sampled_rows: IntArray
    output_indices: IntArray


class InputBatch:
    """Rows by req_index in [0, max_num_seqs): tokens, block table, progress and sampling state."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.block_table = BlockTable(max_num_seqs, -(-max_model_len // block_size), block_size)
        self.sampling = SamplingRows(max_num_seqs, vocab_size)
        # One more than fits the context: the token sampled at its last position.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._ones = np.ones(max_num_seqs, np.int64)
        self.in_use = np.zeros(max_num_seqs, bool)
        # Counts the row's occupants: what belongs to an earlier one is not to touch the next.
        self.generation = np.zeros(max_num_seqs, np.int64)
        self.num_removals = 0
        self.failed = np.zeros(max_num_seqs, bool)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.prompt_logprobs_start = np.full(max_num_seqs, -1, np.int64)
        self.num_prompt_logprobs = np.zeros(max_num_seqs, np.int64)
        self.with_prompt_logprobs: set[int] = set()

    def clear(self) -> None:
        """All rows leave."""
        self._remove(np.flatnonzero(self.in_use))

    def apply(self, plan: StepPlan) -> Step:
        """Changes the rows as the plan says and counts its tokens as computed.

        Raises PlanError, having changed nothing, when the plan contradicts itself or the rows.
        """
        self._check_size(plan)
        columns = unpack_plan(plan)
        self._check(columns)
        self._remove(columns.removed)
        for new in columns.new_rows:
            self._add(new)
        self.block_table.append(columns.block_rows, columns.block_ids)

        rows = columns.decode_rows
        counts = self._ones[: len(rows)]
        if len(columns.prefill_rows):
            rows = np.concatenate([rows, columns.prefill_rows])
            counts = np.concatenate([counts, columns.prefill_counts])
        starts = self.num_computed_tokens[rows]
        ends = starts + counts
        self.num_computed_tokens[rows] = ends
        flat_rows, positions = flatten(rows, starts, counts) if len(columns.prefill_rows) else (rows, starts)
        samples = ends == self.num_tokens[rows]
        sampled_rows = rows[samples]
        return Step(
            rows=rows,
            counts=counts,
            starts=starts,
            ends=ends,
            samples=samples,
            num_decodes=len(columns.decode_rows),
            flat_rows=flat_rows,
            positions=positions,
            slot_mapping=self.block_table.slots(flat_rows, positions),
            sampled_rows=sampled_rows,
            output_indices=self.num_tokens[sampled_rows] - self.num_prompt_tokens[sampled_rows],
        )

    def forward_batch(self, step: Step, device: torch.device) -> ForwardBatch:
        """The step as the model is told it; one row samples at its last token."""
        query_start_loc = np.zeros(len(step.rows) + 1, np.int32)
        np.cumsum(step.counts, out=query_start_loc[1:])
        seq_lens = step.ends
        is_here = device.type == "cpu"

        def on_device(array: npt.NDArray[np.generic]) -> torch.Tensor:
            tensor = torch.from_numpy(array)
            return tensor if is_here else tensor.to(device, non_blocking=True)

        return ForwardBatch(
            token_ids=on_device(self.token_ids[step.flat_rows, step.positions].astype(np.int64)),
            positions=on_device(step.positions),
            slot_mapping=on_device(step.slot_mapping),
            query_start_loc=on_device(query_start_loc),
            seq_lens=on_device(seq_lens.astype(np.int32)),
            block_tables=on_device(self.block_table.rows(step.rows, seq_lens)),
            num_decodes=step.num_decodes,
            logits_indices=on_device(query_start_loc[1:][step.samples].astype(np.int64) - 1),
            query_start_loc_list=query_start_loc.tolist(),
            seq_lens_list=seq_lens.tolist(),
        )

    def expect_sampled(self, rows: IntArray) -> None:
        """Each of `rows` has one token more, which is UNKNOWN until `store_sampled` tells it."""
        self.token_ids[rows, self.num_tokens[rows]] = UNKNOWN
        self.num_tokens[rows] += 1

    def store_sampled(self, rows: IntArray, places: IntArray, token_ids: IntArray, failed: BoolArray) -> None:
        """The tokens that `expect_sampled` made place for, `places` [N] in their rows. A failed row gets a
        stand-in, so that plans already made for it hold."""
        if failed.any():
            self.failed[rows] |= failed
            self.token_ids[rows, places] = np.where(failed, 0, token_ids)
            rows, token_ids = rows[~failed], token_ids[~failed]
        else:
            self.token_ids[rows, places] = token_ids
        self.sampling.append(rows, token_ids)

    # --- changes ----------------------------------------------------------------------------------

    def _remove(self, rows: IntArray) -> None:
        if len(rows):
            self.in_use[rows] = False
            self.with_prompt_logprobs.difference_update(rows.tolist())
            self.generation[rows] += 1
            self.num_removals += 1
            self.block_table.clear(rows)
            self.sampling.remove(rows.tolist())

    def _add(self, new: NewRowColumns) -> None:
        row, index, token_ids = new.row, new.row.req_index, new.token_ids
        self.in_use[index] = True
        self.failed[index] = False
        self.token_ids[index, : len(token_ids)] = token_ids
        self.num_tokens[index] = len(token_ids)
        self.num_prompt_tokens[index] = row.num_prompt_tokens
        self.num_computed_tokens[index] = row.num_computed_tokens
        wants_prompt = row.sampling.prompt_logprobs is not None
        self.prompt_logprobs_start[index] = row.prompt_logprobs_start if wants_prompt else -1
        self.num_prompt_logprobs[index] = row.sampling.prompt_logprobs or 0
        if wants_prompt:
            self.with_prompt_logprobs.add(index)
        self.block_table.append(np.full(len(new.block_ids), index), new.block_ids)
        self.sampling.add(
            index,
            row.sampling,
            row.eos_token_ids,
            row.choice_index,
            token_ids,
            row.num_prompt_tokens,
            row.vocabulary,
        )

    # --- checks -----------------------------------------------------------------------------------

    def _check_size(self, plan: StepPlan) -> None:
        """Before anything is unpacked: a bit becomes eight bytes."""
        if len(plan.new_rows) > self.max_num_seqs or len(plan.decode_rows) > _MAX_BIT_SET_BYTES:
            raise PlanError(f"the plan names more rows than there are ({self.max_num_seqs})")

    def _check(self, plan: PlanColumns) -> None:
        """Plays the plan through on copies of the counters."""
        if self._only_decodes(plan):
            return
        in_use = self.in_use.copy()
        num_tokens = self.num_tokens.copy()
        num_computed = self.num_computed_tokens.copy()
        num_blocks = self.block_table.num_blocks.copy()

        self._check_rows("removed", plan.removed, in_use, distinct=True)
        in_use[plan.removed] = False
        num_blocks[plan.removed] = 0
        for new in plan.new_rows:
            self._check_new_row(new, in_use)
            index = new.row.req_index
            in_use[index] = True
            num_tokens[index] = len(new.token_ids)
            num_computed[index] = new.row.num_computed_tokens
            num_blocks[index] = len(new.block_ids)
        self._check_rows("block_rows", plan.block_rows, in_use)
        self._check_block_ids(plan.block_ids)
        num_blocks += np.bincount(plan.block_rows, minlength=self.max_num_seqs)
        if num_blocks.max() > self.block_table.max_blocks_per_seq:
            raise PlanError(
                f"row {num_blocks.argmax()} has {num_blocks.max()} blocks; {self.block_table.max_blocks_per_seq} fit"
            )
        self._check_rows("decode_rows", plan.decode_rows, in_use)
        self._check_rows("prefill_rows", plan.prefill_rows, in_use, distinct=True)
        self._check_work(plan, num_tokens, num_computed, num_blocks)

    def _only_decodes(self, plan: PlanColumns) -> bool:
        """Whether the plan does nothing else, and may: most are so, and it is quickly seen."""
        rows = plan.decode_rows
        if len(plan.removed) or plan.new_rows or len(plan.block_rows) or len(plan.prefill_rows):
            return False
        # They rise.
        if not 0 < len(rows) <= self.max_num_batched_tokens or rows[-1] >= self.max_num_seqs:
            return False
        ends = self.num_computed_tokens[rows] + 1
        room = np.minimum(self.block_table.num_blocks[rows] * self.block_table.block_size, self.max_model_len)
        return bool((self.in_use[rows] & (self.num_tokens[rows] == ends) & (ends <= room)).all())

    def _check_work(
        self, plan: PlanColumns, num_tokens: IntArray, num_computed: IntArray, num_blocks: IntArray
    ) -> None:
        decode, prefill = plan.decode_rows, plan.prefill_rows
        unknown = decode[num_tokens[decode] - num_computed[decode] != 1]
        if len(unknown):
            raise PlanError(
                f"row {unknown[0]} decodes with {num_tokens[unknown[0]]} tokens known and "
                f"{num_computed[unknown[0]]} computed"
            )
        num_batched = len(decode) + int(plan.prefill_counts.sum())
        if num_batched > self.max_num_batched_tokens:
            raise PlanError(
                f"{num_batched} tokens in one step, max_num_batched_tokens is {self.max_num_batched_tokens}"
            )
        end = num_computed
        end[decode] += 1
        end[prefill] += plan.prefill_counts
        rows = np.concatenate([decode, prefill])
        known = np.minimum(num_tokens, self.max_model_len)
        if (plan.prefill_counts < 1).any():
            raise PlanError("a prefill row computes no token")
        # A row in both columns is over its known tokens too: decoding leaves none to prefill.
        for row in rows[end[rows] > known[rows]][:1]:
            raise PlanError(f"row {row} would compute {end[row]} tokens and knows {known[row]}")
        for row in rows[end[rows] > num_blocks[rows] * self.block_table.block_size][:1]:
            raise PlanError(f"row {row} would compute {end[row]} tokens in {num_blocks[row]} blocks")

    def _check_new_row(self, new: NewRowColumns, in_use: BoolArray) -> None:
        row, index, num_tokens = new.row, new.row.req_index, len(new.token_ids)
        if not 0 <= index < self.max_num_seqs:
            raise PlanError(f"new row {index} is out of range: there are {self.max_num_seqs}")
        if in_use[index]:
            raise PlanError(f"new row {index} is in use")
        if not 1 <= num_tokens <= self.max_model_len:
            raise PlanError(f"new row {index} has {num_tokens} tokens, max_model_len is {self.max_model_len}")
        if new.token_ids.max() >= self.vocab_size:
            raise PlanError(f"new row {index} has token {new.token_ids.max()}, the vocabulary is {self.vocab_size}")
        if not 1 <= row.num_prompt_tokens <= num_tokens:
            raise PlanError(f"new row {index} has {row.num_prompt_tokens} prompt tokens of {num_tokens}")
        if not 0 <= row.num_computed_tokens < num_tokens:
            raise PlanError(f"new row {index} has {row.num_computed_tokens} tokens of {num_tokens} computed already")
        if not 0 <= row.choice_index < 2**63 or len(row.hash_root) != HASH_BYTES:
            raise PlanError(f"new row {index} has a malformed choice_index or hash_root")
        if not -1 <= row.prompt_logprobs_start <= num_tokens:
            raise PlanError(f"new row {index} has prompt_logprobs_start {row.prompt_logprobs_start}")
        try:
            validate(row.sampling, TextParams(), 1, NO_CAPS)
        except InvalidField as error:
            raise PlanError(f"new row {index}: {error}") from error
        self._check_block_ids(new.block_ids)
        if row.num_computed_tokens > len(new.block_ids) * self.block_table.block_size:
            raise PlanError(f"new row {index} has {row.num_computed_tokens} tokens in {len(new.block_ids)} blocks")

    def _check_rows(self, name: str, rows: IntArray, in_use: BoolArray, distinct: bool = False) -> None:
        if not len(rows):
            return
        if rows.max() >= self.max_num_seqs:
            raise PlanError(f"{name}: row {rows.max()} is out of range: there are {self.max_num_seqs}")
        if not in_use[rows].all():
            raise PlanError(f"{name}: row {rows[~in_use[rows]][0]} is not in use")
        if distinct and len(np.unique(rows)) != len(rows):
            raise PlanError(f"{name}: a row is named twice")

    def _check_block_ids(self, block_ids: IntArray) -> None:
        if len(block_ids) and (block_ids.min() < 1 or block_ids.max() > self.num_blocks):
            raise PlanError(f"block ids {block_ids.min()}..{block_ids.max()} are not all in 1..{self.num_blocks}")


def flatten(rows: IntArray, starts: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """([T] row, [T] position) of every token of the step."""
    ends = counts.cumsum()
    flat_rows = np.repeat(rows, counts)
    positions = np.arange(len(flat_rows)) + np.repeat(starts - ends + counts, counts)
    return flat_rows, positions
