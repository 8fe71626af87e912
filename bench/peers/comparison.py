"""Ratios of Quartet's figures to a peer's, and the floors that they are held against."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bench.line import spread

Round = Mapping[str, float]
"""Figures of one round by name."""


@dataclasses.dataclass(frozen=True)
class Floor:
    """Quartet's `figure` in `precision` is to be `floor` times the peer's in the best of `variants`, `goal` times at
    best."""

    precision: str
    peer: str
    variants: tuple[str, ...]
    figure: str
    floor: float
    goal: float


FLOORS = (
    Floor("bf16", "vllm", ("bf16",), "one_stream_tokens_per_second", 1.2, 1.5),
    Floor("bf16", "vllm", ("bf16",), "streams_32_tokens_per_second", 1.2, 1.5),
    Floor("int8", "openvino", ("int8", "int8_f32"), "streams_32_tokens_per_second", 1.3, 1.7),
    Floor("int4", "llama_cpp", ("q4_0",), "one_stream_tokens_per_second", 1.3, 1.3),
)


def figures(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Median and spread of each figure."""
    return {name: spread([values[name] for values in rounds]) for name in (rounds[0] if rounds else ())}


def ratios(ours: Sequence[Round], theirs: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Ours over theirs: of the medians, and the least and greatest of a round, whose two runs follow each other."""
    result = {}
    medians = figures(ours), figures(theirs)
    for name in medians[0]:
        of_rounds = [a[name] / b[name] for a, b in zip(ours, theirs, strict=True)]
        result[name] = {
            "of_medians": round(medians[0][name]["median"] / medians[1][name]["median"], 3),
            "min": round(min(of_rounds), 3),
            "max": round(max(of_rounds), 3),
        }
    return result


def floors(comparisons: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each floor with the ratio reached: the least of its variants that were measured, null where none was."""
    measured = {(pair["precision"], pair["peer"], pair["variant"]): pair.get("ratios", {}) for pair in comparisons}
    result = []
    for floor in FLOORS:
        found = [measured.get((floor.precision, floor.peer, variant), {}) for variant in floor.variants]
        ratio = min((ratios[floor.figure]["of_medians"] for ratios in found if floor.figure in ratios), default=None)
        met = None if ratio is None else ratio >= floor.floor
        goal_met = None if ratio is None else ratio >= floor.goal
        result.append({**dataclasses.asdict(floor), "ratio": ratio, "met": met, "goal_met": goal_met})
    return result
