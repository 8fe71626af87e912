"""`make bench`: how fast the whole line streams, where a step goes, what it uses, what the machine would allow.

The line is the four real processes on SmolLM2-135M, with the client's load on the same cores. One row for each
precision: tables go to stderr as they are measured, one JSON object to stdout or to a file. The bounds are measured
in the same run. docs/performance.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from bench.bounds import allowed
from bench.line import PRECISIONS, Precision, children, idle_cpu, proportional_bytes, serving, settle
from bench.loads import LOADS, MANY, NUM_BLOCKS, Round, run_round, summary
from bench.long_stream import run_long_stream
from bench.report import precision_lines
from bench.steps import StepReports
from quartet.services.executor.native.library import detect_isa

PARTS = {
    "loads": "streams 1, 32, 64 and 128; 32 sampled; 8, 64 and 256 with short prompts; first token at rest",
    "long": "one stream of 8,000 tokens",
    "rest": "CPU with nothing to do",
    "memory": "of all processes beyond the KV pool",
    "scheduler": "a step of the scheduler alone",
}
# Small, so that two rounds of 32 streams use every block: what is left beside the pool is then its whole size.
MEMORY_BLOCKS = 640
BLOCK_MEGABYTES = 16 * 2 * 30 * 3 * 64 / 2**20  # a value of SmolLM2's keys and values in one byte


def main() -> None:
    arguments = parse_arguments()
    say(f"load average {os.getloadavg()[0]:.1f}; kernels: {detect_isa().describe()}, isa {arguments.isa}")
    rates = run_module("bench.bounds")
    result: dict[str, Any] = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "kernels": detect_isa().describe(),
            "isa": arguments.isa,
            "load_average": os.getloadavg(),
            "rates": rates,
        },
        "precisions": {},
    }
    if "scheduler" in arguments.parts:
        result["scheduler"] = run_module("bench.scheduler")
        say("scheduler: " + ", ".join(f"{name} {value}" for name, value in result["scheduler"].items()))
    with tempfile.TemporaryDirectory() as folder:
        log = arguments.log or Path(folder, "services.log")
        for name in arguments.precisions:
            row = measure(PRECISIONS[name], arguments, log, rates)
            result["precisions"][name] = row
            for line in precision_lines(name, row):
                say(line)
    text = json.dumps(result, indent=2)
    if arguments.json is None:
        print(text)
    else:
        arguments.json.write_text(text + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = ["bf16", "int8", "int4"]
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=rows, help="rows (default: %(default)s)")
    parser.add_argument(
        "--isa", choices=["auto", "avx2", "avx512", "amx"], default="auto", help="see the executor's --isa"
    )
    described = "; ".join(f"{name}: {what}" for name, what in PARTS.items())
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help=f"default: all. {described}")
    parser.add_argument(
        "--loads", nargs="+", choices=LOADS, default=list(LOADS), metavar="STREAMS", help="of the loads"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each load (default 3)")
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="how long rest is watched (default 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go (default: stdout)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="where the services' logs go (default: nowhere)")
    return parser.parse_args()


def run_module(name: str) -> dict[str, Any]:
    """The figures of `python -m name`, in a process of its own: threads and memory of one are not the other's."""
    output = subprocess.run([sys.executable, "-m", name], check=True, stdout=subprocess.PIPE).stdout
    figures: dict[str, Any] = json.loads(output)
    return figures


def measure(precision: Precision, arguments: argparse.Namespace, log: Path, rates: dict[str, float]) -> dict[str, Any]:
    """One row."""
    isa, parts = arguments.isa, arguments.parts
    row: dict[str, Any] = {"bound": allowed(rates, precision, isa), "ready_seconds": []}
    flags = ["--executor-isa", isa]
    if "memory" in parts:
        row["memory"], ready = measure_memory(precision, log, flags)
        row["ready_seconds"].append(ready)
    if not {"loads", "long", "rest"}.isdisjoint(parts):
        with serving(precision, log, max_model_len=8192, num_blocks=NUM_BLOCKS, flags=flags) as line:
            row["ready_seconds"].append(line.ready_seconds)
            pids = children(line.process.pid)
            reports = StepReports(pids["executor"], log)
            settle(pids["executor"])
            if "loads" in parts:
                row["loads"] = measure_loads(line.address, arguments.loads, arguments.rounds, reports, pids)
                set_shares(row["loads"], row["bound"])
            if "long" in parts:
                row["long_stream"] = run_long_stream(line.address, reports)
            if "rest" in parts:
                settle(pids["executor"])
                row["idle_cpu_percent"] = idle_cpu(pids, arguments.idle_seconds)
    return row


def measure_loads(
    address: str, names: Collection[str], num_rounds: int, reports: StepReports, pids: dict[str, int]
) -> dict[str, Any]:
    """Round after round of all loads, so that a drift of the machine meets each of them."""
    rounds: dict[str, list[Round]] = {name: [] for name in LOADS if name in names}
    for number in range(num_rounds):
        for index, name in enumerate(rounds):
            # No two rounds have a prompt in common: nothing is hit in the prefix cache.
            seed = number * len(rounds) + index
            rounds[name].append(run_round(LOADS[name], address, seed, reports, pids))
    return {name: summary(LOADS[name], found) for name, found in rounds.items()}


def set_shares(loads: dict[str, Any], bound: dict[str, float]) -> None:
    """Puts the share of the bound that was reached into each load that has one, and the share of the 32 streams'
    rate into those of more."""
    if bound:
        for name, rate in (("1", "decode_tokens_per_second"), ("32", "output_tokens_per_second")):
            of = "one_stream" if name == "1" else "streams_32"
            if name in loads:
                share = loads[name][rate]["median"] / bound[f"{of}_tokens_per_second"]
                loads[name]["share_of_bound"] = round(share, 3)
        if "first token" in loads:
            reached = loads["first token"]["time_to_first_token_p50"]["median"]
            loads["first token"]["share_of_bound"] = round(bound["time_to_first_token_128"] / reached, 3)
    for name in ("64", "128", "32 sampled"):
        if name in loads and "32" in loads:
            many, base = (loads[key]["output_tokens_per_second"]["median"] for key in (name, "32"))
            loads[name]["of_32_streams"] = round(many / base, 3)


def measure_memory(precision: Precision, log: Path, flags: list[str]) -> tuple[dict[str, Any], float]:
    """Megabytes when every block of a small KV pool has been used, and seconds until ready."""
    with serving(precision, log, max_model_len=8192, num_blocks=MEMORY_BLOCKS, flags=flags) as line:
        pids = children(line.process.pid)
        reports = StepReports(pids["executor"], log)
        for number in range(2):
            run_round(MANY, line.address, number, reports, pids)
        sizes = {role: round(proportional_bytes(pid) / 2**20) for role, pid in pids.items()}
        pool = round(MEMORY_BLOCKS * BLOCK_MEGABYTES * (4 if precision.dtype == "float32" else 2))
        figures = {"megabytes": sizes, "kv_pool": pool, "beyond_kv_pool": sum(sizes.values()) - pool}
        return figures, line.ready_seconds


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
