"""`make bench`: what the scheduler costs, how fast the whole line streams, what it uses at rest.

Prints one JSON object, with a row per precision. The line is the four real processes on SmolLM2-135M, with
the client's load on the same cores. `bound` is what the machine's memory and arithmetic rates, measured in
the same run, allow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.client_load import Load, run_load
from bench.line import (
    HEAD_PARAMETERS,
    LAYER_PARAMETERS,
    PRECISIONS,
    ROLES,
    Precision,
    children,
    cpu_seconds,
    resident_bytes,
    serving,
    spread,
)
from quartet.services.executor.native.library import detect_isa


def idle_cpu(pids: dict[str, int], seconds: float) -> dict[str, float]:
    """Percent of a core that each process uses with nothing to do."""
    before = {role: cpu_seconds(pid) for role, pid in pids.items()}
    time.sleep(seconds)
    used = {role: 100 * (cpu_seconds(pid) - before[role]) / seconds for role, pid in pids.items()}
    return {role: round(percent, 2) for role, percent in used.items()} | {"together": round(sum(used.values()), 2)}


def scheduler_figures() -> dict[str, Any]:
    """In a process of its own: torch in the same one would be measured too."""
    output = subprocess.run([sys.executable, "-m", "bench.scheduler"], check=True, capture_output=True).stdout
    figures: dict[str, Any] = json.loads(output)
    return figures


def line_figures(precision: Precision, rounds: int, idle_seconds: float, log: Path) -> dict[str, Any]:
    with serving(precision, log) as (address, process, ready_seconds):
        pids = children(process.pid)
        one, many = [], []
        used = dict.fromkeys((*ROLES, "client"), 0.0)
        for seed in range(rounds):
            one.append(asyncio.run(run_load(Load(address, 1, prompt_tokens=16, output_tokens=128, seed=seed))))
            before = {role: cpu_seconds(pid) for role, pid in pids.items()} | {"client": time.process_time()}
            many.append(asyncio.run(run_load(Load(address, 32, seed=100 + seed))))
            for role, seconds in before.items():
                used[role] += (time.process_time() if role == "client" else cpu_seconds(pids[role])) - seconds
        short = asyncio.run(run_load(Load(address, 1, num_requests=8, prompt_tokens=128, output_tokens=2, seed=7)))
        return {
            "ready_seconds": round(ready_seconds, 2),
            "one_stream": {
                "tokens_per_second": spread([1 / r["time_per_output_token"]["mean"] for r in one]),
                "load": "16 in, 128 out",
            },
            "streams_32": {
                "output_tokens_per_second": spread([r["output_tokens_per_second"] for r in many]),
                "time_to_first_token_mean": spread([r["time_to_first_token"]["mean"] for r in many]),
                "largest_gap_between_chunks": spread([r["gap_between_chunks"]["max"] for r in many]),
                "cpu_seconds_per_run": {role: round(seconds / rounds, 2) for role, seconds in used.items()},
                "load": "128 in, 128 out, all at once",
            },
            "time_to_first_token_idle_128": short["time_to_first_token"]["p50"],
            "resident_megabytes": {role: round(resident_bytes(pid) / 2**20) for role, pid in pids.items()},
            "idle_cpu_percent": idle_cpu(pids, idle_seconds),
        }


def bounds(precision: Precision) -> dict[str, float]:
    """One stream reads all weights for each token; 32 streams of 128 in and 128 out multiply with them 256 times
    for 128 tokens out (the head only for the 128), and read them for each 32 tokens out."""
    import torch

    from bench.bounds import matrix_rate, read_rate

    kinds = [torch.float32 if precision.dtype == "float32" else torch.bfloat16]
    if precision.quantization != "none":
        # What is held in few bits may be multiplied in 8.
        kinds.append(torch.int8)
    read, rate = read_rate(), max(matrix_rate(kind) for kind in kinds)
    operations = 2 * (2 * LAYER_PARAMETERS + HEAD_PARAMETERS)
    one_stream = read / precision.weight_bytes
    return {
        "memory_gigabytes_per_second": round(read / 1e9, 1),
        "matrix_gigaops_per_second": round(rate / 1e9, 1),
        "one_stream_tokens_per_second": round(one_stream, 1),
        "streams_32_tokens_per_second": round(min(rate / operations, 32 * one_stream), 1),
    }


def row(precision: Precision, rounds: int, idle_seconds: float, log: Path) -> dict[str, Any]:
    line = line_figures(precision, rounds, idle_seconds, log)
    bound = bounds(precision)
    for load, rate in (("one_stream", "tokens_per_second"), ("streams_32", "output_tokens_per_second")):
        share = line[load][rate]["median"] / bound[f"{load}_tokens_per_second"]
        line[load]["share_of_bound"] = round(share, 3)
    return {"line": line, "bound": bound}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=PRECISIONS,
        default=["bf16", "int8", "int4"],
        help="rows (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each load (default 3)")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="where the services' logs go")
    arguments = parser.parse_args()
    result = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "kernels": detect_isa().describe(),
            "load_average": os.getloadavg(),
        },
        "scheduler": scheduler_figures(),
        "precisions": {
            name: row(PRECISIONS[name], arguments.rounds, arguments.idle_seconds, arguments.log)
            for name in arguments.precisions
        },
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
