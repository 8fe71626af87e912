"""How long work takes on the device, and what the device can do at most."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from bench.gpu.shapes import Sizes


def seconds(work: Callable[[], object], device: torch.device, num_repeats: int) -> float:
    """The median of `num_repeats`, each of several launches, after two that do not count."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    for _ in range(2):
        work()
    torch.cuda.synchronize(device)
    times = []
    for _ in range(num_repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(3):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 3e3)
    return statistics.median(times)


def memory_bandwidth(sizes: Sizes, device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(sizes.copy_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device, sizes.num_repeats)


def matrix_peak(sizes: Sizes, device: torch.device) -> float:
    """Operations a second of a large product in bfloat16."""
    n = sizes.matrix
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty(n, n, dtype=torch.bfloat16, device=device)
    return 2 * n**3 / seconds(lambda: torch.mm(a, b, out=out), device, sizes.num_repeats)
