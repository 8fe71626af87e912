"""The sampler against a straightforward float64 reference that looks at one row at a time."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from quartet.services.executor import sampler
from quartet.services.executor.native.sampler import NativeSampler, can_sample
from quartet.services.executor.noise import uniform
from quartet.services.executor.sampler import Drawer, SamplerOutput, sample
from quartet.services.executor.sampling_rows import SamplingRows
from quartet.shared.messages import FAILED_TOKEN_ID, LOGPROB_FLOOR
from quartet.shared.sampling_params import SamplingParams

Row = tuple[SamplingParams, list[int], list[int]]  # parameters, prompt ids, output ids


@pytest.fixture(autouse=True, params=["plain", "native"])
def drawn_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule holds for both ways of drawing."""
    if request.param == "native":
        if not can_sample():
            pytest.skip("no compiled sampler here")
        monkeypatch.setitem(globals(), "drawer", lambda state: NativeSampler(state, 1))


def drawer(state: SamplingRows) -> Drawer | None:
    return None


def run(
    logits: np.ndarray,
    rows: list[Row],
    *,
    eos: list[int] | None = None,
    choices: list[int] | None = None,
    vocab_size: int | None = None,
) -> SamplerOutput:
    state = SamplingRows(len(rows), vocab_size or logits.shape[1])
    for i, (params, prompt, output) in enumerate(rows):
        ids = np.array(prompt + output, np.int32)
        state.add(i, params, eos or [], choices[i] if choices else 0, ids, len(prompt))
    output_indices = np.array([len(output) for _, _, output in rows])
    table = torch.tensor(logits, dtype=torch.float32)
    return sample(table, state, np.arange(len(rows)), output_indices, drawer(state))


def draws(logits: np.ndarray, params: SamplingParams, count: int) -> np.ndarray:
    """`count` draws at output positions 0, 1, ... of one row."""
    state = SamplingRows(1, len(logits))
    state.add(0, params, [], 0, np.array([0], np.int32), 1)
    table = torch.tensor(logits, dtype=torch.float32).repeat(count, 1)
    return sample(table, state, np.zeros(count, np.int64), np.arange(count), drawer(state)).token_ids


# --- the reference --------------------------------------------------------------------------------


