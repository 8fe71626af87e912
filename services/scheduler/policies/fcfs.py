"""First come, first served."""

from __future__ import annotations

from quartet.services.scheduler.policies.policy import Policy


class FcfsPolicy(Policy):
    """In order of arrival."""
