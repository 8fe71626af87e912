"""KV memory that is taken from the system before a step needs it: the first use of a page clears it, and in a virtual
machine has the host find memory for it, which takes milliseconds for each 2 MiB."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

PIECE_BYTES = 2 << 20


class PoolPages:
    """The pools of all layers, each of as many blocks, whose pages are taken in the order of blocks."""

    def __init__(
        self, pools: Sequence[torch.Tensor], num_blocks: int, ahead_bytes: int, populate: Callable[[int, int], int]
    ) -> None:
        """`ahead_bytes` beyond the blocks that were used, over all layers; 0: nothing is taken. `num_blocks` of each
        pool, and populate(address, num_bytes) says whether it could."""
        self._addresses = [pool.data_ptr() for pool in pools]
        self._pool_bytes = pools[0].nbytes
        self._block_bytes = self._pool_bytes // num_blocks
        self._ahead_bytes = ahead_bytes // len(pools)
        self._populate = populate
        self._next = 0

    def take(self, highest_block: int) -> bool:
        """Takes a piece of one layer; `highest_block` is the last that was ever used. False when all is done."""
        place, layer = divmod(self._next, len(self._addresses))
        start = place * PIECE_BYTES
        end = min((highest_block + 1) * self._block_bytes + self._ahead_bytes, self._pool_bytes)
        if not self._ahead_bytes or start >= end:
            return False
        if not self._populate(self._addresses[layer] + start, min(PIECE_BYTES, self._pool_bytes - start)):
            self._ahead_bytes = 0
            return False
        self._next += 1
        return True
