"""Runs one step plan: rows, forward pass, sampling, result."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quartet.services.executor.attention.interface import AttentionBackend
from quartet.services.executor.block_hashes import BlockHashes
from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.input_batch import InputBatch, Step
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.logprobs import gather_logprobs
from quartet.services.executor.sampler import SamplerOutput, sample
from quartet.services.executor.step_times import StepTimes
from quartet.shared.block_hash import hash_root
from quartet.shared.messages import (
    FAILED_TOKEN_ID,
    NewRow,
    RowPromptLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from quartet.shared.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]

# Prompt log-probabilities are taken in slices of at most this many logits (64 MiB of float32).
_MAX_LOGITS = 2**24


class Model(Protocol):
    """What the runner needs of a decoder: hidden states [T, H], and logits [S, V] float32 of some of them."""

    def forward(self, batch: ForwardBatch, kv_cache: KVCache, attention: AttentionBackend) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class ModelRunner:
    """Owns rows, block hashes and KV memory. After execute() raised anything but PlanError, only reset()
    leads on."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        attention: AttentionBackend,
        batch: InputBatch,
        device: torch.device,
        times: StepTimes | None = None,
    ) -> None:
        self.times = StepTimes() if times is None else times
        self._model = model
        self._kv_cache = kv_cache
        self._attention = attention
        self._batch = batch
        self._device = device
        self._block_size = batch.block_table.block_size
        self._hashes = BlockHashes(batch.num_blocks, batch.max_num_seqs, self._block_size)

    def reset(self) -> None:
        """All rows leave; KV memory and the hashes of whole blocks stay."""
        self._batch.clear()
        self._hashes.clear_rows()

    def offers(self) -> tuple[bytes, bytes]:
        """Blocks that hold a whole known prefix; see `Granted`."""
        return self._hashes.offers()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Raises PlanError, having changed nothing, when the plan cannot be applied."""
        step = self._batch.apply(plan)
        for row in plan.new_rows:
            self._hashes.start_row(row.req_index, row.hash_root, row.num_computed_tokens)
        result = StepResult(plan.epoch, plan.step_id, b"")
        if not len(step.rows):
            return result
        self._hashes.erase(step.slot_mapping // self._block_size)

        batch = self._batch.forward_batch(step, self._device)
        self.times.count(len(step.slot_mapping), int(np.count_nonzero(step.samples)))
        self.times.spent("host")
        self._attention.prepare(batch)
        hidden = self._model.forward(batch, self._kv_cache, self._attention)
        self.times.spent("forward")
        result.prompt_logprobs = self._prompt_logprobs(step, batch, hidden)
        self.times.spent("logits")
        if step.samples.any():
            self._sample(result, step, batch, hidden)
        # What a failed row wrote is not to be trusted.
        whole = ~self._batch.failed[step.rows]
        rows = step.rows[whole]
        self._hashes.record(rows, (step.starts + step.counts)[whole], self._batch.block_table, self._batch.token_ids)
        return result

    def warm_up(self) -> None:
        """Runs a prefill and a decode step on made-up tokens, so that no request pays for first-time work."""
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
            sampling=SamplingParams(top_p=0.9),
            eos_token_ids=[],
            choice_index=0,
            hash_root=hash_root(),
        )
        count = np.array([num_tokens], "<u4").tobytes()
        self.execute(StepPlan(0, 0, b"", [row], b"", b"", b"", b"\0\0", count))
        self.execute(StepPlan(0, 1, b"", [], b"", b"", b"\1", b"", b""))
        self.reset()
        self._hashes.clear()
        self.times.clear()

    def _sample(self, result: StepResult, step: Step, batch: ForwardBatch, hidden: torch.Tensor) -> None:
        rows = step.rows[step.samples]
        output_indices = self._batch.num_tokens[rows] - self._batch.num_prompt_tokens[rows]
        logits = self._model.compute_logits(hidden[batch.logits_indices])
        self.times.spent("logits")
        output = sample(logits, self._batch.sampling, rows, output_indices)
        failed = output.failed | self._batch.failed[rows]
        self._batch.append_sampled(rows, output.token_ids, failed)
        self.times.spent("sampling")
        result.token_ids = np.where(failed, FAILED_TOKEN_ID, output.token_ids).astype("<u4").tobytes()
        result.logprobs = output.logprobs
        if failed.any():
            _report_failures(result, output, rows, failed)

    def _prompt_logprobs(self, step: Step, batch: ForwardBatch, hidden: torch.Tensor) -> list[RowPromptLogprobs]:
        """A token's entry comes with the step that computes the token before it; position 0 has none."""
        rows = self._batch
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
            offset = batch.query_start_loc_list[place] - start - 1
            targets = rows.token_ids[req_index, first:last].astype(np.int64)
            entries += self._score(
                hidden[first + offset : last + offset], targets, int(rows.num_prompt_logprobs[req_index])
            )
            if entries:
                results.append(RowPromptLogprobs(req_index, first - (entries[0] is None), entries))
        return results

    def _score(self, hidden: torch.Tensor, targets: IntArray, num_top: int) -> list[TokenLogprobs]:
        """Log-probabilities of targets [N] by the model alone (no bias, no penalties) after hidden [N, H]."""
        vocab_size = self._batch.vocab_size
        size = max(1, _MAX_LOGITS // vocab_size)
        entries = []
        for i in range(0, len(targets), size):
            logits = self._model.compute_logits(hidden[i : i + size])[:, :vocab_size]
            part = targets[i : i + size]
            entries += gather_logprobs(logits, part, np.full(len(part), num_top))
        return entries


def _report_failures(result: StepResult, output: SamplerOutput, rows: IntArray, failed: npt.NDArray[np.bool_]) -> None:
    for place in np.flatnonzero(failed).tolist():
        reason = "the model's logits are not finite" if output.failed[place] else "an earlier step of this row failed"
        result.errors.append((int(rows[place]), reason))
        if result.logprobs is not None:
            result.logprobs[place] = None
