"""The compiled sampler against the plain one: the same tokens for the same seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.services.executor.native.library import Isa, detect_isa
from quartet.services.executor.native.sampler import NativeSampler, can_sample
from quartet.services.executor.sampler import draw
from quartet.services.executor.sampling_rows import SamplingRows
from quartet.shared.messages import FAILED_TOKEN_ID
from quartet.shared.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not can_sample(), reason="no compiled sampler here")

Array = np.ndarray
KINDS = [kind for kind in (Isa.AVX2, Isa.AVX512_BF16) if kind & detect_isa()]


class Rows:
    """A row for each of `params`, all drawing from one table of logits, by every set of kernels."""

    def __init__(self, params: list[SamplingParams], vocab_size: int, num_threads: int = 1) -> None:
        self.state = SamplingRows(len(params), vocab_size)
        for i, row in enumerate(params):
            self.state.add(i, row, [], i % 3, np.array([0], np.int32), 1)
        self.samplers = [NativeSampler(self.state, num_threads, kind) for kind in KINDS]

    def native(self, logits: Array, rows: Array, output_indices: Array) -> tuple[Array, Array]:
        """With what it must not read, columns past the vocabulary, not numbers, and what it must write, wrong."""
        vocab_size = self.state.vocab_size
        table = np.full((len(logits), vocab_size + 5), np.nan, np.float32)
        table[:, :vocab_size] = logits
        before = table.copy()
        all_found = []
        for sampler in self.samplers:
            sampler._token_ids[:] = -7
            sampler._failed[:] = True
            all_found.append(sampler.draw(torch.from_numpy(table)[:, :vocab_size], rows, output_indices))
            assert np.array_equal(table, before, equal_nan=True)
        for found in all_found[1:]:
            assert [part.tolist() for part in found] == [part.tolist() for part in all_found[0]]
        return all_found[0]

    def plain(self, logits: Array, rows: Array, output_indices: Array) -> tuple[Array, Array]:
        return draw(torch.from_numpy(logits.copy()), self.state, rows, output_indices)


def check_same(logits: Array, params: list[SamplingParams], num_threads: int = 1, first_output: int = 0) -> None:
    logits = logits.astype(np.float32)
    rows, outputs = np.arange(len(params)), np.arange(len(params)) + first_output
    both = Rows(params, logits.shape[1], num_threads)
    for found, expected in zip(both.native(logits, rows, outputs), both.plain(logits, rows, outputs), strict=True):
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.01, 0.3, 0.8, 1.0, 1.7, 100.0]),
    top_k=st.one_of(st.just(0), st.integers(1, 60), st.integers(1, 5000)),
    top_p=st.one_of(st.just(1.0), st.floats(1e-9, 1.0), st.sampled_from([0.9, 0.95, 0.999999])),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.sampled_from([1e-30, 0.05, 1.0])),
    seed=st.integers(0, 2**63 - 1),
)


def named(params: SamplingParams) -> str:
    return f"k{params.top_k}-p{params.top_p}-m{params.min_p}"


# The step between values, so that many are equal; the spread; the share that is masked.
TABLES = st.tuples(
    st.sampled_from([0.0, 0.5, 4.0]),
    st.sampled_from([0.0, 0.1, 1.0, 5.0, 1e4, 1e30]),
    st.sampled_from([0.0, 0.3, 0.99, 0.9999]),
    st.integers(0, 2**32 - 1),
)


def table(shape: tuple[int, int], kind: tuple[float, float, float, int]) -> Array:
    step, spread, masked, seed = kind
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, shape) * spread
    if step:
        values = np.round(values / step) * step
    values[rng.random(shape) < masked] = -math.inf
    return values.astype(np.float32)


@settings(max_examples=300, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(1, 3000), TABLES, st.integers(0, 10_000))
def test_any_parameters_draw_the_plain_path_s_token(params, vocab_size, kind, first_output):
    check_same(table((len(params), vocab_size), kind), params, first_output=first_output)


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 255, 256, 257, 511, 513, 49152, 128_259])
def test_widths_that_do_not_fill_a_vector(vocab_size):
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=1),
        SamplingParams(seed=3, top_k=40, top_p=0.9),
        SamplingParams(seed=4, top_p=0.95),
        SamplingParams(seed=5, min_p=0.01),
    ]
    for spread in (0.3, 3.0):
        check_same(np.random.default_rng(vocab_size).normal(0, spread, (len(params), vocab_size)), params)


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.3, 1.0, 3.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1, top_p=0.5),
        SamplingParams(seed=2, top_p=0.9999),
        SamplingParams(seed=3, top_k=3000),
        SamplingParams(seed=4, top_k=20_000, top_p=0.9),
        SamplingParams(seed=5, top_k=20_000, top_p=0.99, min_p=1e-3),
        SamplingParams(seed=6, min_p=1e-4),
    ],
    ids=named,
)
def test_flat_rows_reach_past_the_first_candidates(params, spread):
    logits = np.random.default_rng(0).normal(0, spread, (4, 32_000))
    check_same(logits, [params] * 4)


def test_many_draws_over_threads_are_those_of_one():
    rng = np.random.default_rng(1)
    params = [
        SamplingParams(
            seed=i,
            temperature=[0.0, 0.7, 1.0][i % 3],
            top_k=[0, 50, 7][i // 3 % 3],
            top_p=[1.0, 0.95, 0.5][i // 9 % 3],
            min_p=[0.0, 0.02][i // 27 % 2],
        )
        for i in range(108)
    ]
    for _ in range(5):
        check_same(rng.normal(0, 3, (len(params), 2000)), params, num_threads=3)


@pytest.mark.parametrize("place", [0, 100, 255, 256, 999])
@pytest.mark.parametrize(
    "bad", [{"value": math.nan}, {"value": math.inf}, {"value": -math.inf, "all": True}], ids=["nan", "inf", "masked"]
)
def test_a_row_without_a_finite_maximum_fails_alone(place, bad):
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3),
        SamplingParams(seed=4, top_k=5),
        SamplingParams(seed=5, top_p=0.9),
        SamplingParams(seed=6, min_p=0.1),
    ]
    params = [row for kind in kinds for row in (kind, kind)]
    logits = np.random.default_rng(2).normal(0, 2, (len(params), 1000)).astype(np.float32)
    for row in range(0, len(params), 2):
        logits[row, slice(None) if "all" in bad else place] = bad["value"]
    both = Rows(params, 1000)
    rows = np.arange(len(params))
    token_ids, failed = both.native(logits, rows, rows)
    assert failed.tolist() == [True, False] * len(kinds)
    assert (token_ids[::2] == FAILED_TOKEN_ID).all() and (token_ids[1::2] < 1000).all()
    assert token_ids.tolist() == both.plain(logits, rows, rows)[0].tolist()


def test_the_first_of_equal_maxima_is_greedy_s_token():
    logits = np.zeros((3, 600), np.float32)
    logits[0, [5, 6, 300]] = 2.0
    logits[1, [599, 598]] = 2.0
    logits[2] = -0.0
    logits[2, 77] = 0.0
    both = Rows([SamplingParams(temperature=0.0)] * 3, 600)
    assert both.native(logits, np.arange(3), np.arange(3))[0].tolist() == [5, 598, 0]


@pytest.mark.parametrize("params", [SamplingParams(seed=1, top_k=3), SamplingParams(seed=2, top_p=0.2)], ids=named)
def test_ties_at_the_edge_all_stay(params):
    logits = np.zeros((1, 1000), np.float32)
    logits[0, ::10] = 1.0
    both = Rows([params], 1000)
    rows = np.zeros(2000, np.int64)
    drawn, _ = both.native(logits.repeat(2000, 0), rows, np.arange(2000))
    assert set(drawn.tolist()) == set(range(0, 1000, 10))


def test_logits_that_differ_and_are_equally_far_both_stay():
    # Both are 2.0 below the largest in float32, divided by 3 or not.
    logits = np.full((1, 300), -50.0, np.float32)
    largest = np.float32(2.0**22)
    logits[0, [3, 200]] = 2.0, 2.25
    logits[0, 9] = largest
    params = [SamplingParams(seed=i, temperature=100.0, top_k=2) for i in range(50)]
    check_same(logits.repeat(50, 0), params)


def test_rows_may_be_more_than_the_state_has_places():
    both = Rows([SamplingParams(seed=1, top_k=9)], 100)
    logits = np.random.default_rng(3).normal(0, 1, (7, 100)).astype(np.float32)
    rows, outputs = np.zeros(7, np.int64), np.arange(7)
    assert both.native(logits, rows, outputs)[0].tolist() == both.plain(logits, rows, outputs)[0].tolist()
    assert both.native(logits[:0], rows[:0], outputs[:0])[0].tolist() == []
