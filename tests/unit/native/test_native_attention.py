"""The compiled attention against float64, over a shuffled cache that is NaN wherever nothing was written."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from quartet.services.executor.native.library import Isa, load_library

NAN = float("nan")


@dataclass(frozen=True)
class Shape:
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    window: int = 0


@dataclass
class Case:
    """Rows of (context before this step, tokens of this step), all keys and values by row [length, KV heads, size]."""

    shape: Shape
    rows: list[tuple[int, int]]
    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_case(shape: Shape, rows: list[tuple[int, int]], seed: int = 0, sharpness: float = 2.0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(num_tokens: int, num_heads: int, factor: float = 1.0) -> torch.Tensor:
        return (factor * torch.randn(num_tokens, num_heads, shape.head_size, generator=generator)).bfloat16()

    query = draw(sum(new for _, new in rows), shape.num_heads, sharpness)
    keys = [draw(before + new, shape.num_kv_heads) for before, new in rows]
    return Case(shape, rows, query, keys, [draw(before + new, shape.num_kv_heads) for before, new in rows])


def attend(isa: Isa, case: Case, num_threads: int = 2, seed: int = 0) -> torch.Tensor:
    """[T, num_heads, head_size] float64; what is before a row's new tokens gets into the cache first."""
    library = load_library()
    assert library is not None
    shape, rows = case.shape, case.rows
    size = shape.block_size
    counts = [-(-(before + new) // size) for before, new in rows]
    ids = list(range(1, sum(counts) + 1))
    random.Random(seed).shuffle(ids)
    # Padding is the null block, whose memory is NaN too.
    tables = torch.zeros(len(rows), max(counts) + 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([ids.pop() for _ in range(count)])
    kv_pool = torch.full((2, sum(counts) + 1, size, shape.num_kv_heads, shape.head_size), NAN).bfloat16()
    out = torch.full((case.query.shape[0] + 2, shape.num_heads, shape.head_size), NAN).bfloat16()

    def run(starts: list[int], ends: list[int], query: torch.Tensor, target: torch.Tensor) -> None:
        spans = [range(start, end) for start, end in zip(starts, ends, strict=True)]
        locations = torch.tensor([0, *[len(span) for span in spans]]).cumsum(0).int()
        slots = [int(tables[r, p // size]) * size + p % size for r, span in enumerate(spans) for p in span]
        key, value = (
            torch.cat([part[start:end] for part, start, end in zip(parts, starts, ends, strict=True)])
            for parts in (case.keys, case.values)
        )
        slot_mapping, seq_lens = torch.tensor(slots), torch.tensor(ends, dtype=torch.int32)
        assert library.quartet_attend(
            int(isa),
            num_threads,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_size,
            size,
            shape.window,
            len(starts),
            locations.data_ptr(),
            seq_lens.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            slot_mapping.data_ptr(),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            kv_pool.data_ptr(),
            target.data_ptr(),
        )

    befores = [before for before, _ in rows]
    if any(befores):
        earlier = torch.zeros(sum(befores), shape.num_heads, shape.head_size).bfloat16()
        run([0] * len(rows), befores, earlier, torch.empty_like(earlier))
    run(befores, [sum(row) for row in rows], case.query, out[1:])
    assert out[0].isnan().all() and out[-1].isnan().all()
    return out[1:-1].double()


def exact(case: Case) -> torch.Tensor:
    shape, outputs, token = case.shape, [], 0
    repeat = shape.num_heads // shape.num_kv_heads
    for (before, new), key, value in zip(case.rows, case.keys, case.values, strict=True):
        query = case.query[token : token + new].double()
        token += new
        key, value = (part.double().repeat_interleave(repeat, 1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / shape.head_size**0.5
        at, to = torch.arange(before, before + new)[:, None], torch.arange(before + new)[None]
        hidden = to > at
        if shape.window:
            hidden |= to <= at - shape.window
        weights = scores.masked_fill(hidden, -float("inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(outputs)


def check(isa: Isa, case: Case) -> None:
    found, expected = attend(isa, case), exact(case)
    assert found.isfinite().all()
    # Weights and results are rounded to bfloat16, 2^-9 of each.
    error = (found - expected).abs().amax(-1) / expected.square().mean(-1).sqrt()
    assert float(error.max()) < 0.03, (case.shape, case.rows, float(error.max()))


EDGES = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257]


@pytest.mark.parametrize("head_size", [32, 64, 96])
def test_decodes_around_the_edges_of_pages_and_splits(isa: Isa, head_size: int) -> None:
    check(isa, make_case(Shape(head_size=head_size), [(length - 1, 1) for length in EDGES]))


@pytest.mark.parametrize("before", [0, 1, 15, 16, 17, 120, 300])
def test_prompts_of_all_kinds_of_lengths(isa: Isa, before: int) -> None:
    check(isa, make_case(Shape(), [(before, new) for new in (1, 2, 5, 6, 15, 16, 17, 21, 22, 64, 65)], seed=before))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 100, 128, 129, 4096])
def test_windows(isa: Isa, window: int) -> None:
    rows = [(0, 1), (16, 1), (127, 1), (128, 1), (300, 1), (0, 40), (90, 50), (2100, 30)]
    check(isa, make_case(Shape(window=window), rows, seed=window))


def test_prompts_whose_keys_are_split(isa: Isa) -> None:
    check(isa, make_case(Shape(num_heads=3, num_kv_heads=1), [(2040, 1), (2040, 30), (0, 2100), (4080, 20)]))


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(isa: Isa, seed: int) -> None:
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 2, 3, 4, 5, 8])
    shape = Shape(
        num_heads=num_kv_heads * rng.choice([1, 2, 3, 4, 7, 16, 20, 70]),
        num_kv_heads=num_kv_heads,
        head_size=rng.choice([32, 64, 96, 128, 256]),
        block_size=rng.choice([16, 32, 64]),
        window=rng.choice([0, 0, 33, 500]),
    )
    decodes = [(rng.randrange(700), 1) for _ in range(rng.randrange(4))]
    prompts = [(rng.randrange(200), rng.randrange(1, 80)) for _ in range(2)]
    check(isa, make_case(shape, decodes + prompts, seed))


@pytest.mark.parametrize("rows", [[(200, 1)], [(100, 40)]])
def test_weights_that_differ_by_many_powers_of_two(isa: Isa, rows: list[tuple[int, int]]) -> None:
    check(isa, make_case(Shape(), rows, sharpness=100.0))


def test_neither_neighbours_nor_threads_nor_blocks_change_a_row(isa: Isa) -> None:
    shape = Shape(num_heads=9, num_kv_heads=3)
    rows = [(0, 1), (130, 1), (1000, 1), (40, 25), (2100, 3)]
    case = make_case(shape, rows)
    together = attend(isa, case)
    for num_threads, seed in [(1, 1), (3, 2), (8, 3)]:
        assert torch.equal(together, attend(isa, case, num_threads, seed))
    token = 0
    for row, (_, new) in enumerate(rows):
        query = case.query[token : token + new].contiguous()
        alone = attend(isa, Case(shape, [rows[row]], query, [case.keys[row]], [case.values[row]]))
        assert torch.equal(together[token : token + new], alone)
        token += new


def test_what_is_not_a_number_stays_so_in_its_row(isa: Isa) -> None:
    case = make_case(Shape(num_heads=2, num_kv_heads=1), [(150, 1), (200, 1), (30, 20)])
    expected = attend(isa, case)
    case.keys[1][170, 0, 3] = NAN
    found = attend(isa, case)
    assert found[1].isnan().all()
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2:], expected[2:])
