"""Which block holds which prefix, from the executor's own sight: what a new scheduler is offered.

A hash is erased before the first step that writes its block anew and recorded only after the step
that filled the block has succeeded, so a half-written block is never offered.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quartet.services.executor.block_table import BlockTable
from quartet.shared.block_hash import block_hash

IntArray = npt.NDArray[np.int64]


class _Chain:
    """A row's hash chain: `parent` is the hash of its block number num_hashed - 1 (or the root)."""

    __slots__ = ("first_own", "num_hashed", "parent", "records")

    def __init__(self, root: bytes, first_own: int, records: bool) -> None:
        self.parent = root
        self.num_hashed = 0
        # Blocks before this one were there when the row came: parents, which others have recorded.
        self.first_own = first_own
        self.records = records


class BlockHashes:
    """Hashes by block id in 1..num_blocks, and the chain of each row in the batch."""

    def __init__(self, num_blocks: int, max_num_seqs: int, block_size: int) -> None:
        self._block_size = block_size
        self._hashes: list[bytes] = [b""] * (num_blocks + 1)
        self._known = np.zeros(num_blocks + 1, bool)
        self._chains: dict[int, _Chain] = {}
        self._num_hashed = np.zeros(max_num_seqs, np.int64)

    def start_row(self, req_index: int, hash_root: bytes, num_computed_tokens: int, records: bool = True) -> None:
        """`records`: whether the hashes of blocks that it fills are to be known."""
        self._chains[req_index] = _Chain(hash_root, num_computed_tokens // self._block_size, records)
        self._num_hashed[req_index] = 0

    def clear_rows(self) -> None:
        """All rows leave; what blocks hold stays."""
        self._chains.clear()

    def clear(self) -> None:
        self._chains.clear()
        self._known[:] = False

    def erase_all(self) -> None:
        """Nothing is known of any block, and rows that are there record nothing from now on."""
        self._known[:] = False
        for chain in self._chains.values():
            chain.records = False

    def erase(self, block_ids: IntArray) -> None:
        """Called before these blocks [N] are written."""
        self._known[block_ids] = False

    def record(
        self,
        rows: IntArray,
        num_computed_tokens: IntArray,
        block_table: BlockTable,
        token_ids: npt.NDArray[np.int32],
    ) -> None:
        """Called after a step succeeded: rows [R] now have num_computed_tokens [R] of token_ids
        [max_num_seqs, ...] in KV memory. Either all of their newly full blocks are recorded or none."""
        num_full = num_computed_tokens // self._block_size
        grown = num_full > self._num_hashed[rows]
        if not grown.any():
            return
        filled: list[tuple[int, bytes]] = []
        for req_index, full in zip(rows[grown].tolist(), num_full[grown].tolist(), strict=True):
            chain, size = self._chains[req_index], self._block_size
            if not chain.records:
                continue
            for logical in range(chain.num_hashed, full):
                packed = token_ids[req_index, logical * size : (logical + 1) * size].astype("<u4").tobytes()
                chain.parent = block_hash(chain.parent, packed)
                if logical >= chain.first_own:
                    filled.append((int(block_table.table[req_index, logical]), chain.parent))
            chain.num_hashed = self._num_hashed[req_index] = full
        for block_id, filled_hash in filled:
            self._hashes[block_id] = filled_hash
            self._known[block_id] = True

    def offers(self) -> tuple[bytes, bytes]:
        """(u32 column of block ids, their 32-byte hashes in the same order)."""
        block_ids = np.flatnonzero(self._known)
        return block_ids.astype("<u4").tobytes(), b"".join([self._hashes[i] for i in block_ids.tolist()])
