"""The device's sampler against the CPU's: the same rules, so the same tokens or the same sets of them."""

import itertools

import numpy as np
import pytest
import torch

from quartet.services.executor import sampler
from quartet.services.executor.allowed_tokens import AllowedTokens
from quartet.services.executor.noise import stream_keys
from quartet.services.executor.sampling_rows import SamplingRows
from quartet.services.executor.triton import sampling as kernels
from quartet.services.executor.triton.device_sampler import DeviceSample, DeviceSampler
from quartet.shared.messages import FAILED_TOKEN_ID
from quartet.shared.sampling_params import SamplingParams

torch.set_num_threads(1)

MAX_NUM_SEQS = 8
CPU = torch.device("cpu")


class Rows:
    """The same rows for both samplers."""

    def __init__(self, vocab_size: int, params: list[SamplingParams], prompt=(), outputs=(), eos=()) -> None:
        self.vocab_size = vocab_size
        self.rows = np.array([(5 * i + 2) % MAX_NUM_SEQS for i in range(len(params))])
        self.output_indices = np.full(len(params), len(outputs))
        self.host, self.mirror = SamplingRows(MAX_NUM_SEQS, vocab_size), SamplingRows(MAX_NUM_SEQS, vocab_size)
        for row, param in zip(self.rows.tolist(), params, strict=True):
            for state in (self.host, self.mirror):
                state.add(row, param, list(eos), 0, np.array([*prompt, *outputs], np.int32), len(prompt))
        self.device = DeviceSampler(self.mirror, MAX_NUM_SEQS, CPU)
        self.device.add(self.rows.tolist())

    def on_cpu(self, logits: torch.Tensor) -> sampler.SamplerOutput:
        output = sampler.sample(logits.clone(), self.host, self.rows, self.output_indices)
        self.host.append(self.rows, output.token_ids)
        return output

    def on_device(self, logits: torch.Tensor) -> DeviceSample:
        # A wider product, whose further columns are of no token.
        wide = torch.full((len(logits), self.vocab_size + 3), float("inf"))
        wide[:, : self.vocab_size] = logits
        return self.device.sample(wide, torch.from_numpy(self.rows), torch.from_numpy(self.output_indices), self.rows)

    def limits(self, logits: torch.Tensor) -> torch.Tensor:
        best = torch.empty(len(logits))
        kernels.row_max_kernel[(len(logits),)](
            logits, logits.stride(0), best, torch.empty(len(logits), dtype=torch.int32), self.vocab_size, TILE=256
        )
        return self.device._limits(logits, torch.from_numpy(self.rows), best)


def random_logits(num_rows: int, vocab_size: int, scale: float, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("vocab_size", [1, 2, 300, 5000])
def test_greedy_takes_the_first_of_the_largest(vocab_size: int) -> None:
    rows = Rows(vocab_size, [SamplingParams(temperature=0.0)] * 3)
    logits = random_logits(3, vocab_size, 3.0, vocab_size).round()
    assert rows.on_device(logits).token_ids.tolist() == logits.numpy().argmax(-1).tolist()
    assert rows.device.last_tokens[rows.rows].tolist() == logits.numpy().argmax(-1).tolist()


def test_bias_penalties_and_min_tokens_step_by_step() -> None:
    vocab_size = 1500
    params = [
        SamplingParams(temperature=0.0, logit_bias={7: 5.0, 1499: -100.0, 9999: 1.0}),
        SamplingParams(temperature=0.0, repetition_penalty=1.8),
        SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.7),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=[3, 4]),
        SamplingParams(
            temperature=0.0, repetition_penalty=0.5, frequency_penalty=-2.0, logit_bias={3: 9.0}, min_tokens=5
        ),
    ]
    rows = Rows(vocab_size, params, prompt=[3, 4, 5, 5], outputs=[5, 8, 8, 1499], eos=[2])
    for step in range(5):
        # Stop tokens and those already met are the likeliest, so that every rule decides somewhere.
        logits = random_logits(len(params), vocab_size, 1.0, step)
        logits[:, [2, 3, 4, 5, 8, 1499]] += 4.0
        expected = rows.on_cpu(logits).token_ids
        assert rows.on_device(logits).token_ids.tolist() == expected.tolist()
        rows.output_indices += 1


