"""Scheduling policies for tests."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

from quartet.services.scheduler.policies import Policy


class Arbitrary(Policy):
    """Says something else each time: what holds under this one holds under any."""

    def __init__(self, seed: float = 0.0) -> None:
        self._random = random.Random(seed)

    def key(self, request: Any) -> int:
        return self._random.randrange(4)

    def flow(self, request: Any) -> Hashable:
        return self._random.randrange(3)

    def rank(self, flow: Hashable) -> float:
        return self._random.random()


class NewestFirst(Policy):
    """As unkind to the old as can be."""

    def key(self, request: Any) -> int:
        return -int(request.group.arrival)
