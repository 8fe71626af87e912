"""Splits decode rows into padded batches whose padding and size stay bounded."""

from __future__ import annotations

from collections.abc import Sequence

# Rows of a group have at least this share of the longest row's blocks.
_MIN_FILL = 0.75
# A group up to this padded size takes shorter rows too: another group's calls cost more than the padding.
_SMALL = 64


def group_by_length(lengths: Sequence[int], max_padded: int) -> list[list[int]]:
    """lengths[i] > 0 is row i's size. Returns groups of row indices, longest rows first; every row is in
    exactly one group, and a group of several rows takes at most max_padded when padded to its longest."""
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        length = lengths[row]
        padded = longest * (len(groups[-1]) + 1) if groups else 0
        if groups and padded <= max_padded and (length >= _MIN_FILL * longest or padded <= _SMALL):
            groups[-1].append(row)
        else:
            groups.append([row])
            longest = length
    return groups
