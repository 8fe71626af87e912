"""A scheduling policy of one's own: work that is in no hurry fills the gaps.

    PYTHONPATH=docs/examples quartet serve --scheduler-policy batch_last:BatchLast

Requests of tenants named batch-... wait while others do, but none longer than `patience` seconds
behind those that come later; otherwise by arrival.
"""

from typing import Any

from quartet.services.scheduler.policies import Policy


class BatchLast(Policy):
    def __init__(self, patience: float = 600.0) -> None:
        self.patience = patience

    def key(self, request: Any) -> float:
        """The lowest goes first. All grow old alike, so a key holds for as long as its request waits."""
        is_batch = request.group.tenant.startswith("batch-")
        return request.group.arrived_at + (self.patience if is_batch else 0.0)
