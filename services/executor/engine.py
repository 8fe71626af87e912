"""What a step's tensors are computed by: one forward pass, then the drawing of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quartet.services.executor.attention.interface import AttentionBackend
from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.input_batch import InputBatch, Step
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.sampler import Drawer, SamplerOutput, sample
from quartet.services.executor.step_times import StepTimes

IntArray = npt.NDArray[np.int64]


class Model(Protocol):
    """What an engine needs of a decoder: hidden states [T, H], and logits [S, V] float32 of some of them."""

    def forward(self, batch: ForwardBatch, kv_cache: KVCache, attention: AttentionBackend) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(slots=True)
class Forward:
    """What a forward pass leaves, good until the engine's next one: hidden [T, H] (there may be more rows behind
    these), query_start_loc, R + 1 places (and perhaps more)."""

    hidden: torch.Tensor
    query_start_loc: list[int]


class PendingSample(Protocol):
    """Tokens that are being drawn."""

    @property
    def is_ready(self) -> bool:
        """Whether output() would not wait."""

    def wait(self) -> None:
        """Until output() has nothing to wait for. May be called in any thread; never raises what output() would."""

    def output(self) -> SamplerOutput: ...


class Engine(Protocol):
    """Computes on one device the steps that an InputBatch was told of, in order, several of them ahead of their
    results where the device allows it: then tokens that the host does not know yet are taken where they are drawn."""

    times: StepTimes

    def add_rows(self, req_indices: Sequence[int]) -> None:
        """New rows, whose sampling state is in the batch."""

    def use_idle_time(self) -> bool:
        """Some milliseconds of what a later step would have to do; whether there is more of it."""

    def forward(self, step: Step) -> Forward: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] -> [S, V] float32; V may exceed the vocabulary."""

    def sample(self, step: Step, forward: Forward) -> PendingSample:
        """The next token of each row of the step that samples; `forward` is the step's own."""


@dataclass(slots=True)
class SampledNow:
    """A PendingSample that has its output."""

    sampled: SamplerOutput
    is_ready: bool = True

    def wait(self) -> None:
        pass

    def output(self) -> SamplerOutput:
        return self.sampled


class TorchEngine:
    """An Engine that computes each step to its end."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        attention: AttentionBackend,
        batch: InputBatch,
        device: torch.device,
        times: StepTimes | None = None,
        drawer: Drawer | None = None,
    ) -> None:
        """`drawer`: of this batch's sampling state, where the device is the CPU."""
        self._model = model
        self._kv_cache = kv_cache
        self._attention = attention
        self._batch = batch
        self._device = device
        self._drawer = drawer
        self.times = StepTimes() if times is None else times
        self._logits_indices = torch.empty(0, dtype=torch.int64)

    def add_rows(self, req_indices: Sequence[int]) -> None:
        pass

    def use_idle_time(self) -> bool:
        return False

    @torch.inference_mode()
    def forward(self, step: Step) -> Forward:
        batch = self._batch.forward_batch(step, self._device)
        self._logits_indices = batch.logits_indices
        self.times.spent("host")
        self._attention.prepare(batch)
        return Forward(self._model.forward(batch, self._kv_cache, self._attention), batch.query_start_loc_list)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(hidden)

    @torch.inference_mode()
    def sample(self, step: Step, forward: Forward) -> SampledNow:
        # Where no prompt is in the batch, all of its tokens are projected.
        is_whole = len(step.sampled_rows) == len(step.slot_mapping)
        hidden = forward.hidden if is_whole else forward.hidden[self._logits_indices]
        logits = self._model.compute_logits(hidden)
        self.times.spent("logits")
        sampling = self._batch.sampling
        return SampledNow(sample(logits, sampling, step.sampled_rows, step.output_indices, self._drawer))
