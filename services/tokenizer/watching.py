"""Which gateways watch what happens behind this tokenizer."""

from __future__ import annotations

from quartet.services.tokenizer.request import GatewayKey
from quartet.shared.messages import Watch


class Watching:
    """One watch at the scheduler stands for those of all gateways."""

    def __init__(self) -> None:
        self._intervals: dict[GatewayKey, int] = {}

    @property
    def gateways(self) -> list[GatewayKey]:
        return list(self._intervals)

    @property
    def wanted(self) -> Watch | None:
        """For a scheduler that has just come."""
        return Watch(min(self._intervals.values())) if self._intervals else None

    def set(self, gateway: GatewayKey, watch: Watch) -> Watch | None:
        """What the scheduler is to be told then: of one who comes too, who needs a full account."""
        if watch.interval_ms <= 0:
            return self.leave(gateway)
        self._intervals[gateway] = watch.interval_ms
        return self.wanted

    def leave(self, gateway: GatewayKey) -> Watch | None:
        """What the scheduler is to be told then, if anything: nobody is slowed down by others that go on."""
        if self._intervals.pop(gateway, None) is None or self._intervals:
            return None
        return Watch(0)
