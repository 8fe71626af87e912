"""The loads of `make bench`, and one round of one of them."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.client_load import Load, run_load
from bench.line import ROLES, cpu_seconds, spread
from bench.steps import StepReports, Totals

ONE = Load(concurrency=1, prompt_tokens=16, output_tokens=128)
MANY = Load(concurrency=32, prompt_tokens=128, output_tokens=128)
SHORT = Load(concurrency=8, prompt_tokens=16, output_tokens=128)
LOADS = {
    "1": ONE,
    "32": MANY,
    "64": dataclasses.replace(MANY, concurrency=64),
    "128": dataclasses.replace(MANY, concurrency=128),
    "32 sampled": dataclasses.replace(MANY, temperature=0.8, top_p=0.95, top_k=50),
    "8 short": SHORT,
    "64 short": dataclasses.replace(SHORT, concurrency=64),
    "256 short": dataclasses.replace(SHORT, concurrency=256),
    "first token": Load(concurrency=1, num_requests=8, prompt_tokens=128, output_tokens=2),
}
# What the loads can need of the KV pool at most: 256 of 16 + 128 tokens, 128 of 128 + 128, the long stream.
NUM_BLOCKS = 2560


@dataclasses.dataclass(frozen=True)
class Round:
    """What the client saw, what the executor did, and the CPU seconds that each process used."""

    client: Mapping[str, Any]
    steps: Totals
    used: Mapping[str, float]


def run_round(load: Load, address: str, seed: int, reports: StepReports, pids: Mapping[str, int]) -> Round:
    load = dataclasses.replace(load, address=address, seed=seed)
    # Before what is counted, so that the client's own first work is not.
    asyncio.run(run_load(dataclasses.replace(load, num_requests=1, output_tokens=4, warmup_requests=0)))
    load = dataclasses.replace(load, warmup_requests=0, seed=seed + 1_000_000)
    steps, used = reports.now(), {role: cpu_seconds(pid) for role, pid in pids.items()}
    client_used = time.process_time()
    client = asyncio.run(run_load(load))
    client_used = time.process_time() - client_used
    used = {role: cpu_seconds(pids[role]) - seconds for role, seconds in used.items()} | {"client": client_used}
    return Round(client, reports.now() - steps, used)


def summary(load: Load, rounds: Sequence[Round]) -> dict[str, Any]:
    """The figures of a load's rounds together."""
    steps = sum((round_.steps for round_ in rounds), Totals())

    def of(name: str, scale: float = 1.0) -> dict[str, float]:
        return spread([scale * round_.client[name] for round_ in rounds])

    found: dict[str, Any] = {
        "load": f"{load.concurrency} x {load.prompt_tokens} in, {load.output_tokens} out",
        "output_tokens_per_second": of("output_throughput"),
        "time_to_first_token_mean": of("mean_ttft_ms", 1e-3),
        "time_to_first_token_p50": of("median_ttft_ms", 1e-3),
        "step": steps.breakdown(),
        "cpu_seconds_per_run": {
            role: round(statistics.fmean(round_.used[role] for round_ in rounds), 2) for role in (*ROLES, "client")
        },
        "failed": sum(round_.client["failed"] for round_ in rounds),
        "cached_tokens": sum(round_.client["total_cached_tokens"] for round_ in rounds),
    }
    if load.concurrency == 1 and load.output_tokens > 2:
        found["decode_tokens_per_second"] = spread([1e3 / round_.client["mean_tpot_ms"] for round_ in rounds])
    if load.output_tokens > 2:
        gaps = [round_.client["max_itl_ms"] / 1e3 for round_ in rounds]
        means = [round_.steps.wall / max(1, round_.steps.num_steps) for round_ in rounds]
        found["largest_gap"] = spread(gaps)
        found["largest_gap_in_mean_steps"] = spread([gap / mean for gap, mean in zip(gaps, means, strict=True)])
    return found
