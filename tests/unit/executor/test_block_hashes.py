import numpy as np
import pytest

from quartet.services.executor.block_hashes import BlockHashes
from quartet.services.executor.block_table import BlockTable
from quartet.shared.block_hash import block_hash, hash_root, pack_token_ids

SIZE = 4
ROOT = hash_root([("salt", "x")])


class Rows:
    """One row at a time over a table, as the runner drives BlockHashes."""

    def __init__(self) -> None:
        self.hashes = BlockHashes(num_blocks=10, max_num_seqs=4, block_size=SIZE)
        self.table = BlockTable(4, 8, SIZE)
        self.token_ids = np.zeros((4, 33), np.int32)

    def enter(self, row: int, token_ids: list[int], block_ids: list[int], num_computed: int = 0) -> None:
        self.table.clear(np.array([row]))
        self.table.append(np.full(len(block_ids), row), np.array(block_ids))
        self.token_ids[row, : len(token_ids)] = token_ids
        self.hashes.start_row(row, ROOT, num_computed)

    def step(self, row: int, start: int, end: int, succeeds: bool = True) -> None:
        positions = np.arange(start, end)
        self.hashes.erase(self.table.slots(np.full(len(positions), row), positions) // SIZE)
        if succeeds:
            self.hashes.record(np.array([row]), np.array([end]), self.table, self.token_ids)

    def offered(self) -> dict[int, bytes]:
        block_ids, hashes = self.hashes.offers()
        assert len(hashes) == 8 * len(block_ids)
        return {b: hashes[32 * i : 32 * i + 32] for i, b in enumerate(np.frombuffer(block_ids, "<u4").tolist())}


def chain(token_ids: list[int]) -> list[bytes]:
    hashes = [ROOT]
    for i in range(0, len(token_ids) - SIZE + 1, SIZE):
        hashes.append(block_hash(hashes[-1], pack_token_ids(token_ids[i : i + SIZE])))
    return hashes[1:]


@pytest.fixture
def rows() -> Rows:
    return Rows()


def test_full_blocks_are_offered_with_their_chained_hashes(rows: Rows) -> None:
    ids = list(range(50, 61))
    rows.enter(0, ids, [7, 2, 5])
    rows.step(0, 0, 11)
    assert rows.offered() == dict(zip([7, 2], chain(ids), strict=False))
    rows.token_ids[0, 11] = 99
    rows.step(0, 11, 12)
    assert rows.offered() == dict(zip([7, 2, 5], chain([*ids, 99]), strict=True))


def test_a_half_written_block_is_never_offered(rows: Rows) -> None:
    rows.enter(0, list(range(8)), [1, 2])
    rows.step(0, 0, 8)
    # Another row gets block 2 and writes it token by token.
    rows.enter(1, [9, 8, 7, 6], [2])
    assert set(rows.offered()) == {1, 2}
    for position in range(3):
        rows.step(1, position, position + 1)
        assert set(rows.offered()) == {1}
    rows.step(1, 3, 4)
    assert rows.offered()[2] == chain([9, 8, 7, 6])[0]


def test_a_failed_step_offers_nothing_that_it_wrote(rows: Rows) -> None:
    rows.enter(0, list(range(8)), [1, 2])
    rows.step(0, 0, 8)
    rows.enter(1, [5] * 8, [2, 3])
    rows.step(1, 0, 8, succeeds=False)
    assert set(rows.offered()) == {1}
    rows.hashes.clear_rows()
    assert set(rows.offered()) == {1}


def test_a_row_with_cached_blocks_hashes_them_as_parents_only(rows: Rows) -> None:
    ids = list(range(20, 33))
    rows.enter(0, ids, [4, 5, 6, 7], num_computed=8)
    rows.step(0, 8, 13)
    assert rows.offered() == {6: chain(ids)[2]}


def test_chunks_make_the_chain_of_one_piece(rows: Rows) -> None:
    ids = list(range(16))
    rows.enter(2, ids, [1, 2, 3, 4])
    for start, end in ((0, 3), (3, 9), (9, 10), (10, 16)):
        rows.step(2, start, end)
    assert rows.offered() == dict(zip([1, 2, 3, 4], chain(ids), strict=True))


def test_the_root_and_the_parent_are_part_of_the_name(rows: Rows) -> None:
    rows.enter(0, [1] * 8, [1, 2])
    rows.step(0, 0, 8)
    rows.hashes.start_row(1, hash_root(), 0)
    rows.table.append(np.array([1]), np.array([3]))
    rows.token_ids[1, :4] = 1
    rows.step(1, 0, 4)
    assert len(set(rows.offered().values())) == 3
