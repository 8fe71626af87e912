"""What `quartet top` shows, from the events of /live: rates over the last seconds, and what is so now."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

MEMBERS = ("model", "pool", "queue", "counters", "latency", "services")
# Seconds that rates are taken over; those of the prefix cache, which few requests make.
WINDOW = 5.0
CACHE_WINDOW = 60.0
MAX_SAMPLES = 4096


class _Sample(NamedTuple):
    t: float
    counters: dict[str, int]


class _Step(NamedTuple):
    """`told` is when it was, by the gateway's clock; its own `t` is the scheduler's."""

    told: float
    step: dict[str, Any]


class TopView:
    """`apply` takes events in their order."""

    def __init__(self) -> None:
        self.t = 0.0
        self.state: dict[str, Any] = dict.fromkeys(MEMBERS)
        self._samples: deque[_Sample] = deque(maxlen=MAX_SAMPLES)
        self._steps: deque[_Step] = deque(maxlen=MAX_SAMPLES)
        # Of the last snapshot, whose steps are older than all rates.
        self._snapshot = 0.0

    @property
    def has_scheduler(self) -> bool:
        return self.state["pool"] is not None

    def apply(self, name: str, data: dict[str, Any]) -> None:
        self.t = data["t"]
        self.state |= {member: data[member] for member in MEMBERS if member in data}
        if name == "snapshot":
            self._steps.clear()
            self._snapshot = self.t
        self._steps.extend(_Step(self.t, step) for step in data.get("steps", ()) if not step["lost"])
        counters = self.state["counters"]
        if counters is None:
            return
        if self._samples and counters["steps"] < self._samples[-1].counters["steps"]:
            self._samples.clear()  # another scheduler counts from 0
        self._samples.append(_Sample(self.t, counters))

    def summary(self) -> dict[str, Any]:
        """All that is shown, as it is printed with --json. Rates are per second; None: not known."""
        steps = self._last_steps()
        pool, queue, latency = self.state["pool"], self.state["queue"], self.state["latency"]
        return {
            "t": self.t,
            "model": self.state["model"]["name"] if self.state["model"] else None,
            "output_tokens_per_second": self._rate("output_tokens"),
            "prefill_tokens_per_second": self._prefill_rate(),
            "steps_per_second": self._rate("steps"),
            "tokens_per_step": _mean([s["num_prefill_tokens"] + s["num_decode_tokens"] for s in steps]),
            "executor_ms": _mean([s["executor_ms"] for s in steps if s["executor_ms"] is not None]),
            "scheduler_ms": _mean([s["schedule_ms"] + s["update_ms"] for s in steps]),
            "queue": queue,
            "kv_cache": _usage(pool),
            "prefix_cache_hit_rate": self._hit_rate(),
            "preemptions": self.state["counters"]["preemptions"] if self.state["counters"] else None,
            "ttft_ms": latency["ttft"] if latency else None,
            "itl_ms": latency["itl"] if latency else None,
            "services": self.state["services"] or [],
        }

    def _last_steps(self) -> list[dict[str, Any]]:
        """Those told lately, of the time before the last of them."""
        if not self._steps:
            return []
        since = self._steps[-1].step["t"] - WINDOW
        return [step for told, step in self._steps if told >= self.t - WINDOW and step["t"] >= since]

    def _prefill_rate(self) -> float | None:
        """Of the steps told after the first sample, over the time since."""
        first = self._first(max(self.t - WINDOW, self._snapshot))
        if first is None:
            return None
        num_tokens = sum(s["num_prefill_tokens"] for told, s in self._steps if told > first.t)
        return _per_second(num_tokens, self.t - first.t)

    def _first(self, since: float) -> _Sample | None:
        return next((s for s in self._samples if s.t >= since), None)

    def _rate(self, name: str) -> float | None:
        """Over what the window covers so far."""
        first = self._first(self.t - WINDOW)
        if first is None:
            return None
        return _per_second(self._samples[-1].counters[name] - first.counters[name], self.t - first.t)

    def _hit_rate(self) -> float | None:
        """Of the last minute's prompt tokens, or of all since the scheduler's start where there were none."""
        if not self._samples:
            return None
        last, first = self._samples[-1].counters, self._first(self.t - CACHE_WINDOW)
        queries, hits = last["prefix_cache_queries"], last["prefix_cache_hits"]
        if first is not None and queries > first.counters["prefix_cache_queries"]:
            queries -= first.counters["prefix_cache_queries"]
            hits -= first.counters["prefix_cache_hits"]
        return round(hits / queries, 4) if queries else None


def _usage(pool: dict[str, int] | None) -> dict[str, Any] | None:
    if pool is None:
        return None
    used = pool["num_blocks"] - pool["num_free"]
    return {**pool, "num_used": used, "usage": round(used / pool["num_blocks"], 4)}


def _per_second(count: float, seconds: float) -> float | None:
    return round(count / seconds, 1) if seconds > 0 else None


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 3) if values else None
