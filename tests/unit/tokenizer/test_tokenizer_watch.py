"""One watch at the scheduler for all gateways that look, and its events to each of them."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.services.tokenizer.core import TokenizerCore
from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.shared.messages import Watch, WatchEnded, WatchEvents

EVENTS = WatchEvents(
    1, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, b"", b"", b"", b"", b"", [], 0, [], 0, [], []
)  # fmt: skip


@pytest.fixture
def core(tiny: LoadedTokenizer) -> TokenizerCore:
    found = TokenizerCore(tiny, lambda: 100.0)
    for gateway in ("g", "h"):
        found.gateway_up(gateway)
    found.scheduler_up()
    return found


def sent(core: TokenizerCore) -> list[tuple[Any, Any]]:
    return [(to, message) for to, message in core.take()]


def test_events_go_to_those_who_look(core: TokenizerCore) -> None:
    core.watch("g", Watch(100))
    assert sent(core) == [(None, Watch(100))]
    core.watch_events(EVENTS)
    assert sent(core) == [("g", EVENTS)]
    core.watch("h", Watch(500))
    assert sent(core) == [(None, Watch(100))], "who comes needs a full account; the quicker one sets the pace"
    core.watch_events(EVENTS)
    assert sent(core) == [("g", EVENTS), ("h", EVENTS)]


def test_the_last_to_leave_ends_it(core: TokenizerCore) -> None:
    core.watch("g", Watch(100))
    core.watch("h", Watch(100))
    sent(core)
    core.watch("g", Watch(0))
    core.watch("g", Watch(0))
    assert sent(core) == []
    core.gateway_down("h")
    assert sent(core) == [(None, Watch(0))]
    core.watch_events(EVENTS)
    core.gateway_down("g")
    assert sent(core) == []


def test_a_scheduler_that_comes_is_told_who_looks(core: TokenizerCore) -> None:
    core.watch("g", Watch(100))
    sent(core)
    core.scheduler_down()
    assert sent(core) == [("g", WatchEnded())]
    core.watch("h", Watch(50))
    assert sent(core) == [("h", WatchEnded())]
    core.scheduler_up()
    assert sent(core) == [(None, Watch(50))]
    core.watch("g", Watch(0))
    core.watch("h", Watch(0))
    core.scheduler_down()
    sent(core)
    core.scheduler_up()
    assert sent(core) == []
