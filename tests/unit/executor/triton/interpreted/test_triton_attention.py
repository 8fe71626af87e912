"""Attention and cache write by Triton's kernels, against float64, where memory nobody wrote is NaN."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.models.rope import RopeConfig
from quartet.services.executor.triton.backend import TritonAttention
from quartet.services.executor.triton.kv_cache import TritonKVCache
from quartet.services.executor.triton.paged_decode import plan_decode
from quartet.services.executor.triton.tiles import MIN_DECODE_TILES

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN: for outputs, scratch and the cache."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    window: int | None = None

    def config(self) -> ModelConfig:
        return ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=64,
            hidden_size=self.num_heads * self.head_size,
            intermediate_size=64,
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            rms_norm_eps=1e-5,
            rope=RopeConfig(theta=10_000.0),
            max_position_embeddings=4096,
            layer_windows=(self.window,),
        )


# (tokens in this step, context length with them), decodes first.
Row = tuple[int, int]


def make_cache(shape: Shape, num_blocks: int) -> TritonKVCache:
    cache = TritonKVCache(shape.config(), num_blocks, shape.block_size, shape.kv_dtype or shape.dtype, "cpu")
    if cache.keys[0].dtype == FP8:
        for tensor in (cache.keys[0], cache.values[0]):
            tensor.view(torch.uint8).fill_(0x7F)
        cache.key_scales.uniform_(0.01, 0.03)
        cache.value_scales.uniform_(0.01, 0.03)
    assert cache.keys[0].float().isnan().all()
    return cache


def check(shape: Shape, rows: Sequence[Row], seed: int = 0) -> None:
    """Runs the rows as one batch and compares with a plain computation of each."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    block_size, window = shape.block_size, shape.window
    block_counts = [-(-seq_len // block_size) for _, seq_len in rows]
    cache = make_cache(shape, sum(block_counts) + 2)
    free = list(range(1, cache.num_blocks + 1))
    generator.shuffle(free)
    block_tables = torch.zeros((len(rows), max(*block_counts, 1) + 1), dtype=torch.int32)
    stored = []
    for row, (query_len, seq_len) in enumerate(rows):
        # What no query of the row sees is not written, and its blocks are not the row's any more.
        first_seen = 0 if window is None else max(0, seq_len - query_len + 1 - window)
        for index in range(first_seen // block_size, block_counts[row]):
            block_tables[row, index] = free.pop()
        positions = torch.arange(first_seen, seq_len)
        slots = block_tables[row, positions // block_size].long() * block_size + positions % block_size
        # As a slice of a wider product has them.
        heads = torch.randn(len(positions), 1 + 2 * shape.num_kv_heads, shape.head_size).to(shape.dtype)
        cache.write(0, heads[:, 1 : 1 + shape.num_kv_heads], heads[:, -shape.num_kv_heads :], slots)
        stored.append((slots, first_seen))

    starts = [0]
    for query_len, _ in rows:
        starts.append(starts[-1] + query_len)
    num_decodes = next((row for row, (query_len, _) in enumerate(rows) if query_len != 1), len(rows))
    none = torch.empty(0, dtype=torch.int64)
    batch = ForwardBatch(
        token_ids=none,
        positions=none,
        slot_mapping=none,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([seq_len for _, seq_len in rows], dtype=torch.int32),
        block_tables=block_tables,
        num_decodes=num_decodes,
        logits_indices=none,
        query_start_loc_list=starts,
        seq_lens_list=[seq_len for _, seq_len in rows],
    )
    query = torch.randn(starts[-1], shape.num_heads + 2, shape.head_size).to(shape.dtype)[:, : shape.num_heads]
    attention = TritonAttention(shape.config(), cache.keys[0].dtype, len(rows) + 1, "cpu")
    attention.prepare(batch)
    scale = shape.head_size**-0.5
    out = attention.forward(query, 0, cache, batch, scale=scale, sliding_window=window)
    assert out.shape == (starts[-1], shape.num_heads * shape.head_size)
    assert out.dtype == shape.dtype

    group = shape.num_heads // shape.num_kv_heads
    for row, (query_len, seq_len) in enumerate(rows):
        actual = out[starts[row] : starts[row + 1]].view(query_len, shape.num_heads, shape.head_size).double()
        if seq_len == 0:
            assert (actual == 0).all()
            continue
        slots, first_seen = stored[row]
        keys = cache.keys[0].flatten(0, 1)[slots].double() * cache.key_scales[0].double()[:, None]
        values = cache.values[0].flatten(0, 1)[slots].double() * cache.value_scales[0].double()[:, None]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query[starts[row] : starts[row + 1]].double(), keys) * scale
        at = torch.arange(seq_len - query_len, seq_len)[:, None]
        positions = torch.arange(first_seen, seq_len)
        seen = positions <= at
        if window is not None:
            seen &= positions > at - window
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), values)
        torch.testing.assert_close(actual, expected, atol=TOLERANCE[shape.dtype], rtol=1e-2)


def edges(block_size: int) -> list[Row]:
    """Decodes and chunks that end at, before and after block edges; rows with nothing."""
    decodes = [1, block_size - 1, block_size, block_size + 1, 0, 5 * block_size]
    chunks = [(block_size, block_size), (block_size + 1, 2 * block_size), (0, 0), (3, 3), (1, 2 * block_size + 1)]
    return [(1, seq_len) for seq_len in decodes] + chunks


# Each head size and each block size at least once; the others in the long run.
QUICK_SIZES = {(64, 16), (64, 64), (80, 32), (96, 16), (128, 64), (256, 32)}


@pytest.mark.parametrize(
    ("head_size", "block_size"),
    [
        pytest.param(*sizes, marks=[] if sizes in QUICK_SIZES else [pytest.mark.slow])
        for sizes in itertools.product((64, 80, 96, 128, 256), (16, 32, 64))
    ],
)
def test_head_and_block_sizes(head_size: int, block_size: int) -> None:
    check(Shape(head_size=head_size, block_size=block_size), edges(block_size))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, FP8), (torch.float16, FP8)],
)
@pytest.mark.parametrize("window", [None, 20])
def test_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype | None, window: int | None) -> None:
    check(Shape(dtype=dtype, kv_dtype=kv_dtype, window=window), edges(16))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (3, 1), (7, 1), (14, 2), (32, 1), (17, 1)])
