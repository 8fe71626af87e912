"""Quartet beside other servers: the same weights, prompts and lengths, in turns, in one run; prints one JSON object.

    python -m bench.peers --peers llama_cpp openvino --precisions int4
    python -m bench.peers --prepare                  # only installs them and makes their models: takes long

For each peer and form of the model both servers are started and stay up, one of them idle, while rounds go
Quartet, peer, Quartet, peer: drift of the machine hits both alike, and a start of minutes is paid once. What the
idle one uses is measured and reported. A peer that cannot be had is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.client_load import Load
from bench.line import PRECISIONS
from bench.peers import quartet
from bench.peers.comparison import figures, floors, ratios
from bench.peers.environment import UnavailableError
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.openvino import OpenVino
from bench.peers.peer import Peer, Running, family_cpu_seconds, resident_megabytes
from bench.peers.transformers import Transformers
from bench.peers.vllm import Vllm
from quartet.services.executor.native.library import detect_isa

PEERS: dict[str, Callable[[], Peer]] = {
    "vllm": Vllm,
    "openvino": OpenVino,
    "llama_cpp": LlamaCpp,
    "transformers": Transformers,
}
LOADS = {
    "one": Load(concurrency=1, num_requests=4, prompt_tokens=16, output_tokens=128),
    "32": Load(concurrency=32, prompt_tokens=128, output_tokens=128),
}
IDLE_SECONDS = 2.0


def measure(server: Running, loads: Sequence[str], seed: int) -> dict[str, float]:
    """One round on one side. A seed's prompts must not have been sent to the server before."""
    found: dict[str, float] = {}
    for name in loads:
        load = LOADS[name]
        result = server.run(Load(**{**vars(load), "seed": 1000 * load.concurrency + seed}))
        if result["failed"] or result["total_cached_tokens"]:
            raise UnavailableError(f"the load failed: {result['errors'] or 'tokens came from the prefix cache'}")
        first = result["mean_ttft_ms"] / 1e3
        if name == "one":
            found["one_stream_tokens_per_second"] = 1e3 / result["mean_tpot_ms"]
            found["one_stream_time_to_first_token"] = first
        else:
            found["streams_32_tokens_per_second"] = result["output_throughput"]
            found["streams_32_time_to_first_token"] = first
    return found


def idle_cpu_percent(server: Running) -> float:
    before = family_cpu_seconds(server.pid)
    time.sleep(IDLE_SECONDS)
    return round(100 * (family_cpu_seconds(server.pid) - before) / IDLE_SECONDS, 2)


def warm_up(server: Running, loads: Sequence[str]) -> None:
    """Whatever is compiled or allocated for a shape at its first use."""
    for name in loads:
        server.run(Load(**{**vars(LOADS[name]), "seed": 1_000_000 + LOADS[name].concurrency, "output_tokens": 16}))


def compare(peer: Peer, variant: str, loads: Sequence[str], rounds: int, log: Path) -> dict[str, Any]:
    precision = peer.variants[variant]
    with peer.serve(variant, log) as theirs, quartet.serve(precision, log) as ours:
        for server in (ours, theirs):
            warm_up(server, loads)
        of_ours, of_theirs = [], []
        for seed in range(rounds):
            of_ours.append(measure(ours, loads, seed))
            of_theirs.append(measure(theirs, loads, seed))
        fixed = {}
        for side, server in (("ours", ours), ("theirs", theirs)):
            fixed[side] = {
                "start_seconds": round(server.ready_seconds, 2),
                "resident_megabytes": resident_megabytes(server.pid),
            }
        return {
            "ours": {**figures(of_ours), **fixed["ours"], "idle_cpu_percent": idle_cpu_percent(ours)},
            "theirs": {**figures(of_theirs), **fixed["theirs"], "idle_cpu_percent": idle_cpu_percent(theirs)},
            "ratios": {
                **ratios(of_ours, of_theirs),
                **{name: round(fixed["ours"][name] / fixed["theirs"][name], 3) for name in fixed["ours"]},
            },
        }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    comparisons: list[dict[str, Any]] = []
    for name in arguments.peers:
        peer = PEERS[name]()
        variants = [
            variant
            for variant, precision in peer.variants.items()
            if precision in arguments.precisions and (not arguments.variants or variant in arguments.variants)
        ]
        about: dict[str, Any] = {"peer": name, "how": peer.how}
        try:
            about["version"] = peer.prepare(variants)
        except UnavailableError as reason:
            comparisons.append({**about, "skipped": str(reason)})
            continue
        for variant in () if arguments.prepare else variants:
            pair = {**about, "variant": variant, "precision": peer.variants[variant]}
            print(f"{name} {variant}", file=sys.stderr)
            try:
                pair |= compare(peer, variant, arguments.loads, arguments.rounds, arguments.log)
            except UnavailableError as reason:
                pair["skipped"] = str(reason)
            comparisons.append(pair)
        if arguments.prepare:
            comparisons.append({**about, "variants": variants})
    return {"comparisons": comparisons, "floors": floors([pair for pair in comparisons if "variant" in pair])}


def machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "kernels": detect_isa().describe(),
        "load_average": os.getloadavg(),
        "commit": commit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="default: all")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "int8", "int4"])
    parser.add_argument("--variants", nargs="+", default=[], help="only these forms of the model, such as q4_0")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="streams; default: one 32")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each load on each side (default 3)")
    parser.add_argument("--prepare", action="store_true", help="install and make the models, measure nothing")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="where the servers' logs go")
    arguments = parser.parse_args()
    print(json.dumps({"machine": machine(), **run(arguments)}, indent=2))


if __name__ == "__main__":
    main()
