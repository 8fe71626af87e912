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
    """Memory-bound: deep pipelines of small tiles, so that two or more programs share a processor.

    Two stages of keys and values are in flight while a third is computed with.
    """
    block_n = 32 if padded(head_size) * kv_itemsize > 256 else 64
    return Tile(block_m=max(16, padded(group)), block_n=block_n, num_warps=4, num_stages=3)


def prefill_tile(head_size: int, kv_itemsize: int) -> Tile:
    """Bound by the matrix units: as many rows as registers hold."""
    if kv_itemsize > 2:
        return Tile(block_m=64, block_n=32, num_warps=8, num_stages=2)
    if padded(head_size) > 128:
        return Tile(block_m=128, block_n=32, num_warps=8, num_stages=3)
    return Tile(block_m=128, block_n=64, num_warps=8, num_stages=3)


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
