"""Fair share between tenants."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from quartet.services.scheduler.policies.policy import Policy

if TYPE_CHECKING:
    from quartet.services.scheduler.request import Request

# Past this many, the idle tenants that have been served least are forgotten.
MAX_TENANTS = 4096
WEIGHT = "weight."


class FairPolicy(Policy):
    """The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).

    Each tenant has a counter of what it was served: `input_cost` for each prompt token that is not
    in the prefix cache, charged when the request gets its place, and `output_cost` for each output
    token as it comes, both divided by the tenant's weight (option `weight.<tenant>`, default 1). The
    tenant with the lowest counter has its turn; its own requests go by arrival, and with memory
    short the newest request of the one with the highest counter is preempted. Nothing idles while
    anyone waits.

    A tenant that begins to wait is lifted to the lowest counter of those that wait already, or to
    that of the last who did, so that time away gives no credit. A new scheduler starts all at 0.
    """

    def __init__(self, input_cost: float = 1.0, output_cost: float = 2.0, **weights: float) -> None:
        for name, value in weights.items():
            if not name.startswith(WEIGHT):
                raise ValueError(f"there is no option {name}; options are input_cost, output_cost, {WEIGHT}<tenant>")
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value:g}")
        if input_cost < 0 or output_cost <= 0:
            raise ValueError("input_cost must be at least 0 and output_cost above 0")
        self._input_cost = input_cost
        self._output_cost = output_cost
        self._weights = {name.removeprefix(WEIGHT): value for name, value in weights.items()}
        self._counters: dict[str, float] = {}
        self._num_waiting: collections.Counter[str] = collections.Counter()
        self._last_waited = ""

    def flow(self, request: Request) -> str:
        return request.group.tenant

    def rank(self, flow: Hashable) -> float:
        return self.counter(str(flow))

    def counter(self, tenant: str) -> float:
        """Weighted cost of what it was served, lifts included."""
        return self._counters.get(tenant, 0.0)

    def waits(self, request: Request) -> None:
        tenant = request.group.tenant
        if not self._num_waiting[tenant]:
            level = min(map(self.counter, self._num_waiting), default=self.counter(self._last_waited))
            self._counters[tenant] = max(self.counter(tenant), level)
        self._num_waiting[tenant] += 1
        if len(self._counters) > MAX_TENANTS:
            self._forget_idle()

    def waits_no_more(self, request: Request) -> None:
        tenant = request.group.tenant
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._last_waited = tenant

    def admitted(self, request: Request) -> None:
        # One that comes with outputs was charged where it had its first place.
        if not request.num_past_tokens:
            num_tokens = request.num_prompt_tokens - request.num_cached_tokens
            self._charge(request.group.tenant, self._input_cost * num_tokens)

    def served(self, requests: Sequence[Request]) -> None:
        for tenant, count in collections.Counter([request.group.tenant for request in requests]).items():
            self._charge(tenant, self._output_cost * count)

    def _charge(self, tenant: str, cost: float) -> None:
        self._counters[tenant] = self.counter(tenant) + cost / self._weights.get(tenant, 1.0)

    def _forget_idle(self) -> None:
        """When it returns, one of these is lifted to the others anyway."""
        idle = [t for t in self._counters if t not in self._num_waiting and t != self._last_waited]
        idle.sort(key=self.counter)
        for tenant in idle[: MAX_TENANTS // 2]:
            del self._counters[tenant]
