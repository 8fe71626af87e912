"""Requests that wait, in the order that the policy gives them."""

from __future__ import annotations

import bisect
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
        passed = dict.fromkeys(self._flows, 0)
        while passed:
            name = self._whose_turn(passed)
            requests, i = self._flows[name].requests, passed[name]
            request = requests[i]
            yield request
            if i < len(requests) and requests[i] is request:
                passed[name] = i = i + 1
            if i == len(requests):
                del passed[name]

    def first(self, count: int) -> list[Request]:
        """The first `count` of the flow whose turn it is: who of them goes first is nobody else's loss."""
        if not self._flows:
            return []
        return self._flows[self._whose_turn(dict.fromkeys(self._flows, 0))].requests[:count]

    def _whose_turn(self, passed: dict[Hashable, int]) -> Hashable:
        if len(passed) == 1:
            return next(iter(passed))
        rank, flows = self._policy.rank, self._flows
        return min(passed, key=lambda name: (rank(name), flows[name].keys[passed[name]]))

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """All, in order within each flow; the queue must not change meanwhile."""
        return itertools.chain.from_iterable(flow.requests for flow in self._flows.values())