def kept_on_cpu(logits: torch.Tensor, rows: Rows) -> list[set[int]]:
    """The sets that the CPU's sampler draws from."""
    best = logits.max(-1).values
    scaled = (logits - best[:, None]) / torch.from_numpy(rows.host.temperature[rows.rows])[:, None]
    scaled.clamp_(min=-80.0)
    weights = torch.where(scaled > -79.0, scaled.exp(), 0.0)
    threshold = sampler._threshold(scaled, weights, rows.host, rows.rows)
    assert threshold is not None
    return [
        set(torch.nonzero((scaled[i] >= limit) & (weights[i] > 0))[:, 0].tolist()) for i, limit in enumerate(threshold)
    ]


def kept_on_device(logits: torch.Tensor, rows: Rows) -> list[set[int]]:
    limits = rows.limits(logits)
    distance = (logits.max(-1).values[:, None] - logits) / torch.from_numpy(rows.host.temperature[rows.rows])[:, None]
    return [
        set(torch.nonzero((distance[i] <= limits[i]) & (distance[i] < 79.0))[:, 0].tolist()) for i in range(len(logits))
    ]


TRUNCATIONS = [
    SamplingParams(top_k=1),
    SamplingParams(top_k=40),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_k=50, top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=0.02, top_k=100, top_p=0.95, temperature=0.7),
    SamplingParams(top_p=0.97, temperature=1.7),
]


@pytest.mark.parametrize(
    ("vocab_size", "scale"),
    [
        *itertools.product((2, 700), (0.05, 1.0, 4.0, 60.0)),
        (9000, 0.05),
        (9000, 4.0),
        pytest.param(9000, 1.0, marks=pytest.mark.slow),
        pytest.param(9000, 60.0, marks=pytest.mark.slow),
    ],
)
def test_truncation_keeps_the_same_tokens(vocab_size: int, scale: float) -> None:
    rows = Rows(vocab_size, TRUNCATIONS)
    logits = random_logits(len(TRUNCATIONS), vocab_size, scale, vocab_size)
    for place, (device, cpu) in enumerate(zip(kept_on_device(logits, rows), kept_on_cpu(logits, rows), strict=True)):
        # Sums are rounded otherwise: a token at top_p's very edge may fall on either side.
        near = 0 if TRUNCATIONS[place].top_p == 1.0 else 1 + len(cpu) // 1000
        assert len(device ^ cpu) <= near, (place, len(device), len(cpu))


def test_ties_at_the_edge_all_stay() -> None:
    rows = Rows(3000, [SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(top_k=2, top_p=0.3)])
    logits = torch.zeros(3, 3000)
    logits[:, :2] = 1.0
    logits[1, :2] = 9.0
    assert [len(kept) for kept in kept_on_device(logits, rows)] == [3000, 2, 2]
    assert kept_on_device(logits, rows) == kept_on_cpu(logits, rows)


def test_masked_tokens_are_never_drawn() -> None:
    rows = Rows(900, [SamplingParams(), SamplingParams(top_k=500), SamplingParams(top_p=0.999)])
    logits = torch.full((3, 900), float("-inf"))
    logits[:, [17, 400]] = 0.0
    for index in range(6):
        rows.output_indices[:] = index
        assert set(rows.on_device(logits).token_ids.tolist()) <= {17, 400}


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5, top_k=9)]
)
def test_a_row_that_is_not_finite_fails_alone(params: SamplingParams) -> None:
    rows = Rows(500, [params] * 5)
    logits = random_logits(5, 500, 1.0, 0)
    expected = rows.on_device(logits).token_ids.tolist()
    logits[0, 499] = float("nan")
    logits[1, 3] = float("inf")
    logits[3] = float("-inf")
    assert rows.on_cpu(logits).failed.tolist() == [True, True, False, True, False]
    got = rows.on_device(logits).token_ids.tolist()
    assert got == [-1, -1, expected[2], -1, expected[4]]
    assert np.array(got, np.int32).view(np.uint32)[0] == FAILED_TOKEN_ID
    assert rows.device.last_tokens[rows.rows].tolist() == [0, 0, expected[2], 0, expected[4]]


