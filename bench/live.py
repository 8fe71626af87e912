"""What somebody who looks at /live costs: prints one JSON object.

    python -m bench.live [--rounds 5] [--parts steps 32 1]

Rounds of each load in turns, without a viewer and with one at the default interval, in one run of the line; and a
step of the scheduler alone with 256 decodes, unwatched and watched. The viewer is a process of its own that reads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.client_load import Load, run_load
from bench.line import PRECISIONS, ROLES, children, cpu_seconds, free_port, serving, spread
from bench.loads import LOADS, NUM_BLOCKS
from bench.scheduler import CONTEXT, NUM_SEQS, new_core, new_request, plans, result_of
from quartet.shared.messages import Watch, encode

INTERVAL_MS = 100
# Reads until its input is closed, then says how much.
READER = """
import socket, sys, threading
host, port, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
connection = socket.create_connection((host, port))
connection.sendall(f"GET {path} HTTP/1.1\\r\\nhost: bench\\r\\n\\r\\n".encode())
def end():
    sys.stdin.read()
    connection.shutdown(socket.SHUT_RDWR)
threading.Thread(target=end, daemon=True).start()
num_bytes = num_events = 0
while data := connection.recv(1 << 18):
    num_bytes += len(data)
    num_events += data.count(b"event: ")
print(num_bytes, num_events)
"""


@contextlib.contextmanager
def viewer(port: int, told: dict[str, int]) -> Iterator[None]:
    command = [sys.executable, "-c", READER, "127.0.0.1", str(port), f"/live?interval_ms={INTERVAL_MS}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        out, _ = process.communicate("")
        num_bytes, num_events = map(int, out.split())
        told["bytes"] = told.get("bytes", 0) + num_bytes
        told["events"] = told.get("events", 0) + num_events


def run(load: Load, address: str, seed: int, pids: dict[str, int]) -> tuple[float, float, dict[str, float]]:
    """(output tokens/s, seconds, CPU seconds by process)."""
    load = dataclasses.replace(load, address=address, seed=seed, warmup_requests=0)
    before = {role: cpu_seconds(pid) for role, pid in pids.items()}
    begin = time.perf_counter()
    result = asyncio.run(run_load(load))
    seconds = time.perf_counter() - begin
    if result["failed"]:
        raise RuntimeError(f"{result['failed']} requests failed")
    return result["output_throughput"], seconds, {role: cpu_seconds(pid) - before[role] for role, pid in pids.items()}


def measure_load(load: Load, address: str, port: int, pids: dict[str, int], rounds: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"unwatched": [], "watched": []}
    used: dict[str, list[dict[str, float]]] = {"unwatched": [], "watched": []}
    told: dict[str, int] = {}
    watched_seconds = 0.0
    run(load, address, 0, pids)
    for i in range(rounds):
        for kind in ("unwatched", "watched") if i % 2 == 0 else ("watched", "unwatched"):
            with viewer(port, told) if kind == "watched" else contextlib.nullcontext():
                rate, seconds, cpu = run(load, address, 1 + 2 * i + (kind == "watched"), pids)
            rates[kind].append(rate)
            used[kind].append(cpu)
            watched_seconds += seconds if kind == "watched" else 0.0
    ratios = [on / off for on, off in zip(rates["watched"], rates["unwatched"], strict=True)]
    return {
        "output_tokens_per_second": {kind: spread(values) for kind, values in rates.items()},
        "watched_over_unwatched": spread(ratios),
        "cpu_seconds": {
            kind: {role: round(statistics.median(cpu[role] for cpu in values), 3) for role in ROLES}
            for kind, values in used.items()
        },
        "events_per_second": round(told["events"] / watched_seconds, 1),
        "kilobytes_per_second": round(told["bytes"] / watched_seconds / 1000, 1),
    }


def measure_steps(num_steps: int) -> dict[str, float]:
    """Median ms of a step of 256 decodes (result in, next plan encoded) while nobody looks and while somebody does,
    and of what is told after five of them, encoded."""
    ahead = 0.0
    core = new_core(NUM_SEQS * (CONTEXT + 4 * num_steps) // 16, 1 << 20, lambda: time.monotonic() + ahead)
    for i in range(NUM_SEQS):
        core.new_request("tokenizer", new_request(i, CONTEXT - num_steps // 2 + i % 16, 4 * num_steps + 32))
    core.schedule()
    core.step_result(result_of(core))
    core.schedule()
    gc.collect()
    gc.freeze()

    def step() -> float:
        result = result_of(core)
        start = time.perf_counter()
        core.step_result(result)
        for plan in plans(core.schedule()):
            encode(plan)
        return time.perf_counter() - start

    unwatched = [step() for _ in range(num_steps)]
    core.watch("tokenizer", Watch(60_000))
    while core.next_deadline() is not None:
        ahead += 60.0
        core.tick()
    watched, told = [], []
    for i in range(num_steps):
        watched.append(step())
        if i % 5 == 4:
            ahead += 60.0
            start = time.perf_counter()
            for _, message in core.tick():
                encode(message)
            told.append(time.perf_counter() - start)
    gc.unfreeze()
    values = {"unwatched": unwatched, "watched": watched, "events": told}
    return {name: round(1000 * statistics.median(times), 4) for name, times in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", default=["steps", "32"], choices=["steps", *LOADS])
    parser.add_argument("--precision", default="bf16", choices=PRECISIONS)
    options = parser.parse_args()
    loads = [part for part in options.parts if part != "steps"]
    found: dict[str, Any] = {}
    if "steps" in options.parts:
        found["scheduler_ms"] = measure_steps(400)
    if loads:
        found |= measure_loads(loads, options)
    print(json.dumps(found, indent=2))


def measure_loads(loads: list[str], options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--run-dir", folder, "--gateway-http-address", f"127.0.0.1:{port}"]
        log = Path(folder) / "log"
        with serving(PRECISIONS[options.precision], log, num_blocks=NUM_BLOCKS, flags=flags) as line:
            pids = children(line.process.pid)
            for name in loads:
                found[name] = measure_load(LOADS[name], line.address, port, pids, options.rounds)
    return found


if __name__ == "__main__":
    main()
