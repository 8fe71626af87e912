"""Load on a running server over gRPC: N concurrent streams of fixed lengths; prints one JSON object.

    python bench/client_load.py --concurrency 32 --prompt-tokens 128 --output-tokens 128

Prompts are token ids (each request its own, so nothing is hit in the prefix cache unless
--shared-prefix says how many tokens they begin with in common) and ignore_eos makes every output
have the same length, so that two runs do the same work.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from quartet.shared.address import DEFAULT_ADDRESS
from quartet.shared.client import AsyncClient


@dataclasses.dataclass(frozen=True)
class Load:
    """`num_requests` 0 means one for each stream. Token ids are drawn from [low, high)."""

    address: str = DEFAULT_ADDRESS
    concurrency: int = 32
    num_requests: int = 0
    prompt_tokens: int = 128
    output_tokens: int = 128
    shared_prefix: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    warmup_requests: int = 1
    seed: int = 0
    low: int = 1000
    high: int = 30000


@dataclasses.dataclass
class Measured:
    """A request: when it was sent, when each of its chunks came (time.perf_counter, seconds) and their token counts."""

    started: float
    times: list[float] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


async def _one(client: AsyncClient, load: Load, token_ids: list[int], output_tokens: int) -> Measured:
    measured = Measured(time.perf_counter())
    generation = client.generate(
        token_ids=token_ids,
        max_tokens=output_tokens,
        ignore_eos=True,
        temperature=load.temperature,
        top_p=load.top_p,
        top_k=load.top_k,
        seed=load.seed,
    )
    try:
        async for chunk in generation:
            if chunk.token_ids:
                measured.times.append(time.perf_counter())
                measured.counts.append(len(chunk.token_ids))
    except Exception as error:
        measured.error = str(error)
    if generation.usage is not None:
        measured.cached_tokens = generation.usage.cached_tokens
    return measured


async def run_load(load: Load) -> dict[str, Any]:
    """Runs the load to its end. Times are in seconds; rates cover the whole run, prefill included."""
    async with AsyncClient(load.address) as client:
        return await drive(load, functools.partial(_one, client, load))


Send = Callable[[list[int], int], Awaitable[Measured]]
"""Sends a request of these token ids for this many tokens, and waits for its end."""


async def drive(load: Load, send: Send) -> dict[str, Any]:
    """As run_load, with any server behind `send`."""
    warmups, prompts = workload(load)
    for prompt in warmups:
        await send(prompt, 4)
    results: list[Measured] = []

    async def worker() -> None:
        while prompts:
            results.append(await send(prompts.pop(), load.output_tokens))

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(load.concurrency)))
    duration = time.perf_counter() - started
    return {"load": dataclasses.asdict(load), **summary(results, duration)}


def workload(load: Load) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts to warm up with, and the load's own: the same ones for a seed, whatever serves them."""
    rng = random.Random(load.seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(load.low, load.high) for _ in range(length)]

    shared = prompt(load.shared_prefix)
    own = max(0, load.prompt_tokens - load.shared_prefix)
    prompts = [shared + prompt(own) for _ in range(load.num_requests or load.concurrency)]
    return [prompt(load.prompt_tokens) for _ in range(load.warmup_requests)], prompts


def summary(results: Sequence[Measured], duration: float) -> dict[str, Any]:
    num_tokens = sum(result.num_tokens for result in results)
    gaps = [later - earlier for result in results for earlier, later in zip(result.times, result.times[1:])]  # noqa: B905
    # A chunk may hold several tokens; its gap is theirs together.
    per_token = [
        (result.times[-1] - result.times[0]) / (result.num_tokens - result.counts[0])
        for result in results
        if result.num_tokens > sum(result.counts[:1])
    ]
    return {
        "duration": round(duration, 4),
        "num_requests": len(results),
        "errors": sorted({result.error for result in results if result.error}),
        "num_failed": sum(bool(result.error) for result in results),
        "output_tokens": num_tokens,
        "output_tokens_per_second": round(num_tokens / duration, 2),
        "requests_per_second": round(len(results) / duration, 3),
        "cached_tokens": sum(result.cached_tokens for result in results),
        "time_to_first_token": _spread([result.times[0] - result.started for result in results if result.times]),
        "time_per_output_token": _spread(per_token),
        "gap_between_chunks": _spread(gaps),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)

    def percentile(part: float) -> float:
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))]

    found = {
        "mean": statistics.fmean(ordered),
        "p50": percentile(0.5),
        "p90": percentile(0.9),
        "p99": percentile(0.99),
        "max": ordered[-1],
    }
    return {name: round(value, 5) for name, value in found.items()}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Load):
        parser.add_argument(
            "--" + field.name.replace("_", "-"), type=type(field.default), default=field.default, metavar="N"
        )
    result = asyncio.run(run_load(Load(**vars(parser.parse_args(argv)))))
    print(json.dumps(result, indent=2))
    return 1 if result["num_failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
