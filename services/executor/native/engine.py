"""The engine whose steps are calls into the compiled kernels and no tensors: what a call of torch costs a step of one
row, its code long gone from the caches, is a hundredth of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from quartet.services.executor import input_batch
from quartet.services.executor.engine import Forward, SampledNow
from quartet.services.executor.input_batch import InputBatch
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.native.decoder import NativeDecoder
from quartet.services.executor.native.library import Step
from quartet.services.executor.native.sampler import NativeSampler
from quartet.services.executor.sampler import sample
from quartet.services.executor.step_times import StepTimes

IntArray = npt.NDArray[np.int64]


class NativeEngine:
    """An Engine that computes each step to its end. Columns are copied to where the kernels look for them: a copy of
    few numbers is cheaper than asking for an address."""

    def __init__(
        self,
        decoder: NativeDecoder,
        kv_cache: KVCache,
        batch: InputBatch,
        sampler: NativeSampler,
        times: StepTimes | None = None,
        prefault_bytes: int = 0,
    ) -> None:
        """`sampler` is of the batch's sampling state. `prefault_bytes`: see PoolPages."""
        self.times = StepTimes() if times is None else times
        self._decoder = decoder
        self._batch = batch
        self._sampler = sampler
        num_tokens, num_rows = batch.max_num_batched_tokens, batch.max_num_seqs
        self._hidden = torch.empty(num_tokens, decoder.config.hidden_size, dtype=decoder.dtype)
        self._token_ids = np.zeros(num_tokens, np.int64)
        self._positions = np.zeros(num_tokens, np.int64)
        self._slot_mapping = np.zeros(num_tokens, np.int64)
        self._seq_lens = np.zeros(num_rows, np.int32)
        self._query_start_loc = np.zeros(num_rows + 1, np.int32)
        # A token each: of decodes alone.
        self._each = np.arange(num_rows + 1, dtype=np.int32)
        self._each_list = self._each.tolist()
        self._tables = self._batch.block_table.table
        self._table_address, self._each_address = self._tables.ctypes.data, self._each.ctypes.data
        self._start_loc_address = self._query_start_loc.ctypes.data
        self._step = Step(
            token_ids=self._token_ids.ctypes.data,
            positions=self._positions.ctypes.data,
            slot_mapping=self._slot_mapping.ctypes.data,
            seq_lens=self._seq_lens.ctypes.data,
            hidden=self._hidden.data_ptr(),
        )
        decoder.use_cache(kv_cache, self._step)
        self._pages = decoder.pool_pages(kv_cache, prefault_bytes)

    def add_rows(self, req_indices: Sequence[int]) -> None:
        pass

    def use_idle_time(self) -> bool:
        return self._pages.take(self._batch.block_table.highest)

    def forward(self, step: input_batch.Step) -> Forward:
        """hidden has more rows than there are tokens: the step's are the first."""
        num_tokens, num_rows = len(step.slot_mapping), len(step.rows)
        native, batch = self._step, self._batch
        self._token_ids[:num_tokens] = batch.token_ids[step.flat_rows, step.positions]
        self._positions[:num_tokens] = step.positions
        self._slot_mapping[:num_tokens] = step.slot_mapping
        self._seq_lens[:num_rows] = step.ends
        if num_tokens == num_rows:
            native.query_start_loc, start_loc = self._each_address, self._each_list
        else:
            np.cumsum(step.counts, out=self._query_start_loc[1 : num_rows + 1])
            native.query_start_loc, start_loc = self._start_loc_address, self._query_start_loc.tolist()
        if num_rows == 1:
            native.table_width = self._tables.shape[1]
            native.block_tables = self._table_address + self._tables.strides[0] * int(step.rows[0])
        else:
            tables = batch.block_table.rows(step.rows, step.ends)
            native.table_width, native.block_tables = tables.shape[1], tables.ctypes.data
        native.num_tokens, native.num_rows, native.num_decodes = num_tokens, num_rows, step.num_decodes
        longest = int(step.ends[0]) if num_rows == 1 else int(step.ends.max())
        self.times.spent("host")
        self._decoder.run(native, longest)
        return Forward(self._hidden, start_loc)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.compute_logits(hidden)

    def sample(self, step: input_batch.Step, forward: Forward) -> SampledNow:
        num_rows = len(step.sampled_rows)
        if num_rows == len(step.slot_mapping):
            logits = self._decoder.project(self._step.hidden, num_rows)
        else:
            last = step.counts.cumsum()[step.samples] - 1
            logits = self._decoder.compute_logits(self._hidden[torch.from_numpy(last)])
        self.times.spent("logits")
        sampling = self._batch.sampling
        return SampledNow(sample(logits, sampling, step.sampled_rows, step.output_indices, self._sampler))
