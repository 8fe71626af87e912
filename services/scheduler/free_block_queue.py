"""Free KV blocks in eviction order: an intrusive doubly linked list, so that a hit leaves it in O(1)."""

from __future__ import annotations

from collections.abc import Iterator


class KVCacheBlock:
    """One block of KV memory. It keeps its hash while free, until it is handed out anew. `parent_hash` is that of the
    prefix one block shorter, b"" where there is none, and of use only with a hash; None: not known."""

    __slots__ = ("block_hash", "block_id", "next_free", "parent_hash", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.parent_hash: bytes | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, hashed={self.block_hash is not None})"


class FreeBlockQueue:
    """The head is evicted first. A block is in it exactly while its links are set."""

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.num_free_blocks = 0
        for block in blocks:
            self.append(block)

    def popleft(self) -> KVCacheBlock:
        """Takes the block that is evicted first; raises IndexError when there is none."""
        block = self._head.next_free
        assert block is not None
        if block is self._tail:
            raise IndexError("no free block")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        before, after = block.prev_free, block.next_free
        assert before is not None and after is not None, f"{block} is not free"
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Makes it the last to be evicted."""
        assert self._tail.prev_free is not None
        self._insert(self._tail.prev_free, block, self._tail)

    def appendleft(self, block: KVCacheBlock) -> None:
        """Makes it the first to be evicted."""
        assert self._head.next_free is not None
        self._insert(self._head, block, self._head.next_free)

    def _insert(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        assert block.next_free is None, f"{block} is free already"
        block.prev_free = before
        block.next_free = after
        before.next_free = block
        after.prev_free = block
        self.num_free_blocks += 1

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free