def test_groups(num_heads: int, num_kv_heads: int) -> None:
    check(Shape(num_heads=num_heads, num_kv_heads=num_kv_heads), edges(16))


@pytest.mark.parametrize("window", [1, 15, 16, 17, 63, 64, 65, 1000])
def test_window_edges(window: int) -> None:
    rows = [(1, 1), (1, 16), (1, 64), (1, 65), (1, 200), (40, 40), (17, 150), (70, 200), (1, 129)]
    check(Shape(num_heads=2, num_kv_heads=1, window=window), rows)


def test_decodes_alone_and_chunks_alone() -> None:
    check(Shape(), [(1, 17)])
    check(Shape(), [(1, 1)] * 5)
    check(Shape(), [(2, 2)])
    check(Shape(), [(0, 0), (33, 400), (0, 0)])


@pytest.mark.parametrize("others", [pytest.param(0, marks=pytest.mark.slow), 6])
def test_a_long_context_is_split_and_reduced(others: int) -> None:
    check(Shape(), [(1, 20)] * others + [(1, 2900)])
    check(Shape(window=2000, dtype=torch.bfloat16), [(1, 2900)] + [(1, 9)] * others)


def test_a_chunk_of_many_tiles_after_a_computed_prefix() -> None:
    check(Shape(num_heads=8, num_kv_heads=1), [(1, 5), (100, 333), (50, 50)])


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(i, marks=pytest.mark.slow) for i in range(6, 12))])
def test_random_batches(seed: int) -> None:
    generator = random.Random(seed)
    decodes = [(1, generator.choice([0, 1, generator.randrange(1, 40), generator.randrange(1, 300)])) for _ in range(5)]
    chunks = []
    for _ in range(generator.randrange(4)):
        query_len = generator.randrange(2, 60)
        chunks.append((query_len, query_len + generator.choice([0, generator.randrange(100)])))
    num_kv_heads = generator.choice([1, 2])
    shape = Shape(
        num_heads=num_kv_heads * generator.randrange(1, 7),
        num_kv_heads=num_kv_heads,
        head_size=generator.choice([64, 80]),
        block_size=generator.choice([16, 32, 64]),
        window=generator.choice([None, generator.randrange(1, 80)]),
    )
    check(shape, decodes[: generator.randrange(6)] + chunks or [(1, 1)], seed)


