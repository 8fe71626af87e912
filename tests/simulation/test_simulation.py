"""The whole line in virtual time, under faults: no token lost, repeated or changed, and nothing left over."""

from __future__ import annotations

import hashlib
import time

import pytest
from simulation.seeds import FOUND
from simulation.world import World

NUM_RUNS = 1200
BATCH = 300
NUM_SLOW_RUNS = 60_000


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_that_once_failed(seed: int) -> None:
    World(seed).run()


@pytest.mark.parametrize("first", range(0, NUM_RUNS, BATCH))
def test_every_stream_ends_whole_and_nothing_is_left(first: int) -> None:
    faults = 0
    for seed in range(first, first + BATCH):
        faults += World(seed).run().num_faults
    assert faults > 3 * BATCH, "there is hardly a fault in it"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_runs() -> None:
    """Other seeds every day, so that it goes on finding."""
    first = 10**9 + int(time.time()) // 86400 * NUM_SLOW_RUNS
    for seed in range(first, first + NUM_SLOW_RUNS):
        World(seed).run()


@pytest.mark.parametrize("seed", range(20, 26))
def test_a_seed_is_one_run(seed: int) -> None:
    """Else a failure could not be looked into."""
    digests = [hashlib.sha256(World(seed).run().report(1 << 30).encode()).hexdigest() for _ in range(2)]
    assert digests[0] == digests[1]
