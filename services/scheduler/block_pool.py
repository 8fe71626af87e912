"""KV blocks: who holds them, which are free, and which full block holds which prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quartet.services.scheduler.free_block_queue import FreeBlockQueue, KVCacheBlock


class BlockPool:
    """Blocks 1..num_blocks. Block 0 is the null block, which is never handed out.

    At most one block carries a given hash; a second block with the same content stays unnamed. `changed` is set
    while somebody wants to know which blocks change, and gets their ids; a reset is not told so.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.changed: set[int] | None = None
        self.reset()

    def reset(self) -> None:
        """All blocks are free and hold nothing known. Tables that still hold blocks are void."""
        self.blocks = [KVCacheBlock(block_id) for block_id in range(self.num_blocks + 1)]
        self.null_block = self.blocks[0]
        self.free_block_queue = FreeBlockQueue(self.blocks[1:])
        self._cached: dict[bytes, KVCacheBlock] = {}

    def adopt(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Resets, then names blocks whose content is known; ids that are not in the pool are left out."""
        self.reset()
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if not 1 <= block_id <= self.num_blocks:
                continue
            block = self.blocks[block_id]
            if block.block_hash is None and block_hash not in self._cached:
                self.cache_block(block, block_hash)
                self.free_block_queue.remove(block)
                self.free_block_queue.append(block)

    @property
    def num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        return self._cached.get(block_hash)

    def get_new_block(self) -> KVCacheBlock:
        """A block for one holder, forgetting what it held; raises IndexError when none is free."""
        block = self.free_block_queue.popleft()
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            block.block_hash = None
        block.ref_cnt = 1
        if self.changed is not None:
            self.changed.add(block.block_id)
        return block

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """One more holder for each; free ones leave the free list and keep their content."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1
        self._note(blocks)

    def free_blocks(self, block_table: Sequence[KVCacheBlock]) -> None:
        """One holder less for each block of a table, its tail first: a chain's end is evicted before
        its start, and a block that holds nothing known before all."""
        for block in reversed(block_table):
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.block_hash is None:
                    self.free_block_queue.appendleft(block)
                else:
                    self.free_block_queue.append(block)
        self._note(block_table)

    def cache_block(self, block: KVCacheBlock, block_hash: bytes, parent_hash: bytes | None = None) -> None:
        """Names a full block, unless another holds the same content."""
        if block.block_hash is None and block_hash not in self._cached:
            block.block_hash = block_hash
            block.parent_hash = parent_hash
            self._cached[block_hash] = block
            if self.changed is not None:
                self.changed.add(block.block_id)

    def name_parents(self, blocks: Sequence[KVCacheBlock]) -> None:
        """They hold a prefix from its beginning on, in order."""
        parent: bytes | None = b""
        for block in blocks:
            block.parent_hash, parent = parent, block.block_hash
        self._note(blocks)

    def forget_hashes(self) -> int:
        """No block is named any more; gives the number of those that were."""
        num_cached = len(self._cached)
        if self.changed is not None:
            self.changed.update(block.block_id for block in self._cached.values())
        for block in self._cached.values():
            block.block_hash = None
        self._cached.clear()
        return num_cached

    def _note(self, blocks: Sequence[KVCacheBlock]) -> None:
        if self.changed is not None:
            self.changed.update([block.block_id for block in blocks])

    def check_invariants(self, block_tables: Iterable[Sequence[KVCacheBlock]]) -> None:
        """Against the tables of all that hold blocks; raises AssertionError."""
        holders = [0] * (self.num_blocks + 1)
        for table in block_tables:
            ids = [block.block_id for block in table]
            assert len(set(ids)) == len(ids), f"a table holds a block twice: {ids}"
            for block in table:
                assert block is self.blocks[block.block_id], f"{block} is of an older pool"
                holders[block.block_id] += 1
        assert holders[0] == 0 and self.null_block.block_hash is None, "the null block is in use"
        free = list(self.free_block_queue)
        assert len(free) == self.num_free_blocks == len({block.block_id for block in free})
        for block in self.blocks[1:]:
            assert block.ref_cnt == holders[block.block_id], f"{block} has {holders[block.block_id]} holders"
            assert (block.next_free is not None) == (block.ref_cnt == 0), f"{block} is leaked"
            if block.block_hash is not None:
                assert self._cached.get(block.block_hash) is block, f"{block} is hashed but not found"
        assert len(self._cached) == sum(block.block_hash is not None for block in self.blocks)
