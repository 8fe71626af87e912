"""What the claims are measured on, and our side of each."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

from bench.claims.line import Line
from bench.claims.static_batches import Asked, serve
from quartet.services.cli.bench.drive import Arrivals, drive
from quartet.services.cli.bench.grpc_door import GrpcDoor
from quartet.services.cli.bench.metrics import percentile, summary
from quartet.services.cli.bench.mixes import MIXES, Mix, Source
from quartet.services.cli.bench.record import Record
from quartet.shared.client import AsyncClient

SAMPLING = {"temperature": 0.0, "ignore_eos": True}
# What both sides have: KV slots, and the context for which static batching reserves them in one piece.
NUM_BLOCKS = 2048
BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
# As many rows as these slots hold when each is reserved for the whole context.
STATIC_BATCH = NUM_BLOCKS * BLOCK_SIZE // MAX_MODEL_LEN


@dataclasses.dataclass(frozen=True)
class Sizes:
    """`scale` divides the lengths of all mixes but that of the waste, which depends on them, and `batching_scale`
    those of the claim on batching, at whose `rate` requests arrive: near what our side can do, far above what
    the other can. `static_batches` are the most rows of a batch: as memory allows, and with more of it."""

    scale: int
    batching_scale: int
    rate: float
    batching_requests: int
    static_batches: tuple[int, ...]
    waste_requests: int
    conversations: int
    same_prompt_requests: int
    streams: int = 50
    streams_rounds: int = 2

    @property
    def chat(self) -> Mix:
        return scaled(MIXES["chat"], self.scale)

    @property
    def multi_turn(self) -> Mix:
        """Chats of six turns."""
        return dataclasses.replace(self.chat, name="multi-turn", num_turns=6, think_time=0.2)

    @property
    def same_prompt(self) -> Mix:
        """Questions of the chat-like mix behind one system prompt of 1,024 tokens."""
        return dataclasses.replace(self.chat, name="same system prompt", prefix_len=1024 // self.scale)


FULL = Sizes(4, 4, 8.0, 64, (STATIC_BATCH, 2 * STATIC_BATCH, 4 * STATIC_BATCH), 64, 8, 32)
QUICK = Sizes(4, 8, 16.0, 32, (2 * STATIC_BATCH,), 16, 6, 24, streams_rounds=1)


def scaled(mix: Mix, scale: int) -> Mix:
    return dataclasses.replace(
        mix, input_len=max(1, mix.input_len // scale), output_len=max(1, mix.output_len // scale)
    )


def batching_source(sizes: Sizes, seed: str) -> Source:
    """Of the chat-like mix; its context is scaled with the lengths."""
    scale = sizes.batching_scale
    return Source(scaled(MIXES["chat"], scale), seed=seed, max_model_len=MAX_MODEL_LEN // scale)


def asked(sizes: Sizes, seed: str) -> list[Asked]:
    """The requests of the claim on batching, with their arrivals."""
    conversations = batching_source(sizes, seed).conversations(sizes.batching_requests)
    turns = [conversation.turns[0] for conversation in conversations]
    times = itertools.islice(Arrivals(rate=sizes.rate, seed=seed).times(), len(turns))
    return [Asked(at, turn.said, turn.output_tokens) for at, turn in zip(times, turns, strict=True)]  # type: ignore[arg-type]


def figures(records: list[Record], seconds: float) -> dict[str, Any]:
    """Of one side of the claim on batching."""
    found = summary(records, seconds)
    latencies = sorted(record.latency for record in records if not record.error)
    kept = ("completed", "failed", "duration", "total_output_tokens", "output_throughput", "median_e2el_ms", "errors")
    return {name: found[name] for name in kept} | {"p95_e2el_ms": round(1e3 * percentile(latencies, 95), 1)}


def load(line: Line, source: Source, num_requests: int, arrivals: Arrivals) -> tuple[list[Record], dict[str, Any]]:
    """The records and figures of a mix, and in `blocks` what the scheduler saw meanwhile."""

    async def run() -> tuple[list[Record], dict[str, Any]]:
        async with AsyncClient(line.address) as client:
            door = GrpcDoor(client, SAMPLING)
            done = await drive(source.conversations(num_requests), door.send, arrivals)
            return done.records, summary(done.records, done.seconds) | {"client": done.client()}

    before = line.seen()
    records, found = asyncio.run(run())
    return records, found | {"blocks": difference(line.seen(), before)}


def difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Of the sums; what is greatest is of the whole time."""
    return {
        name: difference(value, before[name])
        if isinstance(value, dict)
        else value
        if name.startswith("max_")
        else value - before[name]
        for name, value in after.items()
    }


def continuous(line: Line, sizes: Sizes, seed: str) -> dict[str, Any]:
    """The chat-like mix as it arrives. Latencies count from when requests were due, as those of static batches do."""
    arrivals = Arrivals(rate=sizes.rate, seed=seed)
    records, found = load(line, batching_source(sizes, seed), sizes.batching_requests, arrivals)
    from_due = [dataclasses.replace(record, started=record.due) for record in records]
    late = found["client"]["max_dispatch_lag_ms"]
    return figures(from_due, found["duration"]) | {"max_dispatch_lag_ms": late, "blocks": found["blocks"]}


def static_on_ours(line: Line, sizes: Sizes, seed: str) -> dict[str, Any]:
    """The same requests in static batches on our own kernels: what scheduling alone is worth."""

    async def batch(prompts: list[list[int]], output_tokens: int) -> None:
        async with AsyncClient(line.address) as client:
            door = GrpcDoor(client, SAMPLING | {"read_prefix_cache": False})
            records = await asyncio.gather(*(door.send(prompt, output_tokens) for prompt in prompts))
        if bad := [record for record in records if record.error]:
            raise RuntimeError(f"{bad[0].error}: {bad[0].message}")

    requests = asked(sizes, seed)
    records, seconds, _ = serve(requests, max(sizes.static_batches), lambda *asked: asyncio.run(batch(*asked)))
    return figures(records, seconds)


def source_of(mix: Mix, seed: str) -> Source:
    return Source(mix, seed=seed, max_model_len=MAX_MODEL_LEN)


def warm(line: Line) -> None:
    load(line, Source(Mix(output_len=8), seed="warm"), 4, Arrivals(concurrency=4))


def together(seed: str, concurrency: int = 0) -> Arrivals:
    return Arrivals(math.inf, concurrency, seed=seed)
