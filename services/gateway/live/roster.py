"""Which services are there, and which have just gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from quartet.shared.messages import Role, WatchedService

KEPT = 60.0


class Roster:
    """`clock` gives seconds, monotonic. Who has gone is kept for a while, or until a new one of its role comes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._there: dict[tuple[Role, int], WatchedService] = {}
        self._gone: dict[tuple[Role, int], tuple[WatchedService, float]] = {}

    def set(self, services: Iterable[WatchedService], roles: tuple[Role, ...]) -> None:
        """All of these roles that are there."""
        now = self._clock()
        there = {(s.role, s.incarnation): s for s in services if s.role in roles}
        for key, service in list(self._there.items()):
            if key[0] in roles and key not in there:
                del self._there[key]
                self._gone[key] = service, now
        for key, service in there.items():
            if key not in self._there:
                self._gone = {k: gone for k, gone in self._gone.items() if k[0] is not key[0]}
            self._there[key] = service

    def listed(self) -> list[dict[str, Any]]:
        """In the order of the line, as viewers get it."""
        now = self._clock()
        self._gone = {k: gone for k, gone in self._gone.items() if now - gone[1] < KEPT}
        found = [(service, True) for service in self._there.values()]
        found += [(service, False) for service, _ in self._gone.values()]
        found.sort(key=lambda entry: (entry[0].role, entry[0].name))
        return [_entry(service, alive) for service, alive in found]


def _entry(service: WatchedService, alive: bool) -> dict[str, Any]:
    return {
        "role": Role(service.role).name.lower(),
        "name": service.name,
        "incarnation": f"{service.incarnation:016x}",
        "version": service.version,
        "alive": alive,
        "ready": service.ready,
        "draining": service.draining,
        "stalled": service.stalled,
    }
