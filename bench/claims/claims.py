"""Each claim: the paper's figure, ours, the goal, and whether it is met."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Claim:
    """`measured` is held against `goal`: at least it, at most it, or equal to it."""

    name: str
    paper: str
    goal: float
    holds: Literal["at least", "at most", "equal"]
    measured: float
    unit: str
    how: str

    @property
    def passed(self) -> bool:
        if self.holds == "at least":
            return self.measured >= self.goal
        return self.measured <= self.goal if self.holds == "at most" else self.measured == self.goal

    def describe(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "passed": self.passed}


def batching(
    ours: Mapping[str, Any], static: Mapping[str, Mapping[str, Any]], static_on_ours: Mapping[str, Any]
) -> list[Claim]:
    """Held against the best of the static batches' sizes, for each of the two. Static batches on our own kernels are
    told beside them: what is left against those is scheduling's alone."""
    static_speed, static_p95 = static_on_ours["output_throughput"], static_on_ours["p95_e2el_ms"]
    by_scheduling = round(100 * (1 - ours["p95_e2el_ms"] / static_p95), 1)
    if ours["failed"] or any(found["completed"] != ours["completed"] for found in static.values()):
        raise ValueError("not all requests were answered")
    fastest = max(found["output_throughput"] for found in static.values())
    soonest = min(found["p95_e2el_ms"] for found in static.values())
    sizes = ", ".join(static)
    return [
        Claim(
            "throughput, continuous over static batching",
            "2-4 x (FasterTransformer, Orca)",
            4.0,
            "at least",
            round(ours["output_throughput"] / fastest, 2),
            "x",
            f"{ours['output_throughput']:.0f} tokens/s, and {fastest:.0f} of transformers' generate in batches "
            f"of at most {sizes}; static batches on our own kernels {static_speed:.0f}: "
            f"{ours['output_throughput'] / static_speed:.2f} x by scheduling alone",
        ),
        Claim(
            "p95 latency, cut by continuous batching",
            "not given",
            60.0,
            "at least",
            round(100 * (1 - ours["p95_e2el_ms"] / soonest), 1),
            "%",
            f"{ours['p95_e2el_ms'] / 1e3:.1f} s instead of {soonest / 1e3:.1f} s, from arrival to the whole answer; "
            f"static batches on our own kernels {static_p95 / 1e3:.1f} s: {by_scheduling} % by scheduling alone",
        ),
    ]


def waste(blocks: Mapping[str, Any]) -> tuple[list[Claim], dict[str, float]]:
    """And the percentages that reserving in one piece would have wasted, for the same requests at the same time."""
    contiguous = {name: _percent(1 - blocks["tokens"] / slots) for name, slots in blocks["reserved"].items()}
    empty = blocks["tables"] - blocks["tokens"]
    claim = Claim(
        "KV slots allocated and empty",
        "under 4 % (reserved in one piece: 62-80 %)",
        4.0,
        "at most",
        _percent(empty / blocks["allocated"]),
        "%",
        f"mean of {blocks['steps']} steps with {_running(blocks):.0f} requests; reserved in "
        f"one piece for the context {contiguous['max_model_len']:.0f} %, powers of two "
        f"{contiguous['power_of_two']:.0f} %, exactly {contiguous['exact']:.0f} %",
    )
    return [claim], contiguous


def sharing(multi_turn: Mapping[str, Any], same_prompt: Mapping[str, Any]) -> list[Claim]:
    """Conversations take turns, so what they save is counted over the run; requests with one system prompt run
    beside each other, so what they save is counted in each step."""
    paper = "6-55 % (parallel sampling, beam search)"
    return [
        Claim(
            "KV blocks saved by sharing, multi-turn",
            paper,
            50.0,
            "at least",
            saved_over_run(multi_turn),
            "%",
            f"of {multi_turn['hit_blocks'] + multi_turn['new_blocks']} blocks that requests took, so many were there "
            f"already; in the mean step {saved_at_once(multi_turn):.0f} %",
        ),
        Claim(
            "KV blocks saved by sharing, same system prompt",
            paper,
            50.0,
            "at least",
            saved_at_once(same_prompt),
            "%",
            f"of the blocks in all tables, in the mean step with {_running(same_prompt):.0f} requests; over the run "
            f"{saved_over_run(same_prompt):.0f} %",
        ),
    ]


def saved_over_run(blocks: Mapping[str, Any]) -> float:
    return _percent(blocks["hit_blocks"] / (blocks["hit_blocks"] + blocks["new_blocks"]))


def saved_at_once(blocks: Mapping[str, Any]) -> float:
    return _percent(1 - blocks["allocated"] / blocks["tables"])


def streams(found: Mapping[str, Any], wanted: int, at_once: int) -> list[Claim]:
    return [
        Claim(
            f"{at_once} streams at once, of {wanted} finished without an error",
            "not given",
            wanted,
            "equal",
            found["completed"],
            "",
            f"{found['output_throughput']:.0f} tokens/s; first token after {found['median_ttft_ms'] / 1e3:.2f} s (p99 "
            f"{found['p99_ttft_ms'] / 1e3:.2f}), then {found['median_tpot_ms']:.0f} ms a token (p99 of gaps "
            f"{found['p99_itl_ms']:.0f}); {found['max_concurrent_requests']} ran at once"
            + (f"; {found['errors']}" if found["errors"] else ""),
        )
    ]


def _running(blocks: Mapping[str, Any]) -> float:
    """Requests in the mean step."""
    return float(blocks["running"] / max(1, blocks["steps"]))


def _percent(share: float) -> float:
    return round(100 * share, 2)
