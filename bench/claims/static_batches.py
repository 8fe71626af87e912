"""Static batching: what there was before continuous batching, with transformers' generate.

A batch is formed of the requests that wait, first come first served, at most `batch_size`; it is padded on the left to
its longest prompt and computed until its longest answer is complete. Rows whose answers are complete are computed on;
requests that arrive meanwhile wait; all answers of a batch are there when it ends. Its rows' lengths are known to it
beforehand, which flatters it: no batch is computed further than it must be.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.peers.environment import Environment
from bench.peers.in_process import InProcess, in_process
from bench.peers.models import TRANSFORMERS, safetensors_folder
from quartet.services.cli.bench.record import Record


class Asked(NamedTuple):
    """`arrives` is in seconds from the start."""

    arrives: float
    prompt: list[int]
    output_tokens: int


class _Here(Environment):
    """This interpreter's own environment, where it has transformers."""

    @property
    def bin(self) -> Path:
        return Path(sys.executable).parent

    def install(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)


def environment() -> Environment:
    if all(importlib.util.find_spec(name) for name in ("transformers", "torch", "accelerate", "gguf")):
        return _Here("transformers", ())
    return TRANSFORMERS


@contextlib.contextmanager
def transformers(log: Path) -> Iterator[InProcess]:
    """transformers' generate in a process of its own, in bfloat16 on all cores."""
    found = environment()
    with in_process(found, "transformers_generate.py", [str(safetensors_folder(found))], log) as running:
        yield running


Generate = Callable[[list[list[int]], int], object]
"""Computes a batch of prompts to so many tokens each; returns when it has ended."""


def serve(
    asked: Sequence[Asked],
    batch_size: int,
    generate: Generate,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[Record], float, list[int]]:
    """A record for each request, the seconds that all took, and the batches' sizes."""
    started = clock()
    records: list[Record] = []
    sizes: list[int] = []
    left = sorted(asked, key=lambda request: request.arrives)
    while left:
        now = clock() - started
        if left[0].arrives > now:
            sleep(left[0].arrives - now)
            continue
        batch = [request for request in left[:batch_size] if request.arrives <= now]
        left = left[len(batch) :]
        generate([request.prompt for request in batch], max(request.output_tokens for request in batch))
        ended = clock()
        sizes.append(len(batch))
        for request in batch:
            record = Record(started + request.arrives, [ended], request.output_tokens, len(request.prompt), ended=ended)
            records.append(record)
    return records, clock() - started, sizes
