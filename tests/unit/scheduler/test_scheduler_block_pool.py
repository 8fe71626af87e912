"""Free list order, hashes that outlive their holders, adoption of an executor's blocks."""

from __future__ import annotations

import pytest

from quartet.services.scheduler.block_pool import BlockPool


def take(pool: BlockPool, n: int) -> list:
    return [pool.get_new_block() for _ in range(n)]


def free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_block_queue]


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(3)
    assert [block.block_id for block in take(pool, 3)] == [1, 2, 3]
    with pytest.raises(IndexError):
        pool.get_new_block()


def test_a_chain_is_evicted_from_its_end_and_unnamed_blocks_first() -> None:
    pool = BlockPool(5)
    table = take(pool, 4)
    for block, name in zip(table[:3], (b"a", b"b", b"c"), strict=True):
        pool.cache_block(block, name)
    pool.free_blocks(table)
    assert free_ids(pool) == [4, 5, 3, 2, 1]
    pool.check_invariants([])


def test_least_recently_used_goes_first() -> None:
    pool = BlockPool(3)
    one, two, three = take(pool, 3)
    for block, name in ((one, b"1"), (two, b"2"), (three, b"3")):
        pool.cache_block(block, name)
        pool.free_blocks([block])
    pool.touch([one])
    pool.free_blocks([one])
    assert free_ids(pool) == [2, 3, 1]
    assert pool.get_new_block() is two
    assert pool.get_cached_block(b"2") is None and pool.get_cached_block(b"3") is three


def test_a_hit_leaves_the_middle_of_the_free_list() -> None:
    pool = BlockPool(4)
    table = take(pool, 3)
    pool.cache_block(table[1], b"m")
    pool.free_blocks(table)
    hit = pool.get_cached_block(b"m")
    assert hit is table[1]
    pool.touch([hit])
    pool.touch([hit])
    assert hit.block_id not in free_ids(pool) and pool.num_free_blocks == 3
    pool.check_invariants([[hit], [hit]])
    pool.free_blocks([hit])
    assert pool.num_free_blocks == 3
    pool.free_blocks([hit])
    assert pool.num_free_blocks == 4


def test_a_second_block_of_the_same_content_stays_unnamed() -> None:
    pool = BlockPool(2)
    first, second = take(pool, 2)
    pool.cache_block(first, b"x")
    pool.cache_block(second, b"x")
    assert pool.get_cached_block(b"x") is first and second.block_hash is None
    pool.free_blocks([second])
    assert pool.get_new_block() is second
    assert pool.get_cached_block(b"x") is first


def test_adopted_blocks_are_hit_and_evicted_last() -> None:
    pool = BlockPool(4)
    take(pool, 4)
    pool.adopt([2, 1, 9, 0, 3], [b"a", b"b", b"c", b"d", b"a"])
    assert pool.num_free_blocks == 4 and pool.num_cached_blocks == 2
    assert free_ids(pool) == [3, 4, 2, 1]
    hit = pool.get_cached_block(b"a")
    assert hit is not None and hit.block_id == 2
    pool.check_invariants([])


def test_a_leak_is_found() -> None:
    pool = BlockPool(2)
    block = pool.get_new_block()
    with pytest.raises(AssertionError):
        pool.check_invariants([])
    pool.check_invariants([[block]])
