"""Sizes of tiles and launches, by shape. One place, so that what is launched is what is compiled in tests."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_SIZES = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64)
# Query heads per KV head: they share the rows of one tile.
MAX_GROUP = 32


@dataclass(frozen=True)
class Tile:
    """block_m  rows of a tile of queries (tokens x heads of a group)
    block_n  positions of a tile of keys
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """The power of two that a Triton tile needs."""
    return 1 << (size - 1).bit_length()


def decode_tile(head_size: int, group: int, kv_itemsize: int) -> Tile:
    """Memory-bound: two stages of keys and values are in flight while a third is computed with, in tiles
    so small that two or more programs share a processor."""
    wide = padded(head_size) > 128
    return Tile(
        block_m=max(16, padded(group)),
        block_n=32 if wide or kv_itemsize > 2 else 64,
        # Of 8 warps wide heads of fp8 would spill.
        num_warps=8 if kv_itemsize == 1 and 64 < head_size <= 128 else 4,
        num_stages=3,
    )


def prefill_tile(head_size: int, kv_itemsize: int, capability: int) -> Tile:
    """Bound by the matrix units: as many rows and keys as fit in registers (no configuration may spill).
    Hopper's units and later ones read keys and values from shared memory; before, they took registers too."""
    wide = padded(head_size) > 128
    few_rows = kv_itemsize > 2 or (capability < 90 and head_size > 64) or (wide and kv_itemsize == 1)
    block_n = 32 if wide or kv_itemsize > 2 else 128 if capability >= 100 and head_size == 64 else 64
    return Tile(block_m=64 if few_rows else 128, block_n=block_n, num_warps=8, num_stages=3)


# A part of a decode row is not worth a program of its own below this many tiles of keys.
MIN_DECODE_TILES = 2
# Programs that a processor should have to choose from, so that unequal ones even out.
_PROGRAMS_PER_PROCESSOR = 4


def decode_parts(num_kv_heads: int, num_processors: int) -> int:
    """Into how many equal parts (per KV head) the keys of all decode rows together are cut.

    A batch has at most this many parts plus one per row, whatever its lengths: a fixed grid can take any
    batch of so many rows. Long rows get more parts than short ones; with more rows than parts, only
    those that are longer than most are cut.
    """
    return max(1, -(-_PROGRAMS_PER_PROCESSOR * num_processors // num_kv_heads))
