"""Ten thousand mutated frames over every socket: counted and dropped, while good streams run on and end right."""

from __future__ import annotations

import random

import pytest
from fuzz.drive import ARENAS, run
from fuzz.mutate import Mutator

from quartet.shared.messages import GetLoads, decode

# With 250 frames a seed, all arenas together: 10,500 frames.
SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("arena", ARENAS)
def test_no_frame_ends_or_stalls_a_service(arena: str, seed: int) -> None:
    report = run(arena, seed)
    assert report.frames == 250


def test_the_mutator_makes_frames_of_every_kind() -> None:
    """Half that decode and half that do not, or the fuzz would test one thing only."""
    mutator = Mutator(random.Random(1))
    kinds = {True: 0, False: 0}
    for _ in range(1000):
        try:
            decode(mutator.frame(GetLoads(7), lambda: GetLoads(8)))
        except (ValueError, RecursionError):
            kinds[False] += 1
        else:
            kinds[True] += 1
    assert min(kinds.values()) > 200


def test_the_same_seed_makes_the_same_frames() -> None:
    def frames() -> list[bytes]:
        mutator = Mutator(random.Random(5))
        return [mutator.frame(GetLoads(i), lambda: GetLoads(8)) for i in range(200)]

    assert frames() == frames()
