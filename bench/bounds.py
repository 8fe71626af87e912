"""What this machine could do at best: the bounds that measured figures are held against."""

from __future__ import annotations

import statistics
import time

import torch


def matrix_rate(dtype: torch.dtype, rows: int = 256, size: int = 2048, rounds: int = 15) -> float:
    """Operations a second of torch's matrix product [rows, size] x [size, size]; the best of many."""
    a, b = (10 * torch.randn(rows, size)).to(dtype), (10 * torch.randn(size, size)).to(dtype)
    multiply = torch._int_mm if dtype == torch.int8 else torch.mm
    times = []
    with torch.inference_mode():
        for _ in range(rounds):
            start = time.perf_counter()
            multiply(a, b)
            times.append(time.perf_counter() - start)
    return 2 * rows * size * size / min(times)


def read_rate(num_bytes: int = 1 << 29, rounds: int = 9) -> float:
    """Bytes a second that all cores together read from memory."""
    block = torch.ones(num_bytes // 4)
    times = []
    with torch.inference_mode():
        for _ in range(rounds):
            start = time.perf_counter()
            block.sum()
            times.append(time.perf_counter() - start)
    return num_bytes / statistics.median(times)
