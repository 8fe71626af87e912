"""By the priority that the client gave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quartet.services.scheduler.policies.policy import Policy

if TYPE_CHECKING:
    from quartet.services.scheduler.request import Request


class PriorityPolicy(Policy):
    """The lowest `priority` value first; equal ones in order of arrival."""

    def key(self, request: Request) -> int:
        return request.group.priority
