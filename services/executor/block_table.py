"""Which physical block holds each logical block of each row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class BlockTable:
    """`table` [max_num_seqs, max_blocks_per_seq] int32, `num_blocks` [max_num_seqs]; unused entries are 0."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks_per_seq = max_blocks_per_seq
        self.table = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)

    def clear(self, rows: IntArray) -> None:
        self.table[rows] = 0
        self.num_blocks[rows] = 0

    def append(self, rows: IntArray, block_ids: IntArray) -> None:
        """Appends block_ids[i] to the table of rows[i]; a row may be named several times. There must be room."""
        if not len(rows):
            return
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        lengths = np.diff(starts, append=len(ordered))
        column = self.num_blocks[ordered] + np.arange(len(ordered)) - np.repeat(starts, lengths)
        self.table[ordered, column] = block_ids[order]
        self.num_blocks[ordered[starts]] += lengths

    def slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Where the KV of rows[i]'s token at positions[i] is: block_id * block_size + offset."""
        logical, offset = np.divmod(positions, self.block_size)
        return self.table[rows, logical].astype(np.int64) * self.block_size + offset

    def rows(self, rows: IntArray, seq_lens: IntArray) -> npt.NDArray[np.int32]:
        """[R, W] the tables of `rows`, as wide as the longest needs, 0 past each row's seq_lens."""
        needed = -(-seq_lens // self.block_size)
        width = int(needed.max())
        return np.where(np.arange(width) < needed[:, None], self.table[rows, :width], 0)
