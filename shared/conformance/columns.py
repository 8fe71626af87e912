"""Packed columns of plans and results."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence


def pack_u16(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}H", *values)


def pack_u32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def unpack_u16(column: bytes) -> list[int]:
    """Raises struct.error when the column is cut short."""
    return list(struct.unpack(f"<{len(column) / 2:g}H", column))


def unpack_u32(column: bytes) -> list[int]:
    """Raises struct.error when the column is cut short."""
    return list(struct.unpack(f"<{len(column) / 4:g}I", column))


def pack_bits(rows: Iterable[int]) -> bytes:
    """Bit r & 7 of byte r >> 3 is set for each row."""
    rows = list(rows)
    bits = bytearray(max(rows, default=-8) // 8 + 1)
    for row in rows:
        bits[row >> 3] |= 1 << (row & 7)
    return bytes(bits)


def unpack_bits(column: bytes) -> list[int]:
    return [8 * i + bit for i, byte in enumerate(column) for bit in range(8) if byte >> bit & 1]
