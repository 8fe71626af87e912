"""Drawing tokens with the compiled kernels: what sampler.py's plain path does between masks and log-probabilities."""

from __future__ import annotations

import weakref
from ctypes import c_void_p

import numpy as np
import numpy.typing as npt
import torch

from quartet.services.executor.native.library import Isa, SampleStep, detect_isa, load_library
from quartet.services.executor.sampling_rows import SamplingRows

IntArray = npt.NDArray[np.int64]


class NativeSampler:
    """A Drawer for the rows of one `state`, whose columns it reads where they lie."""

    def __init__(self, state: SamplingRows, num_threads: int, isa: Isa | None = None) -> None:
        """`isa` narrows what the CPU has.
        Raises ValueError where `can_sample` is false, MemoryError when memory is short."""
        library = load_library()
        if library is None or not can_sample():
            raise ValueError("the compiled sampler cannot run here")
        handle = library.quartet_sampler_of(int((detect_isa() if isa is None else isa).widest()), num_threads)
        if not handle:
            raise MemoryError("cannot create the sampler")
        self._handle = c_void_p(handle)
        # Its threads end with it, before the interpreter does.
        weakref.finalize(self, library.quartet_sampler_free, self._handle)
        self._sample = library.quartet_sample
        self._state = state
        # A step's columns are copied to where the kernel looks: a copy of few numbers is cheaper than an address.
        self._reserve(len(state.is_random))
        self._logits: torch.Tensor | None = None

    def _reserve(self, max_rows: int) -> None:
        state = self._state
        self._rows = np.zeros(max_rows, np.int64)
        self._output_indices = np.zeros(max_rows, np.int64)
        self._token_ids = np.zeros(max_rows, np.int64)
        self._failed = np.zeros(max_rows, bool)
        self._step = SampleStep(
            vocab_size=state.vocab_size,
            rows=self._rows.ctypes.data,
            output_indices=self._output_indices.ctypes.data,
            is_random=state.is_random.ctypes.data,
            temperature=state.temperature.ctypes.data,
            top_k=state.top_k.ctypes.data,
            top_p=state.top_p.ctypes.data,
            min_p=state.min_p.ctypes.data,
            seed=state.seed.ctypes.data,
            choice_index=state.choice_index.ctypes.data,
            token_ids=self._token_ids.ctypes.data,
            failed=self._failed.ctypes.data,
        )

    def draw(
        self, logits: torch.Tensor, rows: IntArray, output_indices: IntArray
    ) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """([S] token ids, FAILED_TOKEN_ID where failed, [S] which rows failed) of logits [S, V] float32 on the CPU,
        columns next to each other, V at most the vocabulary's size; rows, output_indices [S] as for sampler.sample."""
        num_rows = len(rows)
        if num_rows > len(self._rows):
            self._reserve(num_rows)
        self._rows[:num_rows] = rows
        self._output_indices[:num_rows] = output_indices
        step = self._step
        step.num_rows = num_rows
        # Mostly the same memory again.
        if logits is not self._logits:
            self._logits, self._stride, self._address = logits, logits.stride(0), logits.data_ptr()
            step.vocab_size = logits.shape[1]
        step.stride, step.logits = self._stride, self._address
        if self._sample(self._handle, step) < 0:
            raise MemoryError("the kernels could not get memory")
        return self._token_ids[:num_rows].copy(), self._failed[:num_rows].copy()


def can_sample() -> bool:
    """Whether the compiled sampler was built and this CPU has what it needs."""
    return bool(detect_isa().widest())
