"""A scheduler and an executor as processes, asked over ZeroMQ as a tokenizer asks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu.shapes import CONFIGS, Sizes, num_weight_bytes
from quartet.services.executor.kv_cache import KVCache
from quartet.shared.link import Identity, Peer, Status
from quartet.shared.messages import AnyMessage, ChoicePast, Failed, NewRequest, Outputs, Role
from quartet.shared.sampling_params import SamplingParams
from quartet.shared.transport import Dialer, ipc_address

BUSY_GOAL = 0.95
TIMEOUT = 150.0


class Client:
    """A tokenizer's end of the link: counts tokens as they come."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.done = asyncio.Event()
        self.peer: Peer | None = None
        self.counts: dict[int, int] = {}
        self.finished: set[int] = set()
        self.arrivals: list[tuple[float, int]] = []
        self.failure = ""

    def on_up(self, peer: Peer) -> None:
        self.peer = peer
        self.on_status(peer)

    def on_down(self, peer: Peer, reason: str) -> None:
        self.ready.clear()

    def on_status(self, peer: Peer) -> None:
        if peer.ready and peer.model is not None:
            self.ready.set()

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        if isinstance(message, Outputs):
            self.arrivals.append((time.perf_counter(), sum(len(item.token_ids) for item in message.items)))
            for item in message.items:
                self.counts[item.request_id] = item.start + len(item.token_ids)
                if item.finish_reason is not None:
                    self.finished.add(item.request_id)
        elif isinstance(message, Failed):
            self.failure = message.message
        if self.failure or (len(self.finished) == len(self.counts) and self.finished):
            self.done.set()


def measure(shape: str, graphs: bool, sizes: Sizes, device: torch.device, is_toy: bool) -> dict[str, Any]:
    """Figures of one run; raises AssertionError when an answer is not whole."""
    with tempfile.TemporaryDirectory(prefix="q") as folder:
        with _processes(folder, shape, graphs, device, is_toy) as running:
            client = asyncio.run(_ask(folder, shape, sizes, running))
        executor = json.loads(Path(folder, "executor.json").read_text())
    if client.failure:
        raise AssertionError(client.failure)
    if set(client.counts.values()) != {sizes.output_tokens} or len(client.counts) != sizes.num_requests:
        raise AssertionError(f"not all answers are whole: {client.counts}")
    # From when all decode to when the first ends; requests that came late may leave no such time.
    together = [arrival for arrival in client.arrivals if arrival[1] == sizes.num_requests]
    arrivals = together if len(together) > 2 else client.arrivals
    rate = sum(count for _, count in arrivals[1:]) / (arrivals[-1][0] - arrivals[0][0])
    return {
        "shape": shape,
        "graphs": graphs,
        "decode_tokens_per_second": rate,
        # Read by a step in the middle of the run: all weights, and the keys and values of all rows.
        "step_bytes": num_weight_bytes(CONFIGS[shape], torch.bfloat16) + _num_kv_bytes(shape, sizes),
        "num_requests": sizes.num_requests,
        "busy_goal": BUSY_GOAL,
        **executor,
    }


def _num_kv_bytes(shape: str, sizes: Sizes) -> int:
    context = sizes.prompt_tokens + sizes.output_tokens // 2
    per_block = KVCache.bytes_per_block(CONFIGS[shape], 1, torch.bfloat16)
    return sizes.num_requests * context * per_block


async def _ask(folder: str, shape: str, sizes: Sizes, running: list[subprocess.Popen[bytes]]) -> Client:
    client = Client()
    dialer = Dialer(
        ipc_address(folder, "scheduler-tokenizer"),
        Identity(Role.TOKENIZER, "tokenizer", tokenizer_fingerprint="random"),
        client,
        lambda: Status(0, 0, True),
        expect=Role.SCHEDULER,
    )
    dialer.start()
    try:
        await _wait(client.ready, running)
        assert client.peer is not None
        rng = random.Random(0)
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=sizes.output_tokens)
        for request_id in range(1, sizes.num_requests + 1):
            prompt = [rng.randrange(CONFIGS[shape].vocab_size) for _ in range(sizes.prompt_tokens)]
            client.counts[request_id] = 0
            client.peer.send(NewRequest(request_id, 1, prompt, sampling, [], [ChoicePast(0)]))
        await _wait(client.done, running)
    finally:
        dialer.close()
    return client


async def _wait(event: asyncio.Event, running: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not event.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), 0.25)
        for process in running:
            if process.poll() is not None:
                raise AssertionError(f"{process.args} ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing for {TIMEOUT:.0f} s")


@contextlib.contextmanager
def _processes(
    folder: str, shape: str, graphs: bool, device: torch.device, is_toy: bool
) -> Iterator[list[subprocess.Popen[bytes]]]:
    commands = [
        [sys.executable, "-m", "bench.gpu.scheduler_process", folder],
        [
            *(sys.executable, "-m", "bench.gpu.executor_process", folder, shape, str(device)),
            *("graphs" if graphs else "eager", "toy" if is_toy else "full"),
        ],
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    running = [subprocess.Popen(command, env=environment, stdout=sys.stderr) for command in commands]
    try:
        yield running
    finally:
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
