"""A load of N concurrent streams of equal lengths, for the measurements of this folder; `quartet bench` sends it.

Prompts are token ids (each request its own, so nothing is hit in the prefix cache unless `shared_prefix` says how many
tokens they begin with in common), and ignore_eos makes every output have the same length, so that two runs do the
same work.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from quartet.services.cli.bench.drive import Arrivals, Send, drive
from quartet.services.cli.bench.grpc_door import GrpcDoor
from quartet.services.cli.bench.metrics import summary
from quartet.services.cli.bench.mixes import Conversation, Turn
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


async def run_load(load: Load) -> dict[str, Any]:
    """Runs the load to its end: the figures of quartet.services.cli.bench.metrics, over the whole run."""
    names = ("temperature", "top_p", "top_k", "seed")
    sampling = {name: getattr(load, name) for name in names} | {"ignore_eos": True}
    async with AsyncClient(load.address) as client:
        return await drive_load(load, GrpcDoor(client, sampling).send)


async def drive_load(load: Load, send: Send) -> dict[str, Any]:
    """As run_load, with any server behind `send`."""
    warmups, prompts = workload(load)
    for prompt in warmups:
        await send(prompt, 4, False)
    conversations = [Conversation([], [Turn(prompt, load.output_tokens)], "ids") for prompt in prompts]
    run = await drive(conversations, send, Arrivals(concurrency=load.concurrency))
    return {"load": dataclasses.asdict(load), **summary(run.records, run.seconds)}


def workload(load: Load) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts to warm up with, and the load's own: the same ones for a seed, whatever serves them."""
    rng = random.Random(load.seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(load.low, load.high) for _ in range(length)]

    shared = prompt(load.shared_prefix)
    own = max(0, load.prompt_tokens - load.shared_prefix)
    prompts = [shared + prompt(own) for _ in range(load.num_requests or load.concurrency)]
    return [prompt(load.prompt_tokens) for _ in range(load.warmup_requests)], prompts
