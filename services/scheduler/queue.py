"""Whose turn it is: queueing policies behind one interface."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from quartet.services.scheduler.request import Request


class Policy(Protocol):
    """Orders requests. A key is taken when a request is queued and stays until it is queued again;
    the lowest is served first, the highest is preempted first. Keys are distinct."""

    def key(self, request: Request) -> tuple[Any, ...]: ...


class FcfsPolicy:
    """First come, first served."""

    def key(self, request: Request) -> tuple[int, int]:
        return request.group.arrival, request.index


class PriorityPolicy:
    """The lowest `priority` value first; equal ones in order of arrival."""

    def key(self, request: Request) -> tuple[int, int, int]:
        return request.group.priority, request.group.arrival, request.index


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": FcfsPolicy, "priority": PriorityPolicy}


class RequestQueue:
    """Requests in the order of their policy keys."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._keys: list[tuple[Any, ...]] = []
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        request.policy_key = self._policy.key(request)
        i = bisect.bisect(self._keys, request.policy_key)
        self._keys.insert(i, request.policy_key)
        self._requests.insert(i, request)

    def remove(self, request: Request) -> None:
        i = bisect.bisect_left(self._keys, request.policy_key)
        assert self._requests[i] is request, f"{request} is not queued"
        del self._keys[i]
        del self._requests[i]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """In order; the queue must not change meanwhile."""
        return iter(self._requests)
