"""OpenTelemetry spans of the rows whose requests are traced: their prefill, and their decoding."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quartet.shared.messages import NewRow, StepPlan
from quartet.shared.trace_context import checked, is_sampled
from quartet.shared.tracing import (
    LATENCY_TIME_IN_MODEL_DECODE,
    LATENCY_TIME_IN_MODEL_PREFILL,
    USAGE_PROMPT_TOKENS,
    Attributes,
)


class Recorder(Protocol):
    """What is used of a Tracer."""

    def record(self, name: str, parent: str, since: float, until: float, attributes: Attributes) -> None: ...


@dataclass(slots=True)
class _Row:
    trace_context: str
    choice_index: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_left: int
    since: float
    last: float
    num_steps: int = 0
    first_sample: int = -1  # the step that samples its first token
    decoding: bool = False


class RowSpans:
    """Costs nothing but a look at `new_rows` while no row is traced."""

    def __init__(self, tracer: Recorder, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracer = tracer
        self._clock = clock
        self._rows: dict[int, _Row] = {}

    @property
    def any(self) -> bool:
        return bool(self._rows)

    def planned(self, plan: StepPlan) -> None:
        """Before the step runs."""
        if self._rows:
            for req_index in _column(plan.removed, "<u2"):
                self._end(req_index)
        for new in plan.new_rows:
            if new.trace_context and is_sampled(parent := checked(new.trace_context)):
                self._enter(new, parent)
        if self._rows:
            for req_index, count in _prefills(plan):
                row = self._rows.get(req_index)
                if row is not None:
                    row.num_left -= count
                    if row.num_left <= 0:
                        row.first_sample = plan.step_id

    def returned(self, plan: StepPlan) -> None:
        """Its result is there."""
        if not self._rows:
            return
        now = self._clock()
        for req_index, row in self._rows.items():
            if row.first_sample == plan.step_id and not row.decoding:
                row.num_steps += 1
                self._record("prefill", row, now, LATENCY_TIME_IN_MODEL_PREFILL)
                row.decoding, row.since, row.last, row.num_steps = True, now, now, 0
            elif row.decoding:
                if _has_bit(plan.decode_rows, req_index):
                    row.last = now
                    row.num_steps += 1
            else:
                row.last = now
                row.num_steps += 1

    def end_all(self) -> None:
        """No row computes any more."""
        for req_index in list(self._rows):
            self._end(req_index)

    def _enter(self, new: NewRow, parent: str) -> None:
        now = self._clock()
        num_left = len(new.token_ids) // 4 - new.num_computed_tokens
        self._rows[new.req_index] = _Row(
            parent, new.choice_index, new.num_prompt_tokens, new.num_computed_tokens, num_left, now, now
        )

    def _end(self, req_index: int) -> None:
        row = self._rows.pop(req_index, None)
        if row is None:
            return
        if row.decoding and row.num_steps:
            self._record("decode", row, row.last, LATENCY_TIME_IN_MODEL_DECODE)
        elif not row.decoding and row.num_steps:
            self._record("prefill", row, row.last, LATENCY_TIME_IN_MODEL_PREFILL, completed=False)

    def _record(self, name: str, row: _Row, until: float, latency: str, completed: bool = True) -> None:
        attributes: dict[str, str | bool | int | float] = {
            USAGE_PROMPT_TOKENS: row.num_prompt_tokens,
            latency: until - row.since,
            "quartet.choice": row.choice_index,
            "quartet.num_steps": row.num_steps,
            "quartet.completed": completed,
        }
        if name == "prefill":
            attributes["quartet.num_cached_tokens"] = row.num_computed_tokens
        self._tracer.record(name, row.trace_context, row.since, until, attributes)


def _prefills(plan: StepPlan) -> list[tuple[int, int]]:
    return list(zip(_column(plan.prefill_rows, "<u2"), _column(plan.prefill_counts, "<u4"), strict=False))


def _column(packed: bytes, kind: str) -> list[int]:
    """Empty where it is cut short: such a plan is refused anyway."""
    values: list[int] = np.frombuffer(packed, kind).tolist() if len(packed) % int(kind[-1]) == 0 else []
    return values


def _has_bit(bits: bytes, place: int) -> bool:
    return place >> 3 < len(bits) and bool(bits[place >> 3] >> (place & 7) & 1)
