"""`python -m bench.gpu.executor_process FOLDER SHAPE DEVICE GRAPHS SIZES`: an executor whose model is made on the spot.

Leaves in FOLDER/executor.json what its steps took, when SIGTERM ends it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.gpu import toy
from bench.gpu.shapes import CONFIGS, TOY, Sizes, random_parameters
from quartet.services.executor.dtypes import DTYPES
from quartet.services.executor.gpu_startup import BuildModel, load_gpu_runner
from quartet.services.executor.loop import ExecutorLoop
from quartet.services.executor.model_runner import LaunchedStep, ModelRunner
from quartet.services.executor.service import ExecutorService, first_epoch
from quartet.services.executor.settings import ExecutorSettings
from quartet.shared.link import Identity
from quartet.shared.log import configure_logging
from quartet.shared.messages import ModelInfo, Role, StepPlan


class TimedRunner:
    """A runner that marks where each step begins and ends on the device."""

    def __init__(self, runner: ModelRunner, device: torch.device) -> None:
        self._runner = runner
        self._on_gpu = device.type == "cuda"
        self.reset = runner.reset
        self.offers = runner.offers
        self.add_vocabulary = runner.add_vocabulary
        self.erase_hashes = runner.erase_hashes
        self.decodes: list[tuple[Any, Any]] = []
        self.launch_seconds: list[float] = []

    def launch(self, plan: StepPlan) -> LaunchedStep:
        started, begin = time.perf_counter(), self._mark()
        step = self._runner.launch(plan)
        if not plan.prefill_rows and any(plan.decode_rows):
            self.decodes.append((begin, self._mark()))
            self.launch_seconds.append(time.perf_counter() - started)
        return step

    def totals(self) -> dict[str, Any]:
        """Of the steps of decodes alone, but for the first and last few, which fill and empty the line."""
        steps = self.decodes[4:-4] or self.decodes
        launches = sorted(self.launch_seconds)
        if not steps:
            return {"num_decode_steps": 0}
        busy = sum(_elapsed(begin, end) for begin, end in steps)
        wall = _elapsed(steps[0][0], steps[-1][1])
        return {
            "num_decode_steps": len(steps),
            "step_seconds": wall / len(steps),
            "busy_share": busy / wall,
            "median_launch_seconds": launches[len(launches) // 2],
            "phases": self._runner.times.totals(),
        }

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _elapsed(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def main(folder: str, shape: str, device_name: str, graphs: str, is_toy: str) -> None:
    configure_logging("executor", "info", "console", "")
    toy.prepare()
    device, config = torch.device(device_name), CONFIGS[shape]
    sizes = TOY if is_toy == "toy" else Sizes()
    length = sizes.prompt_tokens + sizes.output_tokens + 16
    settings = ExecutorSettings(
        run_dir=folder,
        attention_backend="triton",
        dtype="bfloat16",
        max_num_seqs=sizes.num_requests,
        max_num_batched_tokens=8 if is_toy == "toy" else 0,
        num_blocks=sizes.num_requests * (length // 16 + 1),
        cuda_graphs=graphs == "graphs",
    )

    def load(build: BuildModel, dtype: str) -> Any:
        return build(config, random_parameters(config, DTYPES[dtype], device))

    started = time.monotonic()
    runner, batch, dtype = load_gpu_runner(settings, config, length, device, load)
    ready = time.monotonic() - started
    model = ModelInfo(
        shape,
        "random",
        config.vocab_size,
        batch.max_model_len,
        batch.num_blocks,
        16,
        batch.max_num_seqs,
        batch.max_num_batched_tokens,
        dtype,
        device.type,
    )
    timed = TimedRunner(runner, device)
    service = ExecutorService(
        ExecutorLoop(timed, first_epoch()),
        settings.scheduler_address,
        Identity(Role.EXECUTOR, "executor", model=model),
        None,
        times=runner.times,
    )
    service.run()
    totals = {"start_seconds": ready, **timed.totals()}
    Path(folder, "executor.json").write_text(json.dumps(totals))


if __name__ == "__main__":
    main(*sys.argv[1:])
