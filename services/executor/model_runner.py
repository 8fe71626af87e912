"""Runs one step plan: rows, forward pass, sampling, result."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from quartet.services.executor.block_hashes import BlockHashes
from quartet.services.executor.engine import Engine, Forward, PendingSample
from quartet.services.executor.input_batch import InputBatch, Step
from quartet.services.executor.logprobs import gather_logprobs
from quartet.services.executor.sampler import SamplerOutput
from quartet.services.executor.structured_rows import StructuredRows
from quartet.shared.block_hash import hash_root
from quartet.shared.messages import (
    FAILED_TOKEN_ID,
    NewRow,
    RowPromptLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Vocabulary,
)
from quartet.shared.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Prompt log-probabilities are taken in slices of at most this many logits (64 MiB of float32).
_MAX_LOGITS = 2**24
WARM_UP = (SamplingParams(top_p=0.9),)


class ModelRunner:
    """Owns rows and block hashes. After a launch or a result raised anything but PlanError, only reset()
    leads on."""

    def __init__(self, engine: Engine, batch: InputBatch) -> None:
        """`engine` computes the steps of `batch`."""
        self.times = engine.times
        self._engine = engine
        self._batch = batch
        self._block_size = batch.block_table.block_size
        self._hashes = BlockHashes(batch.num_blocks, batch.max_num_seqs, self._block_size)
        self._unsettled: deque[LaunchedStep] = deque()

    def reset(self) -> None:
        """All rows leave; KV memory and the hashes of whole blocks stay."""
        self._unsettled.clear()
        self._batch.clear()
        self._hashes.clear_rows()

    def use_idle_time(self) -> bool:
        """To be called where nothing is in flight; whether there is more to do."""
        return self._engine.use_idle_time()

    def offers(self) -> tuple[bytes, bytes]:
        """Blocks that hold a whole known prefix; see `Granted`."""
        return self._hashes.offers()

    def add_vocabulary(self, part: Vocabulary) -> None:
        self._batch.sampling.structured.add_vocabulary(part)

    def erase_hashes(self) -> None:
        """What blocks hold is not known any more, and rows that are there now record nothing."""
        self._hashes.erase_all()

    def execute(self, plan: StepPlan) -> StepResult:
        """`launch` and its result."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Raises PlanError, having changed nothing, when the plan cannot be applied. The next plan may be
        launched before this one's result is asked for, unless it gives a row away that this one names."""
        step = self._batch.apply(plan)
        for row in plan.new_rows:
            self._hashes.start_row(row.req_index, row.hash_root, row.num_computed_tokens, row.write_prefix_cache)
        self._engine.add_rows([row.req_index for row in plan.new_rows])
        result = StepResult(plan.epoch, plan.step_id, b"")
        launched = LaunchedStep(self, result, step, self._batch.generation[step.rows], self._batch.num_removals)
        if not len(step.rows):
            return launched
        self._hashes.erase(step.slot_mapping // self._block_size)
        self.times.count(len(step.slot_mapping), len(step.sampled_rows))
        forward = self._engine.forward(step)
        self.times.spent("forward")
        result.prompt_logprobs = self._prompt_logprobs(step, forward)
        self.times.spent("logits")
        if len(step.sampled_rows):
            if self._batch.sampling.structured.any(step.sampled_rows):
                self._settle()
            launched.places = self._batch.num_tokens[step.sampled_rows]
            launched.sample = self._engine.sample(step, forward)
            self._batch.expect_sampled(step.sampled_rows)
            self.times.spent("sampling")
            self._unsettled.append(launched)
        return launched

    def _settle(self) -> None:
        """Takes in the tokens of all steps before: what a structured row may draw depends on its last one. Where a
        device computes, it has the next forward pass to go on with."""
        while self._unsettled:
            self._unsettled[0].settle()

    def finish(self, launched: LaunchedStep) -> StepResult:
        """What a step leaves once its tokens are known; see LaunchedStep.result."""
        if launched.sample is not None:
            # In their order, so it is the first; or a reset has taken all.
            while self._unsettled and self._unsettled.popleft() is not launched:
                pass
        result, step, batch = launched.step_result, launched.step, self._batch
        # Rows that a later plan has removed already are nobody's, or another request's.
        kept = None
        if batch.num_removals != launched.num_removals:
            kept = batch.generation[step.rows] == launched.generation
        if launched.sample is not None:
            self._store(result, launched, launched.sample.output(), None if kept is None else kept[step.samples])
        if len(step.rows):
            rows, ends = step.rows, step.ends
            # What a failed row wrote is not to be trusted.
            untrusted = batch.failed[rows] if kept is None else batch.failed[rows] | ~kept
            if untrusted.any():
                rows, ends = rows[~untrusted], ends[~untrusted]
            self._hashes.record(rows, ends, batch.block_table, batch.token_ids)
        return result

    def _store(self, result: StepResult, launched: LaunchedStep, output: SamplerOutput, kept: BoolArray | None) -> None:
        """kept [S]: which of the rows are still who they were; None where all are."""
        rows = launched.step.sampled_rows
        structured = self._batch.sampling.structured
        earlier = self._batch.failed[rows] | structured.failed(rows)
        failed = output.failed | (earlier if kept is None else earlier & kept)
        if kept is None:
            self._batch.store_sampled(rows, launched.places, output.token_ids, failed)
        else:
            self._batch.store_sampled(rows[kept], launched.places[kept], output.token_ids[kept], failed[kept])
        self.times.spent("sampling")
        result.token_ids = output.token_ids.astype("<u4").tobytes()
        result.logprobs = output.logprobs
        if failed.any():
            result.token_ids = np.where(failed, FAILED_TOKEN_ID, output.token_ids).astype("<u4").tobytes()
            _report_failures(result, output, rows, failed, structured)

    def warm_up(self, samplings: Sequence[SamplingParams] = WARM_UP) -> None:
        """Runs a prefill and a decode step on made-up tokens for each of `samplings`, so that no request pays for
        first-time work."""
        for sampling in samplings:
            self._warm_up(sampling)
        self._hashes.clear()
        self.times.clear()

    def _warm_up(self, sampling: SamplingParams) -> None:
        size = self._block_size
        limit = self._batch.max_model_len - 1
        num_tokens = min(self._batch.max_num_batched_tokens, limit, self._batch.num_blocks * size - 1)
        if num_tokens < 1:
            return
        block_ids = np.arange(1, num_tokens // size + 2, dtype="<u4").tobytes()
        row = NewRow(
            req_index=0,
            token_ids=np.zeros(num_tokens, "<u4").tobytes(),
            num_prompt_tokens=num_tokens,
            num_computed_tokens=0,
            block_ids=block_ids,
            sampling=sampling,
            eos_token_ids=[],
            choice_index=0,
            hash_root=hash_root(),
        )
        count = np.array([num_tokens], "<u4").tobytes()
        self.execute(StepPlan(0, 0, b"", [row], b"", b"", b"", b"\0\0", count))
        self.execute(StepPlan(0, 1, b"", [], b"", b"", b"\1", b"", b""))
        self.reset()

    def _prompt_logprobs(self, step: Step, forward: Forward) -> list[RowPromptLogprobs]:
        """A token's entry comes with the step that computes the token before it; position 0 has none."""
        rows = self._batch
        if not rows.with_prompt_logprobs:
            return []
        wanted = np.flatnonzero(
            (rows.prompt_logprobs_start[step.rows] >= 0) & (step.starts < rows.num_prompt_tokens[step.rows])
        )
        results = []
        for place in wanted.tolist():
            req_index = int(step.rows[place])
            start, end = int(step.starts[place]), int(step.starts[place] + step.counts[place])
            due = int(rows.prompt_logprobs_start[req_index])
            first = max(start + 1, due)
            last = min(end + 1, int(rows.num_prompt_tokens[req_index]))
            entries: list[TokenLogprobs | None] = []
            if start == 0 and due == 0:
                entries.append(None)
            offset = forward.query_start_loc[place] - start - 1
            targets = rows.token_ids[req_index, first:last].astype(np.int64)
            entries += self._score(
                forward.hidden[first + offset : last + offset], targets, int(rows.num_prompt_logprobs[req_index])
            )
            if entries:
                results.append(RowPromptLogprobs(req_index, first - (entries[0] is None), entries))
        return results

    @torch.inference_mode()
    def _score(self, hidden: torch.Tensor, targets: IntArray, num_top: int) -> list[TokenLogprobs]:
        """Log-probabilities of targets [N] by the model alone (no bias, no penalties) after hidden [N, H]."""
        vocab_size = self._batch.vocab_size
        size = max(1, _MAX_LOGITS // vocab_size)
        entries = []
        for i in range(0, len(targets), size):
            logits = self._engine.compute_logits(hidden[i : i + size])[:, :vocab_size]
            part = targets[i : i + size]
            entries += gather_logprobs(logits, part, np.full(len(part), num_top))
        return entries


@dataclass(slots=True)
class LaunchedStep:
    """A loop.PendingStep. generation [R], num_removals: of its rows and of the batch when it was launched; places [S]:
    of the sampled tokens."""

    runner: ModelRunner
    step_result: StepResult
    step: Step
    generation: IntArray
    num_removals: int
    sample: PendingSample | None = None
    places: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    _settled: StepResult | None = None

    @property
    def is_ready(self) -> bool:
        return self.sample is None or self.sample.is_ready

    def wait(self) -> None:
        if self.sample is not None:
            self.sample.wait()

    def result(self) -> StepResult:
        """To be called once, in the order of the steps."""
        self.settle()
        assert self._settled is not None
        return self._settled

    def settle(self) -> None:
        """Waits for its tokens and takes them in; once only, in the order of the steps."""
        if self._settled is None:
            self._settled = self.runner.finish(self)


def _report_failures(
    result: StepResult, output: SamplerOutput, rows: IntArray, failed: BoolArray, structured: StructuredRows
) -> None:
    for place in np.flatnonzero(failed).tolist():
        req_index = int(rows[place])
        reason = structured.failure(req_index)
        if structured.invalid(req_index):
            result.invalid_rows.append(req_index)
        if not reason:
            nan = output.failed[place]
            reason = "the model's logits are not finite" if nan else "an earlier step of this row failed"
        result.errors.append((req_index, reason))
        if result.logprobs is not None:
            result.logprobs[place] = None
