"""Block tables: which blocks a request holds, and which of them others may share."""

from __future__ import annotations

from collections.abc import Iterable

from quartet.services.scheduler.block_pool import BlockPool
from quartet.services.scheduler.free_block_queue import KVCacheBlock
from quartet.services.scheduler.request import NEVER, Request


class KVCacheManager:
    """Hands slots to requests. A block is named only after the step that filled it has returned, so a
    failed step never leaves a wrong hash, and a token in flight is never hashed."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """The leading full blocks that are in KV memory. The last token is left to compute: something
        has to be sampled from. Stops at the first missing block."""
        reads = self.enable_prefix_caching and request.group.read_prefix_cache
        if not reads or request.wants_prompt_logprobs:
            return []
        found: list[KVCacheBlock] = []
        num_blocks = (len(request.token_ids) - 1) // self.block_size
        for block_hash in request.hashes(num_blocks, self.block_size)[:num_blocks]:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_blocks_needed(self, request: Request, computed_blocks: list[KVCacheBlock]) -> int:
        """Free blocks that all its known tokens take, hits that are free now included."""
        num_held = sum(block.ref_cnt > 0 for block in computed_blocks)
        return self.blocks_for(len(request.token_ids)) - num_held

    def take_computed_blocks(self, request: Request, computed_blocks: list[KVCacheBlock]) -> None:
        """Gives the hits to a request that enters the batch."""
        assert not request.blocks
        self.pool.touch(computed_blocks)
        if computed_blocks and computed_blocks[-1].parent_hash is None:
            # Blocks that an executor has offered: only their hashes were known.
            self.pool.name_parents(computed_blocks)
        request.blocks = list(computed_blocks)
        request.num_hashed_blocks = len(computed_blocks)
        request.num_computed_tokens = len(computed_blocks) * self.block_size
        request.names_blocks = self.enable_prefix_caching and request.group.write_prefix_cache
        request.hash_edge = request.num_computed_tokens + self.block_size if request.names_blocks else NEVER

    def allocate_slots(self, request: Request, num_tokens: int) -> list[KVCacheBlock]:
        """Appends new blocks until positions below num_tokens have a slot, or no block is free."""
        new_blocks = []
        for _ in range(self.blocks_for(num_tokens) - len(request.blocks)):
            if not self.pool.num_free_blocks:
                break
            new_blocks.append(self.pool.get_new_block())
        request.blocks.extend(new_blocks)
        return new_blocks

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Names the blocks that hold the first num_tokens tokens, whose steps have all returned."""
        if not request.names_blocks:
            return
        num_full = num_tokens // self.block_size
        hashes = request.hashes(num_full, self.block_size)
        for i in range(request.num_hashed_blocks, num_full):
            self.pool.cache_block(request.blocks[i], hashes[i], hashes[i - 1] if i else b"")
        request.num_hashed_blocks = num_full
        request.hash_edge = (num_full + 1) * self.block_size

    def forget_prefixes(self, running: Iterable[Request]) -> int:
        """No block is found any more. What runs keeps its blocks, and names none of what it computed them from.
        Gives the number of blocks that were named."""
        for request in running:
            request.names_blocks = False
            request.hash_edge = NEVER
        return self.pool.forget_hashes()

    def free(self, request: Request) -> None:
        """Takes all its blocks; those that are named stay to be hit until they are reused."""
        self.pool.free_blocks(request.blocks)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """The request's table is void: the pool it came from has been reset, or its blocks are freed."""
        request.blocks = []
        request.num_computed_tokens = 0
        request.num_hashed_blocks = 0
        request.hash_edge = NEVER