def planned(seq_lens: list[int], num_parts: int, window: int, block_n: int) -> list[list[tuple[int, int]]]:
    """The parts [begin, end) of each row, after checks of what the tables say of them."""
    num_rows = len(seq_lens)
    parts = torch.empty((num_parts + num_rows, 4), dtype=torch.int32)
    rows = torch.empty((num_rows, 2), dtype=torch.int32)
    plan_decode(parts, rows, torch.tensor(seq_lens, dtype=torch.int32), num_parts, window, block_n)
    found: list[list[tuple[int, int]]] = [[] for _ in seq_lens]
    num_used = 0
    for row, (first, count) in enumerate(rows.tolist()):
        assert first == num_used
        num_used += count
        for part_row, begin, end, part_count in parts[first : first + count].tolist():
            assert (part_row, part_count) == (row, count)
            found[row].append((begin, end))
    assert (parts[num_used:, 0] == -1).all()
    return found


@pytest.mark.parametrize(
    ("seq_lens", "num_parts", "window"),
    [
        ([0], 4, 1 << 30),
        ([1], 1, 1 << 30),
        ([5000], 8, 1 << 30),
        ([5000], 8, 777),
        ([64 * 40] * 6, 8, 1 << 30),
        ([1, 0, 64, 65, 9000, 17, 0, 640], 16, 1 << 30),
        ([300] * 40 + [9000], 9, 1 << 30),
        pytest.param([300] * 300 + [30_000], 33, 1 << 30, marks=pytest.mark.slow),
    ],
)
def test_a_plan_covers_every_row_in_parts_of_like_size(seq_lens: list[int], num_parts: int, window: int) -> None:
    block_n = 64
    found = planned(seq_lens, num_parts, window, block_n)
    total = sum(-(-min(seq_len, window) // block_n) for seq_len in seq_lens)
    share = max(-(-total // num_parts), MIN_DECODE_TILES)
    for seq_len, parts in zip(seq_lens, found, strict=True):
        assert parts[0][0] == max(0, seq_len - window)
        assert parts[-1][1] == seq_len
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))
        if seq_len:
            assert all(0 < end - begin <= math.ceil(1.5 * share) * block_n for begin, end in parts)


def test_a_write_equals_torch_s() -> None:
    for shape in (Shape(), Shape(dtype=torch.bfloat16, head_size=80, num_heads=3, num_kv_heads=3)):
        cache = make_cache(shape, 4)
        plain = KVCache(shape.config(), 4, 16, shape.dtype, "cpu")
        heads = torch.randn(5, 2 * shape.num_kv_heads, shape.head_size).to(shape.dtype)
        slots = torch.tensor([79, 16, 40, 31, 17])
        for target in (cache, plain):
            target.write(0, heads[:, : shape.num_kv_heads], heads[:, shape.num_kv_heads :], slots)
        for actual, expected in ((cache.keys[0], plain.keys[0]), (cache.values[0], plain.values[0])):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
            assert actual.isnan().sum() == actual.numel() - 5 * shape.num_kv_heads * shape.head_size


def test_a_write_to_8_bits_is_scaled_by_head_and_saturates() -> None:
    shape = Shape(dtype=torch.bfloat16, kv_dtype=FP8)
    cache = make_cache(shape, 2)
    cache.key_scales[0] = torch.tensor([0.5, 2.0])
    key = torch.randn(3, 2, 64).to(torch.bfloat16)
    key[0, 0, 0], key[0, 1, 0], key[1, 0, 0] = 1000.0, -1000.0, math.inf
    cache.write(0, key, key, torch.tensor([16, 33, 20]))
    stored = cache.keys[0].flatten(0, 1)[[16, 33, 20]]
    expected = (key.float() / cache.key_scales[0][:, None]).clamp(-448, 448).to(FP8)
    assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))
    assert stored[0, 0, 0].float() == 448
    assert stored[0, 1, 0].float() == -448