def adjusted(logits: np.ndarray, row: Row, eos: list[int]) -> np.ndarray:
    params, prompt, output = row
    values = logits.astype(np.float64).copy()
    for token_id, bias in params.logit_bias.items():
        values[token_id] += bias
    for token_id in set(prompt) | set(output):
        value = values[token_id]
        values[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id in set(output):
        values[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    if len(output) < params.min_tokens:
        values[[*params.stop_token_ids, *eos]] = -math.inf
    return values


def distribution(values: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after temperature and truncation, token by token."""
    if params.temperature < 1e-5:
        return np.eye(len(values))[values.argmax()]
    weights = np.exp((values - values.max()) / params.temperature)
    order = sorted(range(len(values)), key=lambda i: -weights[i])
    kept = order[: params.top_k] if params.top_k else order
    if params.top_p < 1:
        whole = weights[kept].sum()
        sums = np.cumsum(weights[kept])
        kept = kept[: int(np.argmax(sums >= params.top_p * whole)) + 1]
    kept = [i for i in kept if weights[i] >= params.min_p * weights.max()]
    result = np.zeros(len(values))
    result[kept] = weights[kept]
    return result / result.sum()


def expected(logits: np.ndarray, row: Row, eos: list[int]) -> tuple[int, bool]:
    """(the token, whether the draw is too close to a boundary for float32 to be held to it)."""
    params, _, output = row
    cdf = distribution(adjusted(logits, row, eos), params).cumsum()
    noise = uniform(*(np.array([x], np.uint64) for x in (params.seed, 0, len(output))))[0]
    return int(np.searchsorted(cdf, noise, side="right")), bool(np.abs(cdf - noise).min() < 1e-5)


# --- against the reference ------------------------------------------------------------------------


def random_row(rng: random.Random, vocab: int) -> Row:
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 5, 40, vocab, 10 * vocab]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 1e-6]),
        min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        presence_penalty=rng.choice([0.0, 0.0, 1.5, -1.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7, -0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
        logit_bias=rng.choice([{}, {}, {3: 2.0, 5: -100.0}]),
        min_tokens=rng.choice([0, 0, 4]),
        stop_token_ids=rng.choice([[], [7, 8]]),
        seed=rng.getrandbits(63),
    )
    ids = [rng.randrange(vocab) for _ in range(20)]
    cut = rng.randrange(1, 20)
    return params, ids[:cut], ids[cut:]


@pytest.mark.parametrize("vocab", [16, 300, 3000])
def test_a_mixed_batch_gives_each_row_the_token_of_the_reference(vocab: int) -> None:
    rng = random.Random(vocab)
    rows = [random_row(rng, vocab) for _ in range(200)]
    logits = np.random.default_rng(vocab).normal(0, 3, (200, vocab)).astype(np.float32)
    token_ids = run(logits.copy(), rows, eos=[2]).token_ids
    close = 0
    for i, row in enumerate(rows):
        token_id, near_boundary = expected(logits[i], row, [2])
        close += near_boundary
        assert token_ids[i] == token_id or near_boundary, (i, row)
    assert close < 20


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.999),
        SamplingParams(top_p=0.3, seed=1),
        SamplingParams(top_k=2000),
        SamplingParams(top_k=2000, top_p=0.9),
        SamplingParams(top_k=1500, min_p=0.5),
    ],
)
def test_flat_distributions_reach_past_the_candidates(params: SamplingParams) -> None:
    vocab = 3 * sampler.NUM_CANDIDATES
    logits = np.random.default_rng(0).normal(0, 0.1, (64, vocab)).astype(np.float32)
    rows: list[Row] = [(params, [0], [0] * i) for i in range(64)]
    token_ids = run(logits.copy(), rows).token_ids
    exact = [expected(logits[i], row, []) for i, row in enumerate(rows)]
    assert all(token_ids[i] == token_id or near for i, (token_id, near) in enumerate(exact))
    assert sum(near for _, near in exact) < 16


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=5),
        SamplingParams(seed=5, temperature=0.5),
        SamplingParams(seed=6, top_k=7),
        SamplingParams(seed=7, top_p=0.8),
        SamplingParams(seed=8, min_p=0.1),
        SamplingParams(seed=9, top_k=12, top_p=0.9, min_p=0.02, temperature=1.7),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = np.random.default_rng(1).normal(0, 1.5, 40)
    count = 20_000
    law = distribution(logits, params)
    seen = np.bincount(draws(logits, params, count), minlength=len(logits))
    assert seen[law == 0].sum() == 0
    expected_counts = count * law[law > 0]
    freedom = len(expected_counts) - 1
    chi_square = ((seen[law > 0] - expected_counts) ** 2 / expected_counts).sum()
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_ties_at_the_edge_all_stay() -> None:
    logits = np.array([1.0, 3.0, 1.0, 3.0, 1.0])
    assert set(draws(logits, SamplingParams(top_k=1), 200)) == {1, 3}


@pytest.mark.parametrize("width", [4, 256, 700])
def test_a_draw_never_lands_on_a_token_without_weight(width: int) -> None:
    weights = torch.zeros(4, width, dtype=torch.float64)
    weights[:, [width // 2, width - 2]] = 1.0
    noise = np.array([0.0, 0.5, np.nextafter(0.5, 0), np.nextafter(1.0, 0)])
    token_ids = sampler._inverse_cdf(weights, noise).tolist()
    assert token_ids == ([2, 2, 2, 2] if width == 4 else [width // 2, width - 2, width // 2, width - 2])


# --- cases ----------------------------------------------------------------------------------------


def test_b1_neighbours_never_matter() -> None:
    logits = np.random.default_rng(2).normal(0, 2, 500).astype(np.float32)
    seeded: Row = (SamplingParams(temperature=0.9, seed=11), [1], [4, 5])
    alone = run(logits[None], [seeded]).token_ids[0]
    others = [
        (SamplingParams(seed=0), [1], []),
        (SamplingParams(seed=99, top_k=3), [1], [2]),
        (SamplingParams(temperature=0.0), [1], []),
        (SamplingParams(seed=3, top_p=0.2, repetition_penalty=2.0, logprobs=3), [1], []),
        (SamplingParams(seed=4, top_k=400, top_p=0.99), [1], []),
    ]
    for neighbours in itertools.permutations(others, 3):
        table = np.random.default_rng(3).normal(0, 2, (4, 500)).astype(np.float32)
        table[1] = logits
        assert run(table, [neighbours[0], seeded, *neighbours[1:]]).token_ids[1] == alone


def test_b2_choices_of_one_seed_differ_and_are_reproducible() -> None:
    logits = np.random.default_rng(4).normal(0, 1, (4, 1000)).astype(np.float32)
    logits[:] = logits[0]

    def four_texts() -> list[tuple[int, ...]]:
        steps = [
            run(logits.copy(), [(SamplingParams(seed=7), [1], [0] * i)] * 4, choices=[0, 1, 2, 3]).token_ids
            for i in range(8)
        ]
        return list(zip(*steps, strict=True))

    texts = four_texts()
    assert len(set(texts)) == 4
    assert texts == four_texts()


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5, 1e-4, 0.01])
def test_b5_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = np.random.default_rng(5).normal(0, 10, (8, 300)).astype(np.float32)
    best = logits.argmax(-1)
    logits[np.arange(8), best] += 1.0
    rows: list[Row] = [(SamplingParams(temperature=temperature, seed=i), [1], []) for i in range(8)]
    assert run(logits.copy(), rows).token_ids.tolist() == best.tolist()
    huge = logits * 1e30
    assert run(huge, rows).token_ids.tolist() == best.tolist()


def test_b5_a_very_high_temperature_is_flat_and_finite() -> None:
    seen = np.bincount(draws(np.array([0.0, 5.0]), SamplingParams(temperature=100.0), 2000), minlength=2)
    assert 0.4 < seen[0] / 2000 < 0.56


def test_b7_on_and_off_mix_in_one_batch() -> None:
    logits = np.random.default_rng(6).normal(0, 3, (3, 1000)).astype(np.float32)
    rows: list[Row] = [
        (SamplingParams(temperature=0.0), [1], []),
        (SamplingParams(top_k=64, top_p=0.95, seed=1), [1], []),
        (SamplingParams(min_p=0.05, seed=2), [1], []),
    ]
    together = run(logits.copy(), rows).token_ids.tolist()
    assert together == [run(logits[i : i + 1].copy(), [rows[i]]).token_ids[0] for i in range(3)]
    assert together[0] == logits[0].argmax()


def test_b9_only_repetition_charges_the_prompt() -> None:
    logits = np.linspace(-2, 2, 9)[None].repeat(4, 0)
    prompt = [8] * 8
    rows: list[Row] = [
        (SamplingParams(temperature=0.0, logprobs=9), prompt, []),
        (SamplingParams(temperature=0.0, logprobs=9, presence_penalty=2.0), prompt, []),
        (SamplingParams(temperature=0.0, logprobs=9, frequency_penalty=2.0), prompt, []),
        (SamplingParams(temperature=0.0, logprobs=9, repetition_penalty=2.0), prompt, []),
    ]
    logprobs = run(logits, rows).logprobs
    assert logprobs is not None
    none, presence, frequency, repetition = (dict(entry.top) for entry in logprobs if entry)
    assert presence == none and frequency == none
    assert none[8] - none[7] == pytest.approx(0.5)
    assert repetition[8] - repetition[7] == pytest.approx(1.0 - 1.5)


def test_penalties_are_kept_up_as_tokens_come() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.1)
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 0.2, 200).astype(np.float32)
    state = SamplingRows(2, 200)
    prompt, output = [1, 2, 3, 2], [5]
    state.add(1, params, [], 0, np.array(prompt + output, np.int32), len(prompt))
    draws_by = drawer(state)
    for _ in range(300):
        table = torch.tensor(logits[None])
        token_id = int(sample(table, state, np.array([1]), np.array([len(output)]), draws_by).token_ids[0])
        values = adjusted(logits, (params, prompt, output), [])
        assert values[token_id] == pytest.approx(values.max(), abs=1e-5)
        state.append(np.array([1]), np.array([token_id]))
        output.append(token_id)
    assert len(set(output)) > 100


def test_min_tokens_masks_every_stop_until_then() -> None:
    logits = np.array([[5.0, 4.0, 3.0, 2.0]])
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[1, 900], logit_bias={0: 100.0, 900: 5.0})
    assert [run(logits, [(params, [3], [3] * n)], eos=[0]).token_ids[0] for n in range(4)] == [2, 2, 0, 0]


def test_a11_masked_tokens_have_finite_logprobs() -> None:
    logits = np.array([[1.0, 2.0, -np.inf, 3.0], [0.0, 200.0, 0.0, 0.0]])
    params = SamplingParams(temperature=1.0, top_k=1, logprobs=4, min_tokens=1)
    output = run(logits, [(params, [1], []), (params, [1], [])], eos=[3])
    assert output.token_ids.tolist() == [1, 1]
    assert output.logprobs is not None and all(output.logprobs)
    first, second = (entry for entry in output.logprobs if entry)
    assert first.top[2:] == [(2, LOGPROB_FLOOR), (3, LOGPROB_FLOOR)]
    assert all(math.isfinite(value) for entry in (first, second) for _, value in entry.top)
    assert second.top[0] == (1, 0.0) and second.top[1] == (0, -200.0)


def test_logprobs_come_after_bias_and_penalties_and_before_temperature() -> None:
    logits = np.random.default_rng(8).normal(0, 2, (2, 64)).astype(np.float32)
    row: Row = (
        SamplingParams(temperature=0.1, top_k=3, seed=3, logprobs=5, repetition_penalty=1.5, logit_bias={9: 4.0}),
        [1, 2, 9],
        [3],
    )
    output = run(logits.copy(), [row, (SamplingParams(seed=1), [1], [])])
    assert output.logprobs is not None and output.logprobs[1] is None
    entry = output.logprobs[0]
    values = adjusted(logits[0], row, [])
    reference = values - values.max() - np.log(np.exp(values - values.max()).sum())
    assert entry is not None and entry.token_id == output.token_ids[0]
    assert entry.logprob == pytest.approx(reference[entry.token_id], abs=1e-4)
    assert entry.rank == 1 + (values > values[entry.token_id]).sum()
    assert [i for i, _ in entry.top] == np.argsort(-reference)[:5].tolist()
    assert [x for _, x in entry.top] == pytest.approx(np.sort(reference)[::-1][:5].tolist(), abs=1e-4)


def test_no_logprobs_unless_asked() -> None:
    assert (
        run(np.zeros((2, 4)), [(SamplingParams(), [1], []), (SamplingParams(temperature=0.0), [1], [])]).logprobs
        is None
    )
    output = run(np.array([[0.0, 1.0]]), [(SamplingParams(temperature=0.0, logprobs=0), [1], [])])
    assert output.logprobs is not None and output.logprobs[0] is not None
    assert output.logprobs[0].top == []


def test_bad_logits_fail_their_row_only() -> None:
    logits = np.random.default_rng(9).normal(0, 2, (5, 100)).astype(np.float32)
    rows: list[Row] = [(SamplingParams(seed=i, logprobs=1, temperature=i % 2), [1], []) for i in range(5)]
    whole = run(logits.copy(), rows)
    logits[1, 40] = np.nan
    logits[2, 7] = np.inf
    logits[3] = -np.inf
    output = run(logits, rows)
    assert output.failed.tolist() == [False, True, True, True, False]
    assert output.token_ids.tolist() == [whole.token_ids[0], *[FAILED_TOKEN_ID] * 3, whole.token_ids[4]]
    assert output.logprobs is not None and whole.logprobs is not None
    assert output.logprobs == [whole.logprobs[0], None, None, None, whole.logprobs[4]]


def test_padded_embedding_rows_are_never_drawn() -> None:
    logits = np.zeros((2, 12))
    logits[:, 10:] = 50.0
    rows: list[Row] = [(SamplingParams(temperature=0.0, logprobs=12), [1], []), (SamplingParams(seed=1), [1], [])]
    output = run(logits, rows, vocab_size=10)
    assert output.token_ids.max() < 10
    assert output.logprobs is not None and output.logprobs[0] is not None
    assert len(output.logprobs[0].top) == 10
