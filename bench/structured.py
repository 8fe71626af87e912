"""What structured output costs: the same streams, with a nested schema and without; prints one JSON object.

    python -m bench.structured --streams 32 --output-tokens 96 --rounds 3

Outputs of both kinds are as long (max_tokens cuts them all), rounds alternate, and figures are medians of tokens per
second over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.line import PRECISIONS, serving
from quartet.shared.client import AsyncClient

# Long enough strings and lists for no output to end before it is cut.
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1000000},
        "people": {
            "type": "array",
            "minItems": 40,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 4, "maxLength": 40},
                    "age": {"type": "integer", "minimum": 0, "maximum": 150},
                    "address": {
                        "type": "object",
                        "properties": {
                            "street": {"type": "string", "maxLength": 40},
                            "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                            "country": {"enum": ["NO", "DE", "FR", "IT", "ES", "SE", "DK", "FI"]},
                        },
                        "required": ["street", "zip", "country"],
                        "additionalProperties": False,
                    },
                    "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
                },
                "required": ["name", "age", "address", "tags"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "people"],
    "additionalProperties": False,
}


async def measure(address: str, streams: int, prompt_tokens: int, output_tokens: int, rounds: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"plain": [], "structured": []}
    rng = random.Random(0)
    async with AsyncClient(address) as client:
        await _round(client, rng, True, 2, prompt_tokens, 16)
        for _ in range(rounds):
            for kind, found in rates.items():
                found.append(await _round(client, rng, kind == "structured", streams, prompt_tokens, output_tokens))
    medians = {kind: statistics.median(found) for kind, found in rates.items()}
    return {
        "streams": streams,
        "output_tokens": output_tokens,
        "rounds": rounds,
        "tokens_per_second": {kind: [round(rate, 1) for rate in found] for kind, found in rates.items()},
        "median_tokens_per_second": {kind: round(rate, 1) for kind, rate in medians.items()},
        "cost_percent": round(100 * (1 - medians["structured"] / medians["plain"]), 2),
    }


async def _round(
    client: AsyncClient, rng: random.Random, structured: bool, streams: int, prompt_tokens: int, output_tokens: int
) -> float:
    """Tokens per second from the first token of any stream to the last of all: prefill is no part of it."""
    options: dict[str, Any] = (
        {"structured": {"json_schema": json.dumps(SCHEMA)}} if structured else {"ignore_eos": True}
    )
    times: list[float] = []
    total = 0

    async def one(seed: int) -> None:
        nonlocal total
        token_ids = [rng.randrange(1000, 30000) for _ in range(prompt_tokens)]
        generation = client.generate(
            token_ids=token_ids, max_tokens=output_tokens, temperature=1.0, seed=seed, **options
        )
        count = 0
        async for chunk in generation:
            if chunk.token_ids:
                times.append(time.perf_counter())
                count += len(chunk.token_ids)
        if count != output_tokens:
            raise RuntimeError(f"an output has {count} tokens instead of {output_tokens}")
        total += count

    await asyncio.gather(*(one(i) for i in range(streams)))
    return total / (max(times) - min(times))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=sorted(PRECISIONS), default="bf16")
    parser.add_argument("--address", default="", help="a running server; default: starts one")
    args = parser.parse_args(argv)
    load = (args.streams, args.prompt_tokens, args.output_tokens, args.rounds)
    if args.address:
        result = asyncio.run(measure(args.address, *load))
    else:
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(PRECISIONS[args.precision], Path(folder) / "serve.log", num_blocks=1024) as line,
        ):
            result = asyncio.run(measure(line.address, *load))
        result["precision"] = args.precision
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
