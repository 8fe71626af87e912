"""`make claims`: the published claims of paged attention (Kwon et al., SOSP 2023), measured on the real model here.

batching  static batching (transformers' generate, padded) against the line's continuous batching: chat-like lengths,
          the same requests at the same arrivals
waste     KV slots that are allocated and empty, by the scheduler's own block tables, and by what reserving in one
          piece would have wasted
sharing   KV blocks saved by prefix sharing, of conversations and of requests with one system prompt
streams   50 streams at once

Prints one JSON object; a table goes to stderr. The status is 1 when a goal is missed. Nothing else may run meanwhile.
docs/benchmarks.md says exactly what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.claims import claims
from bench.claims.line import line
from bench.claims.loads import (
    FULL,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    QUICK,
    Sizes,
    asked,
    continuous,
    figures,
    load,
    source_of,
    static_on_ours,
    together,
    warm,
)
from bench.claims.static_batches import serve, transformers
from bench.report import table
from quartet.services.cli.bench.mixes import MIXES

PARTS = ("batching", "waste", "sharing", "streams")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="a quarter of the lengths, fewer requests: two minutes")
    parser.add_argument("--seed", default="0", help="of prompts, lengths and arrivals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go (default: stdout)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="where the services' logs go (default: nowhere)")
    arguments = parser.parse_args()
    # So that what was started is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sizes = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        found, details = measure(arguments.claims, sizes, arguments.seed, arguments.log or Path(folder, "log"))
    for text in report(found):
        say(text)
    result = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg(),
        },
        "quick": arguments.quick,
        "seed": arguments.seed,
        "claims": [claim.describe() for claim in found],
        "details": details,
    }
    text = json.dumps(result, indent=2)
    if arguments.json is None:
        print(text)
    else:
        arguments.json.write_text(text + "\n")
    return 0 if all(claim.passed for claim in found) else 1


def measure(parts: Sequence[str], sizes: Sizes, seed: str, log: Path) -> tuple[list[claims.Claim], Mapping[str, Any]]:
    """The claims of `parts`, and all that was measured for them."""
    found: list[claims.Claim] = []
    details: dict[str, Any] = {}
    with line(NUM_BLOCKS, MAX_MODEL_LEN, log) as ours:
        warm(ours)
        if "batching" in parts:
            say("the chat-like mix, continuously and in static batches of our own")
            details["continuous"] = continuous(ours, sizes, f"{seed}/batching")
            details["static on our own kernels"] = static_on_ours(ours, sizes, f"{seed}/batching")
        if "waste" in parts:
            say("KV waste on the chat-like mix")
            arrivals = together(f"{seed}/waste")
            _, details["waste"] = load(ours, source_of(MIXES["chat"], arrivals.seed), sizes.waste_requests, arrivals)
        if "sharing" in parts:
            say("prefix sharing")
            for name, mix, requests in (
                ("multi-turn", sizes.multi_turn, sizes.conversations * sizes.multi_turn.num_turns),
                ("same system prompt", sizes.same_prompt, sizes.same_prompt_requests),
            ):
                arrivals = together(f"{seed}/{name}")
                _, details[name] = load(ours, source_of(mix, arrivals.seed), requests, arrivals)
        if "streams" in parts:
            say(f"{sizes.streams} streams at once")
            requests = sizes.streams * sizes.streams_rounds
            arrivals = together(f"{seed}/streams", sizes.streams)
            _, details["streams"] = load(ours, source_of(sizes.chat, arrivals.seed), requests, arrivals)
    if "batching" in parts:
        details["static"] = static(sizes, f"{seed}/batching", log)
        found += claims.batching(details["continuous"], details["static"], details["static on our own kernels"])
    if "waste" in parts:
        of_waste, details["waste"]["contiguous_percent"] = claims.waste(details["waste"]["blocks"])
        found += of_waste
    if "sharing" in parts:
        found += claims.sharing(details["multi-turn"]["blocks"], details["same system prompt"]["blocks"])
    if "streams" in parts:
        found += claims.streams(details["streams"], sizes.streams * sizes.streams_rounds, sizes.streams)
    return found, details


def static(sizes: Sizes, seed: str, log: Path) -> dict[str, Any]:
    """transformers' generate on the same requests, by the batches' size."""
    found = {}
    requests = asked(sizes, seed)
    with transformers(log) as running:
        running.generate([requests[0].prompt], 4)
        for batch_size in sizes.static_batches:
            say(f"the same in static batches of {batch_size} with transformers {running.version}")
            records, seconds, batches = serve(requests, batch_size, running.generate)
            found[str(batch_size)] = figures(records, seconds) | {"batches": batches}
    return found


def report(found: Sequence[claims.Claim]) -> list[str]:
    signs = {"at least": ">=", "at most": "<=", "equal": "="}
    rows = [
        [
            claim.name,
            claim.paper,
            f"{signs[claim.holds]} {claim.goal:g} {claim.unit}".rstrip(),
            f"{claim.measured:g} {claim.unit}".rstrip(),
            "pass" if claim.passed else "FAIL",
        ]
        for claim in found
    ]
    lines = list(table(["claim", "paper", "goal", "here", ""], rows))
    return [*lines, "", *(f"{claim.name}: {claim.how}" for claim in found)]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
