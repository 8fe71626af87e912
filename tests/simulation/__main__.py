"""Hunts for seeds that fail: python -m tests.simulation --seeds 0:10000"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation.world import Violation, World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="first:last+1, or one seed")
    parser.add_argument("--trace", action="store_true", help="print the whole trace of each run")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    failed: list[int] = []
    started = time.monotonic()
    num_runs = num_events = num_faults = 0
    for seed in seeds:
        if time.monotonic() - started > arguments.seconds:
            break
        world = World(seed)
        num_runs += 1
        try:
            world.run()
        except Violation as violation:
            failed.append(seed)
            text = str(violation)
            print(text if not arguments.keep_going else f"seed {seed}: {text.splitlines()[0][:300]}", flush=True)
            if not arguments.keep_going:
                break
        if arguments.trace:
            print(world.report(1 << 30))
        num_events += world.num_events
        num_faults += world.num_faults
    seconds = time.monotonic() - started
    print(
        f"{num_runs} runs, {num_events} events, {num_faults} faults in {seconds:.1f} s "
        f"({1000 * seconds / max(1, num_runs):.1f} ms a run); failed: {failed}"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
