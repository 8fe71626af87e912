"""Spans of traced rows: a prefill that ends with the first token, and the decoding after it."""

import numpy as np
import pytest

from quartet.services.executor.row_spans import RowSpans
from quartet.shared.messages import NewRow, StepPlan
from quartet.shared.sampling_params import SamplingParams

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorder:
    def __init__(self):
        self.spans = []

    def record(self, name, parent, since, until, attributes):
        self.spans.append((name, since, until, attributes["quartet.num_steps"], attributes["quartet.completed"]))
        assert parent == PARENT


class Executor:
    """A second for each step."""

    def __init__(self):
        self.now = 0.0
        self.recorder = Recorder()
        self.spans = RowSpans(self.recorder, lambda: self.now)
        self.step_id = 0

    def step(self, *, new=(), removed=(), decodes=(), prefills=()):
        bits = bytearray(2)
        for row in decodes:
            bits[row >> 3] |= 1 << (row & 7)
        plan = StepPlan(
            1,
            self.step_id,
            np.array(removed, "<u2").tobytes(),
            list(new),
            b"",
            b"",
            bytes(bits),
            np.array([row for row, _ in prefills], "<u2").tobytes(),
            np.array([count for _, count in prefills], "<u4").tobytes(),
        )
        self.step_id += 1
        self.spans.planned(plan)
        self.now += 1.0
        self.spans.returned(plan)


def new_row(row, num_tokens, num_computed=0, trace_context=PARENT):
    return NewRow(
        row,
        bytes(4 * num_tokens),
        num_tokens,
        num_computed,
        b"",
        SamplingParams(),
        [],
        0,
        b"",
        trace_context=trace_context,
    )


@pytest.fixture
def executor():
    return Executor()


def test_a_prefill_in_chunks_and_its_decodes(executor):
    executor.step(new=[new_row(9, 10, num_computed=4)], prefills=[(9, 4)])
    assert executor.spans.any and not executor.recorder.spans
    executor.step(prefills=[(9, 2)])
    assert executor.recorder.spans == [("prefill", 0.0, 2.0, 2, True)]
    for _ in range(3):
        executor.step(decodes=[9, 1])
    executor.step(decodes=[1])
    executor.step(removed=[9], decodes=[1])
    assert executor.recorder.spans[1:] == [("decode", 2.0, 5.0, 3, True)]
    assert not executor.spans.any


def test_at_rest_decoding_is_over(executor):
    executor.step(new=[new_row(0, 3)], prefills=[(0, 3)])
    executor.step(decodes=[0])
    executor.now += 60.0
    executor.spans.end_all()
    assert executor.recorder.spans == [("prefill", 0.0, 1.0, 1, True), ("decode", 1.0, 2.0, 1, True)]
    executor.spans.end_all()
    assert len(executor.recorder.spans) == 2


def test_a_row_that_leaves_while_it_prefills(executor):
    executor.step(new=[new_row(0, 30)], prefills=[(0, 8)])
    executor.step(removed=[0], new=[new_row(0, 5)], prefills=[(0, 5)])
    assert executor.recorder.spans == [("prefill", 0.0, 1.0, 1, False), ("prefill", 1.0, 2.0, 1, True)]


@pytest.mark.parametrize("trace_context", ["", "nonsense", PARENT[:-1] + "0", PARENT + "x" * 10_000])
def test_rows_that_are_not_traced_are_not_followed(executor, trace_context):
    executor.step(new=[new_row(0, 3, trace_context=trace_context)], prefills=[(0, 3)])
    assert not executor.spans.any


def test_a_plan_that_the_executor_will_refuse_breaks_nothing(executor):
    executor.step(new=[new_row(0, 3)], prefills=[(0, 3)])
    broken = StepPlan(1, 9, b"\0", [], b"", b"", b"", b"\0", b"\0\0\0")
    executor.spans.planned(broken)
    executor.spans.returned(broken)
    executor.step(decodes=[0], removed=[500])
    assert executor.spans.any
