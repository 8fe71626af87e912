"""Figures of a run under the names that vLLM's `bench serve` gives them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from quartet.services.cli.bench.record import Record

LATENCIES = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (90, 99)
MAX_EXAMPLE = 300


def parse_slo(text: str) -> dict[str, float]:
    """ "ttft:500,itl:50": milliseconds by latency; raises ValueError."""
    slo: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition(":")
        if name not in LATENCIES:
            raise ValueError(f"{part}: a goal is NAME:MILLISECONDS, with a name of {', '.join(LATENCIES)}")
        try:
            slo[name] = float(value)
        except ValueError:
            raise ValueError(f"{part}: milliseconds are a number, not {value!r}") from None
        if not slo[name] > 0 or math.isinf(slo[name]):
            raise ValueError(f"{part}: milliseconds are above 0")
    if not slo:
        raise ValueError("no goal is named")
    return slo


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, with linear interpolation."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds by name; nothing where there are no values."""
    if not seconds:
        return {}
    ordered = sorted(1e3 * value for value in seconds)
    found = {
        f"mean_{name}_ms": statistics.fmean(ordered),
        f"median_{name}_ms": percentile(ordered, 50),
        f"std_{name}_ms": _deviation(ordered),
        **{f"p{percent}_{name}_ms": percentile(ordered, percent) for percent in PERCENTILES},
        f"max_{name}_ms": ordered[-1],
    }
    return {key: round(value, 3) for key, value in found.items()}


def summary(records: Sequence[Record], duration: float, slo: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Rates are over `duration` seconds; latencies and token counts are of the requests that succeeded."""
    good = [record for record in records if not record.error]
    output_tokens = sum(record.output_tokens for record in good)
    input_tokens = sum(record.prompt_tokens for record in good)
    duration = max(duration, 1e-9)
    found: dict[str, Any] = {
        "duration": round(duration, 4),
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": input_tokens,
        "total_cached_tokens": sum(record.cached_tokens for record in good),
        "total_output_tokens": output_tokens,
        "request_throughput": round(len(good) / duration, 4),
        "output_throughput": round(output_tokens / duration, 2),
        "total_token_throughput": round((input_tokens + output_tokens) / duration, 2),
        "max_concurrent_requests": _max_concurrent(records),
    }
    if slo:
        met = sum(meets(record, slo) for record in good)
        found |= {"slo_ms": dict(slo), "request_goodput": round(met / duration, 4), "goodput_completed": met}
    spoken = [record for record in good if record.times]
    found |= spread("ttft", [record.time_to_first_token for record in spoken])
    found |= spread("tpot", [value for record in spoken if (value := record.time_per_output_token) is not None])
    found |= spread("itl", [gap for record in spoken for gap in record.gaps()])
    found |= spread("e2el", [record.latency for record in spoken])
    found["errors"] = errors(records)
    return found


def errors(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """By kind: how many, and the message of the first."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.error:
            entry = found.setdefault(record.error, {"count": 0, "example": record.message[:MAX_EXAMPLE]})
            entry["count"] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1]["count"]))


def meets(record: Record, slo: Mapping[str, float]) -> bool:
    """Whether a request that succeeded met all its goals; `itl` is held against the mean of its gaps."""
    if not record.times:
        return False
    gaps = record.gaps()
    reached = {
        "ttft": record.time_to_first_token,
        "tpot": record.time_per_output_token or 0.0,
        "itl": statistics.fmean(gaps) if gaps else 0.0,
        "e2el": record.latency,
    }
    return all(1e3 * reached[name] <= limit for name, limit in slo.items())


def _max_concurrent(records: Sequence[Record]) -> int:
    # An end before a start at the same moment: a closed loop never has more than its streams.
    changes = sorted([(r.started, 1) for r in records] + [(r.ended, -1) for r in records])
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def _deviation(values: Sequence[float]) -> float:
    """As statistics.pstdev, which takes minutes for a million values."""
    mean = statistics.fmean(values)
    return math.sqrt(statistics.fmean([(value - mean) ** 2 for value in values]))