def gumbel_scores(logits: np.ndarray, seed: int, indices: np.ndarray, choice: int = 0) -> np.ndarray:
    """What the kernel takes the largest of, in numpy and float64: logits [V], output indices [N] -> [N, V]."""

    def mix(z):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    gamma = np.uint64(0x9E3779B97F4A7C15)
    key = stream_keys(np.array([seed], np.uint64), np.array([choice], np.uint64))
    keys = mix((key ^ indices.astype(np.uint64)) + gamma)[:, None]
    bits = mix((keys ^ np.arange(len(logits), dtype=np.uint64)) + gamma) >> np.uint64(32)
    return logits - np.log(-np.log1p(-np.minimum((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)))


DRAWN = [
    SamplingParams(seed=0),
    SamplingParams(seed=2**63 - 1, temperature=0.8),
    SamplingParams(seed=5, top_k=5),
    SamplingParams(seed=6, top_p=0.7),
    SamplingParams(seed=7, min_p=0.2, temperature=3.0),
]


def test_draws_are_a_function_of_seed_choice_and_index() -> None:
    rows = Rows(1100, DRAWN)
    for index in (0, 1, 77):
        rows.output_indices[:] = index
        logits = random_logits(len(DRAWN), 1100, 2.0, index)
        got = rows.on_device(logits).token_ids.tolist()
        for place, params in enumerate(DRAWN):
            scores = gumbel_scores(logits[place].double().numpy() / params.temperature, params.seed, np.array([index]))
            if place > 1:
                kept = list(kept_on_cpu(logits, rows)[place])
                scores[0, np.setdiff1d(np.arange(1100), kept)] = -np.inf
            assert got[place] == scores[0].argmax(), (index, params)
        alone = DeviceSampler(rows.mirror, MAX_NUM_SEQS, CPU)
        one = slice(3, 4)
        alone.add(rows.rows[one].tolist())
        columns = [torch.from_numpy(x[one]) for x in (rows.rows, rows.output_indices)]
        assert alone.sample(logits[one].clone(), *columns, rows.rows[one]).token_ids.tolist() == got[one]


def test_law_of_the_draws() -> None:
    """A chi-square test of the definition that the kernel was just compared with."""
    logits = random_logits(1, 12, 1.5, 3)[0].double()
    num_draws = 200_000
    observed = np.bincount(gumbel_scores(logits.numpy(), 11, np.arange(num_draws)).argmax(-1), minlength=12)
    expected = logits.softmax(-1).numpy() * num_draws
    statistic = ((observed - expected) ** 2 / expected).sum()
    # The 99.9th percentile of chi-square with 11 degrees of freedom.
    assert statistic < 31.26


def test_logprobs_are_those_of_the_cpu() -> None:
    params = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=0, logit_bias={4: 3.0}),
    ]
    rows = Rows(64, params)
    logits = random_logits(3, 64, 1.0, 5)
    expected = rows.on_cpu(logits)
    sample = rows.on_device(logits)
    assert sample.logprobs is not None and expected.logprobs is not None
    assert sample.wanted.tolist() == [True, False, True]
    for i, entry in enumerate(e for e in expected.logprobs if e is not None):
        assert sample.logprobs.logprobs[i].item() == pytest.approx(entry.logprob, abs=1e-5)
        assert sample.logprobs.ranks[i].item() == entry.rank
        num_top = len(entry.top)
        assert sample.logprobs.top_ids[i, :num_top].tolist() == [token_id for token_id, _ in entry.top]


def test_rows_that_follow_a_grammar_draw_what_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(50, [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logit_bias={9: 100.0})])
    bits = np.packbits(np.isin(np.arange(50), [3, 30])[None], axis=-1, bitorder="little")
    monkeypatch.setattr(rows.mirror.structured, "allowed", lambda _: AllowedTokens(np.array([1]), bits))
    logits = torch.arange(50.0).repeat(2, 1)
    assert rows.on_device(logits).token_ids.tolist() == [49, 30]


def test_a_row_s_successor_starts_anew() -> None:
    rows = Rows(50, [SamplingParams(temperature=0.0, logit_bias={9: 100.0})])
    logits = torch.zeros(1, 50)
    assert rows.on_device(logits).token_ids.tolist() == [9]
    row = int(rows.rows[0])
    rows.mirror.add(row, SamplingParams(temperature=0.0, presence_penalty=1.0), [], 0, np.array([1], np.int32), 1)
    rows.device.add([row])
    assert rows.on_device(logits).token_ids.tolist() == [0]
    assert rows.on_device(logits).token_ids.tolist() == [1]
    rows.mirror.remove([row])
    rows.device.remove([row])
    rows.mirror.add(row, SamplingParams(temperature=0.0), [], 0, np.array([1], np.int32), 1)
    rows.device.add([row])
    assert [rows.on_device(logits).token_ids.tolist() for _ in range(2)] == [[0], [0]]
