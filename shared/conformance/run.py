"""Runs scenarios one after the other and gathers what they found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeVar

from quartet.shared.conformance.report import Report, Violation


class Kit(Protocol):
    def close(self) -> None: ...


K = TypeVar("K", bound=Kit)


def run_scenarios(
    report: Report,
    scenarios: Mapping[str, Callable[[K], None]],
    make_kit: Callable[[], K],
    *,
    only: Collection[str] = (),
    after_failure: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Each with fresh neighbours. After a broken rule the service may be in any state: `after_failure`
    may start it anew."""
    for name, scenario in scenarios.items():
        if only and name not in only:
            continue
        report.scenario = name
        kit = make_kit()
        try:
            scenario(kit)
            tell(f"{name}: done")
        except Violation as violation:
            tell(f"{name}: {violation}")
            _close(kit)
            after_failure()
        finally:
            _close(kit)


def _close(kit: Kit) -> None:
    """What goes wrong while leaving has been noted already, or would be by a scenario of its own."""
    with contextlib.suppress(Violation):
        kit.close()