def test_padding_is_not_written() -> None:
    cache = make_cache(Shape(), 2)
    key = torch.ones(4, 2, 64)
    cache.write(0, key, key, torch.tensor([-1, 0, 15, 16]))
    assert cache.keys[0].flatten(0, 1)[:16].isnan().all()
    assert (cache.keys[0].flatten(0, 1)[16] == 1).all()
    cache.write(0, key[:0], key[:0], torch.empty(0, dtype=torch.int64))


def test_slots_beyond_31_bits_of_elements() -> None:
    torch.use_deterministic_algorithms(False)  # nothing of the pool is touched but three blocks
    shape = Shape(num_heads=8, num_kv_heads=8, head_size=256, block_size=64, dtype=torch.float16)
    cache = TritonKVCache(shape.config(), (1 << 31) // (64 * 8 * 256) + 3, 64, torch.float16, "cpu")
    last = cache.num_blocks
    assert last * 64 * 8 * 256 > 1 << 31
    block_tables = torch.tensor([[last - 1, last], [last - 1, last]], dtype=torch.int32)
    key, value = torch.randn(2, 70, 8, 256).half()
    slots = torch.tensor([(last - 1) * 64 + position for position in range(70)])
    cache.write(0, key, value, slots)
    none = torch.empty(0, dtype=torch.int64)
    starts, lens = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([70, 70], dtype=torch.int32)
    batch = ForwardBatch(none, none, none, starts, lens, block_tables, 1, none, [0, 1, 4], [70, 70])
    attention = TritonAttention(shape.config(), torch.float16, 2, "cpu")
    attention.prepare(batch)
    query = torch.randn(1, 8, 256).half().expand(4, 8, 256)
    out = attention.forward(query, 0, cache, batch, scale=1 / 16, sliding_window=None).view(4, 8, 256)
    weights = (torch.einsum("hd,khd->hk", query[0].double(), key.double()) / 16).softmax(-1)
    expected = torch.einsum("hk,khd->hd", weights, value.double())
    torch.testing.assert_close(out[0].double(), expected, atol=3e-3, rtol=1e-2)
    torch.testing.assert_close(out[3].double(), expected, atol=3e-3, rtol=1e-2)


def test_more_rows_than_there_is_scratch_for_are_refused() -> None:
    none = torch.empty(0, dtype=torch.int32)
    batch = ForwardBatch(none, none, none, none, none, none, 2, none, [0, 1, 2], [1, 1])
    with pytest.raises(ValueError, match="2 decode rows"):
        TritonAttention(Shape().config(), torch.float32, 1, "cpu").prepare(batch)


def test_a_batch_that_was_not_prepared_is_refused() -> None:
    none = torch.empty(0, dtype=torch.int32)
    batch = ForwardBatch(none, none, none, none, none, none, 0, none, [0], [])
    attention = TritonAttention(Shape().config(), torch.float32, 1, "cpu")
    with pytest.raises(RuntimeError, match="prepare"):
        attention.forward(torch.empty(0, 4, 64), 0, make_cache(Shape(), 1), batch, scale=1.0, sliding_window=None)
