"""Decode steps as graphs: launched whole, for a few sizes to which batches are padded."""

from __future__ import annotations

import bisect
import gc
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from quartet.shared.log import get_logger

# More rows keep the device busy for longer than it takes to launch the kernels one by one.
LARGEST = 512

_log = get_logger()


class Graph(Protocol):
    """Work that is launched as one."""

    def capture(self, work: Callable[[], None]) -> None: ...

    def replay(self) -> None: ...


class EagerGraph:
    """Runs what it captured: where there is no GPU."""

    def capture(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


class CudaGraph:
    """All graphs of a process share a pool of memory: one runs at a time."""

    _pool: Any = None

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], None]) -> None:
        if CudaGraph._pool is None:
            CudaGraph._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(self._graph, pool=CudaGraph._pool):
            work()

    def replay(self) -> None:
        self._graph.replay()


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 64, every 16 up to 256, every 32 up to LARGEST; the last one takes all rows."""
    most = min(max_num_seqs, LARGEST)
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, LARGEST + 1, 32)]
    return [*(size for size in steps if size < most), most]


class DecodeGraphs:
    """Graphs by number of rows."""

    def __init__(self, sizes: list[int], make_graph: Callable[[], Graph]) -> None:
        self._sizes = sizes
        self._make_graph = make_graph
        self._graphs: dict[int, Graph] = {}
        self._captured: list[int] = []

    def capture(
        self,
        work: Callable[[int], None],
        *,
        max_seconds: float,
        max_bytes: int,
        memory_used: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`work(size)` is run once, to have all compiled, and captured, from the largest size down; memory is
        then shared. Ends early past either bound: the sizes left run as batches of the next larger one."""
        started, before = clock(), memory_used()
        for size in sorted(self._sizes, reverse=True):
            seconds, used = clock() - started, memory_used() - before
            if seconds > max_seconds or used > max_bytes:
                _log.warning("not all graphs captured", smallest=self._captured[:1], seconds=seconds, bytes=used)
                break
            work(size)
            graph = self._make_graph()
            graph.capture(lambda size=size: work(size))  # type: ignore[misc]
            self._graphs[size] = graph
            self._captured.insert(0, size)
        gc.collect()
        _log.info("graphs captured", sizes=len(self._captured), seconds=round(clock() - started, 2))

    def size_for(self, num_rows: int) -> int | None:
        """The captured size that takes so many rows, if any."""
        place = bisect.bisect_left(self._captured, num_rows)
        return self._captured[place] if place < len(self._captured) else None

    def replay(self, size: int) -> None:
        self._graphs[size].replay()
