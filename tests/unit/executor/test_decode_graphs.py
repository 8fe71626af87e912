"""What surrounds the capture of graphs and the copies to a device, with stand-ins for both."""

import numpy as np
import pytest
import torch

from quartet.services.executor.block_table import BlockTable
from quartet.services.executor.triton.decode_graphs import DecodeGraphs, EagerGraph, graph_sizes
from quartet.services.executor.triton.staging import HostTransfers, Staging


@pytest.mark.parametrize("most", [1, 3, 8, 60, 64, 256, 4096])
def test_sizes_take_any_batch_with_little_padding(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == min(most, 512)
    for num_rows in range(1, sizes[-1] + 1):
        size = next(size for size in sizes if size >= num_rows)
        assert size - num_rows <= max(7, num_rows // 4)


def capture(seconds_each: float = 0.0, bytes_each: int = 0) -> tuple[DecodeGraphs, list[int]]:
    """Under bounds of 10 seconds and 1000 bytes."""
    done: list[int] = []
    graphs = DecodeGraphs([1, 2, 4, 8], EagerGraph)
    graphs.capture(
        done.append,
        max_seconds=10,
        max_bytes=1000,
        memory_used=lambda: 7 + bytes_each * len(done),
        clock=lambda: 3 + seconds_each * len(done),
    )
    return graphs, done


def test_a_batch_runs_as_the_next_larger_graph() -> None:
    graphs, done = capture()
    assert done == [8, 4, 2, 1]
    assert [graphs.size_for(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]
    graphs.replay(4)
    graphs.replay(1)
    assert done[4:] == [4, 1]


@pytest.mark.parametrize("cost", [{"seconds_each": 6.0}, {"bytes_each": 600}])
def test_capture_ends_at_its_bounds(cost: dict[str, float]) -> None:
    graphs, done = capture(**cost)  # type: ignore[arg-type]
    assert done == [8, 4]
    assert graphs.size_for(1) == 4


def test_columns_arrive_as_they_were_sent_while_buffers_grow() -> None:
    staging = Staging(torch.device("cpu"), HostTransfers(), num_buffers=3)
    sent = []
    for length in (1, 5, 0, 400, 3, 7, 900):
        columns = [np.arange(length), np.arange(length, dtype=np.int32) * 2]
        packed, arrived = staging.send(columns)
        assert len(packed) % 16 == 0
        sent.append((columns, arrived))
        # Two steps in flight: theirs are still whole.
        for expected, got in sent[-3:]:
            assert all(np.array_equal(a, b.numpy()) for a, b in zip(expected, got, strict=True))
    assert arrived[1].dtype == torch.int32


def test_a_follower_is_told_what_is_appended() -> None:
    table, copy = BlockTable(4, 6, 16), np.zeros(24, np.int64)
    table.append(np.array([1]), np.array([99]))
    table.clear(np.array([1]))
    table.follow()
    assert [len(column) for column in table.take_appended()] == [0, 0]
    table.append(np.array([2, 0, 2]), np.array([5, 6, 7]))
    table.append(np.array([0]), np.array([8]))
    places, block_ids = table.take_appended()
    copy[places] = block_ids
    table.append(np.array([2]), np.array([9]))
    places, block_ids = table.take_appended()
    copy[places] = block_ids
    assert np.array_equal(copy.reshape(4, 6), table.table)
