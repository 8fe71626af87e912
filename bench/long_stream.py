"""One stream to the end of the context: does a token cost more the later it comes, and is that attention's?"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.client_load import Load, workload
from bench.steps import StepReports
from quartet.shared.client import AsyncClient

PROMPT_TOKENS = 16
OUTPUT_TOKENS = 8000
BUCKET = 1000


def run_long_stream(address: str, reports: StepReports) -> dict[str, Any]:
    """By thousand tokens: the client's milliseconds a token, and the share of the executor's attention in them.

    `rest_growth`: what is not attention, last thousand over first.
    """
    times = asyncio.run(_stream(address, reports))
    reports.ask()
    totals = reports.read()
    buckets = []
    for index in range(len(times) - 1):
        done = totals[index + 1] - totals[index]
        per_token = (times[index + 1] - times[index]) / BUCKET
        attention = done.forward.get("attention", 0.0) / done.wall
        buckets.append(
            {
                "from": index * BUCKET,
                "ms_per_token": round(1e3 * per_token, 3),
                "attention_share": round(attention, 4),
                "ms_per_token_without_attention": round(1e3 * per_token * (1 - attention), 3),
            }
        )
    first, last = (bucket["ms_per_token_without_attention"] for bucket in (buckets[0], buckets[-1]))
    return {
        "load": f"{PROMPT_TOKENS} in, {OUTPUT_TOKENS} out",
        "buckets": buckets,
        "rest_growth": round(last / first, 3),
    }


async def _stream(address: str, reports: StepReports) -> list[float]:
    """When the first token and then each whole thousand had come; a report was asked for at each but the last."""
    _, [prompt] = workload(Load(concurrency=1, prompt_tokens=PROMPT_TOKENS))
    times: list[float] = []
    num_tokens = 0
    async with AsyncClient(address) as client:
        stream = client.generate(token_ids=prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.0)
        async for chunk in stream:
            num_tokens += len(chunk.token_ids)
            if num_tokens >= len(times) * BUCKET and chunk.token_ids:
                times.append(time.perf_counter())
                if num_tokens < OUTPUT_TOKENS:
                    reports.ask()
    return times
