"""Shortest remaining first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quartet.services.scheduler.policies.policy import Policy

if TYPE_CHECKING:
    from quartet.services.scheduler.request import Request


class SrfPolicy(Policy):
    """The request with the fewest tokens left to compute first, going by its prompt and its max_tokens.

    Each second that a request has been here counts like `ageing` tokens less, so a long one lets
    later ones pass for as long as its tokens take at that rate, and no longer. All age alike, which
    is why a key need not change while its request waits.
    """

    def __init__(self, ageing: float = 100.0) -> None:
        if not ageing > 0:
            raise ValueError(f"ageing must be above 0 tokens a second, got {ageing:g}")
        self._ageing = ageing

    def key(self, request: Request) -> float:
        return request.num_remaining_tokens + self._ageing * request.group.arrived_at
