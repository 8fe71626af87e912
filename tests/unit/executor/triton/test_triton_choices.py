"""What the host decides before a launch: refusals, tiles and the split of decodes."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="the GPU kernels need triton")

from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.models.rope import RopeConfig
from quartet.services.executor.triton.backend import why_not
from quartet.services.executor.triton.paged_prefill import num_prefill_tiles
from quartet.services.executor.triton.registry import kernel_specs
from quartet.services.executor.triton.tiles import BLOCK_SIZES, HEAD_SIZES, MAX_GROUP, Tile, decode_parts, decode_tile

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=1,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500_000.0),
    max_position_embeddings=131_072,
    layer_windows=(None,),
)


def test_what_is_supported_is_not_refused() -> None:
    for head_size in HEAD_SIZES:
        for block_size in BLOCK_SIZES:
            config = dataclasses.replace(LLAMA, head_size=head_size)
            for dtype in (torch.bfloat16, torch.float16):
                assert why_not(config, block_size, dtype, capability=80) is None
                assert why_not(config, block_size, dtype, FP8, capability=90) is None
    assert why_not(LLAMA, 16, torch.float32) is None


@pytest.mark.parametrize(
    ("changes", "block_size", "dtype", "kv_dtype", "capability", "reason"),
    [
        ({"head_size": 72}, 16, BF16, None, 90, "head sizes 64, 80, 96, 128, 256, not 72"),
        ({}, 8, BF16, None, 90, "block sizes 16, 32, 64, not 8"),
        ({"num_heads": 64, "num_kv_heads": 1}, 16, BF16, None, 90, "up to 32 query heads per KV head, not 64"),
        ({}, 16, torch.float64, None, None, "not float64"),
        ({}, 16, torch.float32, None, 90, "on a GPU, not float32"),
        ({}, 16, BF16, torch.float16, 90, "KV memory in bfloat16 or float8_e4m3fn here, not float16"),
        ({}, 16, BF16, None, 75, "compute capability 8.0 or more, not 7.5"),
        ({}, 16, BF16, FP8, 80, "compute capability 8.9 or more, not 8.0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    changes: dict[str, int],
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    capability: int | None,
    reason: str,
) -> None:
    refusal = why_not(dataclasses.replace(LLAMA, **changes), block_size, dtype, kv_dtype, capability)
    assert refusal is not None
    assert reason in refusal


def test_more_processors_get_more_parts_and_more_heads_share_them() -> None:
    assert decode_parts(num_kv_heads=8, num_processors=132) == 66
    assert decode_parts(num_kv_heads=1, num_processors=132) == 528
    assert decode_parts(num_kv_heads=32, num_processors=132) == 17
    assert decode_parts(num_kv_heads=1024, num_processors=16) == 1


def test_a_group_fits_the_rows_of_a_decode_tile() -> None:
    for group in range(1, MAX_GROUP + 1):
        assert group <= decode_tile(128, group, 2).block_m <= max(16, 2 * group)


def test_a_launch_has_room_for_every_tile_of_every_chunk() -> None:
    tile = Tile(block_m=128, block_n=64, num_warps=8, num_stages=3)
    for group in (1, 3, 4, 7, 32):
        queries = 128 // group
        for lengths in ([1], [queries], [queries + 1], [0, 0], [0, 5, 3 * queries, queries - 1, 1]):
            # Row r's tiles are numbered from sum(lengths before) // queries + r on.
            starts = [sum(lengths[:row]) // queries + row for row in range(len(lengths) + 1)]
            for row, length in enumerate(lengths):
                assert starts[row] + -(-length // queries) <= starts[row + 1]
            assert starts[-1] == num_prefill_tiles(sum(lengths), len(lengths), group, tile)


def test_kernels_have_names_of_their_own() -> None:
    names = [spec.name for spec in kernel_specs()]
    assert len(set(names)) == len(names)
