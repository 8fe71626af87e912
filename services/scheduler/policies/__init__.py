"""Scheduling policies. One of your own is a subclass of Policy, named to the scheduler as package.module:Class."""

from quartet.services.scheduler.policies.policy import Policy

__all__ = ["Policy"]
