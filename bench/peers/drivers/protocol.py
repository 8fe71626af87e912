"""What a driver and bench.peers say to each other: one JSON object a line.

The driver says {"version": ...} when it is ready, then answers each {"prompts": [[id, ...], ...],
"output_tokens": n} with {"started": t, "times": [[t, ...], ...], "counts": [[n, ...], ...], "ended": t}:
for each prompt when its tokens came (time.perf_counter, seconds) and how many. Output is greedy and ignores
the end-of-sequence token.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator

Generate = Callable[[list[list[int]], int], Iterator[list[int]]]
"""Yields, after each step, how many tokens each prompt got in it."""


def serve(load: Callable[[], tuple[str, Generate]]) -> None:
    """`load` returns the peer's version and its function. Whatever else it prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    version, generate = load()
    print(json.dumps({"version": version}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        prompts = request["prompts"]
        times: list[list[float]] = [[] for _ in prompts]
        counts: list[list[int]] = [[] for _ in prompts]
        started = time.perf_counter()
        for step in generate(prompts, request["output_tokens"]):
            now = time.perf_counter()
            for i, count in enumerate(step):
                if count:
                    times[i].append(now)
                    counts[i].append(count)
        ended = time.perf_counter()
        print(json.dumps({"started": started, "times": times, "counts": counts, "ended": ended}), file=answers)
