"""The interface of scheduling policies."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quartet.services.scheduler.request import Request


class Policy:
    """Whose turn it is among requests that wait, and which of those running is preempted when KV memory is short.

    A policy decides order alone. Whatever it says, a preempted request comes back before any that
    waits, each is preempted a bounded number of times, and everything that runs comes to its end.

    A subclass overrides what differs; often `key` is all. Its constructor's parameters are its
    options, numbers by name. Methods are called in the scheduler's hot loop: they must be quick, must
    not change a request, and must not raise. What they may go by, beside `request.group.tenant`,
    `.priority` and `.arrived_at` (seconds, monotonic): `request.num_prompt_tokens`,
    `.num_output_tokens`, `.num_remaining_tokens`, `.num_preemptions` and `.index` (of the choice).
    """

    # --- order ------------------------------------------------------------------------------------

    def key(self, request: Request) -> Any:
        """Anything that compares; the lowest is served first and preempted last, equal ones go by
        arrival. Asked once when a request begins to wait, and anew for those running when they
        compete with each other."""
        return 0

    def flow(self, request: Request) -> Hashable:
        """A line of its own, such as a tenant's: keys order the requests within it, `rank` orders lines."""
        return ""

    def rank(self, flow: Hashable) -> float:
        """The lowest flow has its turn. Asked anew for every turn, so it may change at any time."""
        return 0.0

    # --- what happens, for those that count -------------------------------------------------------

    def waits(self, request: Request) -> None:
        """It begins to wait: it has arrived, or lost its place to another. Its key is asked for next."""

    def waits_no_more(self, request: Request) -> None:
        """It has a place, or is over."""

    def admitted(self, request: Request) -> None:
        """It has its first place. `request.num_cached_tokens` of its prompt need no work."""

    def served(self, requests: Sequence[Request]) -> None:
        """Each of them has one more output token."""
