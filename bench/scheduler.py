"""What a step costs in the scheduler, without an executor: prints one JSON object.

schedule_update_encode_ms  median over steps of 256 running decodes: result in, outputs made, next plan encoded
plan_bytes_mean            of an encoded plan of 256 decodes around 2k context
plan_codec_us_mean         encode + decode of such a plan
kv_waste                   allocated slots that hold no token over allocated slots, on a chat-like mix of lengths
"""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import time
from collections.abc import Callable

from quartet.services.scheduler.core import EXECUTOR, Effect, SchedulerCore
from quartet.services.scheduler.plan import pack_u32
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.shared.messages import (
    ChoicePast,
    Granted,
    ModelInfo,
    NewRequest,
    Outputs,
    Release,
    StepPlan,
    StepResult,
    decode,
    encode,
)
from quartet.shared.sampling_params import SamplingParams

NUM_SEQS = 256
CONTEXT = 2048
MEAN_PROMPT, MEAN_OUTPUT = 161, 338


def new_core(
    num_blocks: int, max_num_batched_tokens: int, clock: Callable[[], float] = time.monotonic
) -> SchedulerCore:
    core = SchedulerCore(SchedulerSettings(), 1, clock)
    core.executor_up(
        ModelInfo("bench", "bench", 49152, 8192, num_blocks, 16, NUM_SEQS, max_num_batched_tokens, "bfloat16", "cpu")
    )
    core.granted(Granted(1, b"", b""))
    core.owner_up("tokenizer")
    return core


def new_request(request_id: int, num_prompt_tokens: int, max_tokens: int) -> NewRequest:
    prompt = [random.randrange(3, 49152) for _ in range(num_prompt_tokens)]
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return NewRequest(request_id, 1, prompt, sampling, [2], [ChoicePast(0)])


def plans(effects: list[Effect]) -> list[StepPlan]:
    return [message for destination, message in effects if destination is EXECUTOR and isinstance(message, StepPlan)]


def result_of(core: SchedulerCore) -> StepResult:
    """As an executor would answer the oldest plan in flight."""
    plan = core.state.in_flight[0]
    return StepResult(1, plan.step_id, pack_u32([7] * len(plan.sampling())))


def measure_steps(num_steps: int) -> dict[str, float]:
    core = new_core(NUM_SEQS * (CONTEXT + 2 * num_steps) // 16, 1 << 20)
    for i in range(NUM_SEQS):
        # Spread over the block, as requests that came at any time are.
        core.new_request("tokenizer", new_request(i, CONTEXT - num_steps // 2 + i % 16, 2 * num_steps + 32))
    core.schedule()
    core.step_result(result_of(core))
    core.schedule()

    times, payloads = [], []
    gc.collect()
    gc.freeze()
    for _ in range(num_steps):
        result = result_of(core)
        start = time.perf_counter()
        core.step_result(result)
        sent = [encode(plan) for plan in plans(core.schedule())]
        times.append(time.perf_counter() - start)
        payloads += sent
    decoded = [decode(payload) for payload in payloads]
    start = time.perf_counter()
    for payload, plan in zip(payloads, decoded, strict=True):
        decode(payload)
        encode(plan)
    codec = (time.perf_counter() - start) / len(payloads)
    return {
        "schedule_update_encode_ms": round(statistics.median(times) * 1e3, 4),
        "schedule_update_encode_p99_ms": round(statistics.quantiles(times, n=100)[98] * 1e3, 4),
        "plan_bytes_mean": round(statistics.mean(map(len, payloads)), 1),
        "plan_codec_us_mean": round(codec * 1e6, 2),
    }


def log_normal(mean: float) -> int:
    sigma = 0.8
    return max(1, min(3000, round(random.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))


def measure_waste(num_requests: int) -> float:
    core = new_core(16384, 2048)
    arrivals = iter(range(num_requests))
    allocated = unused = 0
    for i in arrivals:
        core.new_request("tokenizer", new_request(i, log_normal(MEAN_PROMPT), log_normal(MEAN_OUTPUT)))
        for _ in range(3):
            if not plans(core.schedule()) and not core.state.in_flight:
                break
            for destination, message in core.step_result(result_of(core)):
                if destination == "tokenizer" and isinstance(message, Outputs):
                    for output in message.items:
                        if output.finish_reason is not None:
                            core.release(Release(output.request_id, 1))
            for request in core.state.running:
                allocated += len(request.blocks) * 16
                unused += len(request.blocks) * 16 - request.num_computed_tokens
    return unused / allocated


def main() -> None:
    random.seed(0)
    print(json.dumps({**measure_steps(512), "kv_waste": round(measure_waste(1500), 4)}))


if __name__ == "__main__":
    main()
