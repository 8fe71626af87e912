"""The sampling state of the persistent batch in the device's memory, and the launches that draw from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

from quartet.services.executor.allowed_tokens import keep_allowed
from quartet.services.executor.logprobs import GatheredLogprobs, gather
from quartet.services.executor.noise import stream_keys
from quartet.services.executor.sampling_rows import SamplingRows
from quartet.services.executor.triton import sampling as kernels

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class DeviceSample:
    """token_ids [S] int32 on the device, -1 for a row that failed. `logprobs` is of the rows that `wanted` [S]
    names, None when there are none."""

    token_ids: torch.Tensor
    wanted: BoolArray
    logprobs: GatheredLogprobs | None


class DeviceSampler:
    """Row state by req_index, brought up to date by `add` when a row comes.

    last_tokens [max_num_seqs] int64: each row's newest sampled token, the input of its next decode step.
    """

    def __init__(self, state: SamplingRows, max_num_seqs: int, device: torch.device) -> None:
        """`state` stays the host's: its columns say which launches a step needs."""
        self._state = state
        self._device = device
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._params = torch.zeros((max_num_seqs, kernels.NUM_PARAMS.value), dtype=torch.float32, device=device)
        self._counters = torch.zeros((max_num_seqs, kernels.NUM_COUNTERS.value), dtype=torch.int64, device=device)
        # A slot holds a row's tallies and biases; few rows need one, so there are few at first.
        self._tallies = torch.zeros((0, state.vocab_size), dtype=torch.int32, device=device)
        self._biases = torch.zeros((0, state.vocab_size), dtype=torch.float32, device=device)
        self._free_slots: list[int] = []
        self._slots = np.full(max_num_seqs, -1, np.int64)

    def add(self, req_indices: Sequence[int]) -> None:
        """Rows that are new in `state`; who had their place before is forgotten."""
        if not len(req_indices):
            return
        rows, state = np.array(req_indices, np.int64), self._state
        for req_index in req_indices:
            self._free(req_index)
            if req_index in state.logit_bias or req_index in state.token_counts or req_index in state.stop_ids:
                self._fill_slot(req_index)
        params = np.zeros((len(rows), kernels.NUM_PARAMS.value), np.float32)
        params[:, kernels.TEMPERATURE.value] = np.where(state.is_random[rows], state.temperature[rows], 0.0)
        params[:, kernels.TOP_P.value] = state.top_p[rows]
        with np.errstate(divide="ignore"):
            params[:, kernels.MIN_P_LIMIT.value] = -np.log(state.min_p[rows])
        params[:, kernels.REPETITION.value] = state.repetition_penalty[rows]
        params[:, kernels.FREQUENCY.value] = state.frequency_penalty[rows]
        params[:, kernels.PRESENCE.value] = state.presence_penalty[rows]
        counters = np.zeros((len(rows), kernels.NUM_COUNTERS.value), np.int64)
        counters[:, kernels.KEY.value] = stream_keys(state.seed[rows], state.choice_index[rows]).view(np.int64)
        counters[:, kernels.TOP_K.value] = np.where(state.top_k[rows] < state.vocab_size, state.top_k[rows], 0)
        counters[:, kernels.SLOT.value] = self._slots[rows]
        counters[:, kernels.MIN_TOKENS.value] = state.min_tokens[rows]
        index = self._on_device(rows)
        self._params.index_copy_(0, index, self._on_device(params))
        self._counters.index_copy_(0, index, self._on_device(counters))

    def remove(self, req_indices: Sequence[int]) -> None:
        for req_index in req_indices:
            self._free(req_index)

    def sample(
        self, logits: torch.Tensor, rows: torch.Tensor, output_indices: torch.Tensor, req_indices: IntArray
    ) -> DeviceSample:
        """Launches the drawing of each row's next token.

        logits [S, V] float32, rows contiguous, changed in place; V may exceed the vocabulary. rows,
        output_indices [S] int64 on the device, as for sampler.sample; req_indices [S]: rows on the host.
        """
        state, num_rows, vocab_size = self._state, len(req_indices), self._state.vocab_size
        stride = logits.stride(0)
        best = torch.empty(num_rows, dtype=torch.float32, device=self._device)
        token_ids = torch.empty(num_rows, dtype=torch.int32, device=self._device)
        is_random = state.is_random[req_indices]
        ranked = is_random & (
            (state.top_p[req_indices] < 1) | ((state.top_k[req_indices] > 0) & (state.top_k[req_indices] < vocab_size))
        )
        truncated = ranked | (is_random & (state.min_p[req_indices] > 0))

        if (self._slots[req_indices] >= 0).any():
            kernels.adjust_kernel[(num_rows, triton.cdiv(vocab_size, kernels.ADJUST_TILE))](
                logits,
                stride,
                rows,
                output_indices,
                self._params,
                self._counters,
                self._tallies,
                self._biases,
                vocab_size,
                TILE=kernels.ADJUST_TILE,
                num_warps=kernels.ADJUST_WARPS,
            )
        allowed = state.structured.allowed(req_indices)
        if allowed is not None:
            keep_allowed(logits[:, :vocab_size], allowed)
        kernels.row_max_kernel[(num_rows,)](
            logits, stride, best, token_ids, vocab_size, TILE=kernels.ROW_TILE, num_warps=kernels.NUM_WARPS
        )
        limits = best
        if truncated.any():
            limits = self._limits(logits, rows, best)
        kernels.draw_kernel[(num_rows,)](
            logits,
            stride,
            rows,
            output_indices,
            best,
            token_ids,
            self._params,
            self._counters,
            limits,
            self.last_tokens,
            self._tallies,
            vocab_size,
            TILE=kernels.ROW_TILE,
            IS_RANDOM=bool(is_random.any()),
            IS_TRUNCATED=bool(truncated.any()),
            num_warps=kernels.NUM_WARPS,
        )
        return self._with_logprobs(logits, token_ids, req_indices)

    def _limits(self, logits: torch.Tensor, rows: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        num_rows, vocab_size = len(best), self._state.vocab_size
        candidates = torch.empty((num_rows, kernels.MAX_CANDIDATES), dtype=torch.float32, device=self._device)
        num_candidates = torch.empty(num_rows, dtype=torch.int32, device=self._device)
        edges, masses, limits = torch.empty((3, num_rows), dtype=torch.float32, device=self._device).unbind()
        common = (logits, logits.stride(0), rows, best, self._params, self._counters)
        found = (candidates, num_candidates, edges, masses)
        kernels.candidates_kernel[(num_rows,)](
            *common,
            *found,
            vocab_size,
            TILE=kernels.EDGE_TILE,
            MAX_CANDIDATES=kernels.MAX_CANDIDATES,
            num_warps=kernels.NUM_WARPS,
        )
        kernels.limits_kernel[(num_rows,)](
            *common,
            *found,
            limits,
            vocab_size,
            TILE=kernels.LIMITS_TILE,
            MAX_CANDIDATES=kernels.MAX_CANDIDATES,
            num_warps=kernels.LIMITS_WARPS,
        )
        return limits

    def _with_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, req_indices: IntArray) -> DeviceSample:
        wanted = self._state.num_logprobs[req_indices] >= 0
        if not wanted.any():
            return DeviceSample(token_ids, wanted, None)
        places = self._on_device(np.flatnonzero(wanted))
        chosen = token_ids.index_select(0, places).clamp(min=0).to(torch.int64)
        num_top = int(self._state.num_logprobs[req_indices].max())
        vocabulary = logits[:, : self._state.vocab_size].index_select(0, places)
        return DeviceSample(token_ids, wanted, gather(vocabulary, chosen, num_top))

    # --- slots ------------------------------------------------------------------------------------

    def _free(self, req_index: int) -> None:
        slot = int(self._slots[req_index])
        if slot >= 0:
            self._slots[req_index] = -1
            self._free_slots.append(slot)

    def _fill_slot(self, req_index: int) -> None:
        """The device keeps the tallies from here on: the host's counts are only a start."""
        if not self._free_slots:
            self._grow()
        slot = self._slots[req_index] = self._free_slots.pop()
        tally = np.zeros(self._state.vocab_size, np.int32)
        if counts := self._state.token_counts.pop(req_index, None):
            tally[counts.ids] = counts.output_counts.astype(np.int32) | kernels.IN_PROMPT.value
        if (stop_ids := self._state.stop_ids.get(req_index)) is not None:
            tally[stop_ids] |= kernels.IS_STOP.value
        bias = np.zeros(self._state.vocab_size, np.float32)
        if (biases := self._state.logit_bias.get(req_index)) is not None:
            bias[biases[0]] = biases[1]
        self._tallies[slot].copy_(torch.from_numpy(tally))
        self._biases[slot].copy_(torch.from_numpy(bias))

    def _grow(self) -> None:
        num_slots, vocab_size = self._tallies.shape
        more = max(1, num_slots)
        self._tallies = torch.cat((self._tallies, self._tallies.new_zeros((more, vocab_size))))
        self._biases = torch.cat((self._biases, self._biases.new_zeros((more, vocab_size))))
        self._free_slots += range(num_slots, num_slots + more)

    def _on_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)
