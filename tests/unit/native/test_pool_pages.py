"""Pages of KV memory that are taken ahead of their use."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from quartet.services.executor.native.library import load_library
from quartet.services.executor.native.pool_pages import PIECE_BYTES, PoolPages

NUM_BLOCKS = 64
BLOCK_BYTES = PIECE_BYTES // 4


class Memory:
    """Pools of two layers, and what of them was asked for."""

    def __init__(self, ahead_bytes: int, works: bool = True) -> None:
        self.pools = [torch.empty(NUM_BLOCKS * BLOCK_BYTES, dtype=torch.uint8) for _ in range(2)]
        self.asked: list[tuple[int, int, int]] = []
        self._works = works
        self.pages = PoolPages(self.pools, NUM_BLOCKS, ahead_bytes, self._populate)

    def _populate(self, address: int, num_bytes: int) -> int:
        for layer, pool in enumerate(self.pools):
            if 0 <= address - pool.data_ptr() < pool.nbytes:
                self.asked.append((layer, address - pool.data_ptr(), num_bytes))
        return int(self._works)

    def take_all(self, highest_block: int) -> int:
        count = 0
        while self.pages.take(highest_block):
            count += 1
            assert count < 1000
        return count


def test_takes_layers_in_turn_and_so_far_beyond_what_was_used() -> None:
    memory = Memory(ahead_bytes=2 * 2 * PIECE_BYTES)
    assert memory.take_all(-1) == 4
    assert memory.asked == [(layer, place * PIECE_BYTES, PIECE_BYTES) for place in range(2) for layer in range(2)]
    # Nothing more until more is used.
    assert memory.take_all(-1) == 0
    # Blocks 0 to 4 reach into the second piece, so two beyond it are the fourth.
    assert memory.take_all(4) == 4
    assert memory.asked[-1] == (1, 3 * PIECE_BYTES, PIECE_BYTES)


def test_ends_with_the_pool() -> None:
    memory = Memory(ahead_bytes=1 << 40)
    assert memory.take_all(0) == 2 * NUM_BLOCKS * BLOCK_BYTES // PIECE_BYTES
    assert all(start + num_bytes <= NUM_BLOCKS * BLOCK_BYTES for _, start, num_bytes in memory.asked)
    assert memory.take_all(NUM_BLOCKS - 1) == 0


def test_takes_nothing_where_told_so_or_the_system_cannot() -> None:
    assert Memory(ahead_bytes=0).take_all(NUM_BLOCKS - 1) == 0
    memory = Memory(ahead_bytes=1 << 40, works=False)
    assert memory.take_all(0) == 0
    assert memory.take_all(0) == 0
    assert len(memory.asked) == 1


def test_pages_are_there_and_what_they_hold_stays() -> None:
    library = load_library()
    assert library is not None
    pool = torch.frombuffer(mmap.mmap(-1, 4 * PIECE_BYTES), dtype=torch.uint8)
    pool[5] = 77
    before = resident_bytes()
    pages = PoolPages([pool], 4, 4 * PIECE_BYTES, library.quartet_populate)
    if not pages.take(0):
        pytest.skip("Linux before 5.14")
    while pages.take(0):
        pass
    assert resident_bytes() - before > 3 * PIECE_BYTES
    assert pool[5] == 77


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
