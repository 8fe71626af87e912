"""Scheduler core and executor in one process, without sockets: the plans and results are the real ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from quartet.services.executor.attention.torch_paged import TorchPagedAttention
from quartet.services.executor.engine import Engine as ComputeEngine
from quartet.services.executor.engine import TorchEngine
from quartet.services.executor.input_batch import InputBatch
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.loop import ExecutorLoop
from quartet.services.executor.model_runner import ModelRunner
from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.native.decoder import NativeDecoder
from quartet.services.executor.startup import make_engine
from quartet.services.executor.weights import load_decoder, load_with
from quartet.services.executor.weights.loader import Parameters
from quartet.services.scheduler.core import EXECUTOR, SchedulerCore
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.shared import messages
from quartet.shared.messages import (
    ChoicePast,
    Failed,
    FinishReason,
    GetLoads,
    Granted,
    Loads,
    ModelInfo,
    NewRequest,
    Outputs,
    PromptLogprobs,
    StepResult,
)
from quartet.shared.sampling_params import SamplingParams


class Line:
    """One owner, one executor. Every message makes the trip through its encoding."""

    def __init__(self, runner: ModelRunner, batch: InputBatch, dtype: str = "float32") -> None:
        """`batch` is the runner's."""
        self.executor = ExecutorLoop(runner, 1)
        self.model = ModelInfo(
            "m",
            "f",
            batch.vocab_size,
            batch.max_model_len,
            batch.num_blocks,
            batch.block_table.block_size,
            batch.max_num_seqs,
            batch.max_num_batched_tokens,
            dtype,
            "cpu",
        )
        self.core = SchedulerCore(SchedulerSettings(), 1, lambda: 0.0)
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.cached: dict[tuple[int, int], int] = {}
        self.finished: dict[tuple[int, int], FinishReason] = {}
        self.failed: dict[int, str] = {}
        self.prompt_logprobs: dict[int, list[messages.TokenLogprobs | None]] = {}
        self.loads: Loads | None = None
        self._plans: deque[messages.Message] = deque()
        self._next_id = 1
        self._take(self.core.owner_up("t"))
        self._take(self.core.executor_up(self.model))

    def add(self, prompt: list[int], max_tokens: int, n: int = 1, **sampling: object) -> int:
        params = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0, "ignore_eos": True} | sampling))
        request_id, self._next_id = self._next_id, self._next_id + 1
        request = NewRequest(request_id, 1, prompt, params, [], [ChoicePast(i) for i in range(n)])
        self.outputs.update({(request_id, i): [] for i in range(n)})
        self._take(self.core.new_request("t", messages.decode(messages.encode(request))))
        return request_id

    def run(self, steps: int = 100_000) -> None:
        """Until nothing is left to do, with two plans in flight throughout."""
        for _ in range(steps):
            self._take(self.core.schedule())
            if self._plans:
                answer = self.executor.handle(messages.decode(messages.encode(self._plans.popleft())))
            elif self.executor.in_flight:
                answer = self.executor.finish()
            else:
                return
            if answer is not None:
                self._answered(messages.decode(messages.encode(answer)))

    def num_preemptions(self) -> int:
        self._take(self.core.get_loads("t", GetLoads(1)))
        assert self.loads is not None
        return self.loads.num_preemptions_total

    def _answered(self, answer: messages.Message) -> None:
        if isinstance(answer, StepResult):
            self._take(self.core.step_result(answer))
        elif isinstance(answer, Granted):
            self._take(self.core.granted(answer))
        else:
            raise AssertionError(answer)

    def _take(self, effects: list[tuple[object, messages.Message]]) -> None:
        for destination, message in effects:
            if destination is EXECUTOR:
                self._plans.append(message)
            elif isinstance(message, Outputs):
                for output in message.items:
                    key = (output.request_id, output.index)
                    assert output.start == len(self.outputs[key])
                    self.outputs[key] += output.token_ids
                    self.cached[key] = output.num_cached_tokens
                    if output.finish_reason is not None:
                        self.finished[key] = output.finish_reason
            elif isinstance(message, PromptLogprobs):
                entries = self.prompt_logprobs.setdefault(message.request_id, [])
                assert message.start == len(entries)
                entries += message.entries
            elif isinstance(message, Failed):
                self.failed[message.request_id] = message.message
            elif isinstance(message, Loads):
                self.loads = message


class Engine(Line):
    """A checkpoint's model in plain torch, or on the compiled kernels."""

    def __init__(
        self,
        path: Path,
        *,
        num_blocks: int = 256,
        budget: int = 256,
        max_num_seqs: int = 64,
        dtype: str = "float32",
        native: Callable[[ModelConfig, Parameters], NativeDecoder] | None = None,
        as_tensors: bool = False,
    ) -> None:
        """`as_tensors`: the kernels are called as a model of torch's is."""
        decoder = load_decoder(path, dtype, "cpu") if native is None else load_with(native, path, "bfloat16")
        device = torch.device("cpu")
        self.config = decoder.config
        max_model_len = self.config.max_position_embeddings
        batch = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=budget,
            num_blocks=num_blocks,
            block_size=16,
            vocab_size=self.config.vocab_size,
        )
        cache = KVCache(self.config, num_blocks, 16, decoder.dtype, device)
        for pool in cache.keys + cache.values:
            pool.fill_(float("nan"))
        if native is None or as_tensors:
            engine: ComputeEngine = TorchEngine(decoder, cache, TorchPagedAttention(), batch, device)
        else:
            engine = make_engine(decoder, cache, batch, num_threads=2)
        super().__init__(ModelRunner(engine, batch), batch, dtype)
