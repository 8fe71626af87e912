"""Requests that wait, in the order that the policy gives them."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Any

from quartet.services.scheduler.policies import Policy
from quartet.services.scheduler.request import Request


class _Flow:
    """Requests by rising policy_key."""

    __slots__ = ("keys", "requests")

    def __init__(self) -> None:
        self.keys: list[tuple[Any, ...]] = []
        self.requests: list[Request] = []


class RequestQueue:
    """A line for each of the policy's flows. A request's key is taken when it is added."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._flows: dict[Hashable, _Flow] = {}
        self._size = 0

    def add(self, request: Request) -> None:
        request.policy_key = (self._policy.key(request), request.group.arrival, request.index)
        request.flow = self._policy.flow(request)
        flow = self._flows.setdefault(request.flow, _Flow())
        i = bisect.bisect(flow.keys, request.policy_key)
        flow.keys.insert(i, request.policy_key)
        flow.requests.insert(i, request)
        self._size += 1

    def remove(self, request: Request) -> None:
        flow = self._flows[request.flow]
        i = bisect.bisect_left(flow.keys, request.policy_key)
        assert flow.requests[i] is request, f"{request} is not queued"
        del flow.keys[i]
        del flow.requests[i]
        self._size -= 1
        if not flow.keys:
            del self._flows[request.flow]

    def in_turn(self) -> Iterator[Request]:
        """Each one is chosen when it is asked for. The one given last may leave before that, no other may."""
        rank = self._policy.rank
        # Compared by rank, then key; keys are distinct, so the rest never is.
        turns = [(rank(name), flow.keys[0], 0, name, flow) for name, flow in self._flows.items()]
        heapq.heapify(turns)
        while turns:
            _, _, i, name, flow = turns[0]
            request = flow.requests[i]
            yield request
            if i < len(flow.requests) and flow.requests[i] is request:
                i += 1
            if i < len(flow.requests):
                # What it was given counts for whose turn is next.
                heapq.heapreplace(turns, (rank(name), flow.keys[i], i, name, flow))
            else:
                heapq.heappop(turns)

    def first(self, count: int) -> list[Request]:
        """The first `count` of the flow whose turn it is: who of them goes first is nobody else's loss."""
        rank = self._policy.rank
        turn = min(((rank(name), flow.keys[0], flow) for name, flow in self._flows.items()), default=None)
        return turn[2].requests[:count] if turn else []

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """All, in order within each flow; the queue must not change meanwhile."""
        return itertools.chain.from_iterable(flow.requests for flow in self._flows.values())
