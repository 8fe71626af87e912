"""`make fuzz`: a million mutated frames over every socket, each seed once, and one line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time

from fuzz.drive import ARENAS, FRAMES_PER_LIFE, Failure, run


def main() -> int:
    parser = argparse.ArgumentParser("fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="mutated frames over all sockets")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so long, however many")
    parser.add_argument("--first-seed", type=int, default=1_000)
    parser.add_argument("--only", choices=ARENAS, help="one socket")
    options = parser.parse_args()
    arenas = [options.only] if options.only else list(ARENAS)
    started, seed = time.monotonic(), options.first_seed
    frames, dropped, finished, failures = 0, 0, 0, list[str]()
    seconds = dict.fromkeys(arenas, 0.0)
    while frames < options.frames and time.monotonic() - started < options.seconds:
        for arena in arenas:
            begun = time.monotonic()
            try:
                report = run(arena, seed)
            except Failure as failure:
                failures.append(str(failure))
                print(failure, file=sys.stderr)
            else:
                dropped += report.dropped
                finished += report.finished
            frames += FRAMES_PER_LIFE
            seconds[arena] += time.monotonic() - begun
        seed += 1
    print(
        json.dumps(
            {
                "frames": frames,
                "dropped": dropped,
                "streams": finished,
                "failures": len(failures),
                "seeds": [options.first_seed, seed],
                "seconds": round(time.monotonic() - started, 1),
                "seconds_by_socket": {arena: round(value, 1) for arena, value in seconds.items()},
            }
        )
    )
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
