"""Which physical block holds each logical block of each row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class BlockTable:
    """`table` [max_num_seqs, max_blocks_per_seq] int32, `num_blocks` [max_num_seqs]; unused entries are 0. `highest`
    is the largest id that was ever appended."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks_per_seq = max_blocks_per_seq
        self.table = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.highest = 0
        # What a copy elsewhere has not been told yet, where there is one: see `follow`.
        self._appended: list[tuple[IntArray, IntArray]] | None = None

    def follow(self) -> None:
        """From here on `take_appended` tells what is appended."""
        self._appended = []

    def take_appended(self) -> tuple[IntArray, IntArray]:
        """([N] places in the flat table, [N] their block ids) appended since the last call. Places that were
        cleared are not told: what is beyond a row's blocks is never read."""
        appended = self._appended or []
        self._appended = []
        if len(appended) == 1:
            return appended[0]
        none = np.zeros(0, np.int64)
        places, block_ids = zip(*appended, strict=True) if appended else ([none], [none])
        return np.concatenate(places), np.concatenate(block_ids)

    def clear(self, rows: IntArray) -> None:
        self.table[rows] = 0
        self.num_blocks[rows] = 0

    def append(self, rows: IntArray, block_ids: IntArray) -> None:
        """Appends block_ids[i] to the table of rows[i]; a row may be named several times. There must be room."""
        if not len(rows):
            return
        self.highest = max(self.highest, int(block_ids.max()))
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        lengths = np.diff(starts, append=len(ordered))
        column = self.num_blocks[ordered] + np.arange(len(ordered)) - np.repeat(starts, lengths)
        self.table[ordered, column] = block_ids[order]
        self.num_blocks[ordered[starts]] += lengths
        if self._appended is not None:
            self._appended.append((ordered * self.max_blocks_per_seq + column, block_ids[order]))

    def slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Where the KV of rows[i]'s token at positions[i] is: block_id * block_size + offset."""
        logical, offset = np.divmod(positions, self.block_size)
        return self.table[rows, logical].astype(np.int64) * self.block_size + offset

    def rows(self, rows: IntArray, seq_lens: IntArray) -> npt.NDArray[np.int32]:
        """[R, W] the tables of `rows`, as wide as the longest needs, 0 past each row's seq_lens."""
        needed = -(-seq_lens // self.block_size)
        width = int(needed.max())
        if len(rows) == 1:
            return self.table[rows, :width]
        return np.where(np.arange(width) < needed[:, None], self.table[rows, :width], 0)
