"""GET /live: what happens on the line, as server-sent events. docs/live.md is the contract."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import parse_qsl

from quartet.services.gateway.http.api import Api
from quartet.services.gateway.http.errors import invalid
from quartet.services.gateway.http.exchange import EVENTS, Exchange
from quartet.services.gateway.live.viewer import Viewer

DEFAULT_INTERVAL_MS = 100
MIN_INTERVAL_MS, MAX_INTERVAL_MS = 50, 10_000
LEVELS = ("live", "trace")
KEEP_ALIVE = 5.0
# So long the first event waits for a scheduler's account, so that it need not be told twice.
ACCOUNT_PATIENCE = 0.5


async def live(api: Api, exchange: Exchange) -> None:
    interval_ms, trace = _parse(exchange.scope["query_string"])
    if exchange.scope["method"] == "HEAD":
        await exchange.respond(200, b"", content_type=EVENTS)
        return
    feed = api.table.live
    viewer = feed.open(interval_ms, trace)
    try:
        async with exchange.while_client_is_there():
            await exchange.start_events()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ACCOUNT_PATIENCE):
                    while not feed.has_account:
                        await _news(viewer)
            await _tell(exchange, viewer, interval_ms / 1000)
            await exchange.write(b"", more=False)
    finally:
        feed.close(viewer)


async def _tell(exchange: Exchange, viewer: Viewer, interval: float) -> None:
    """Until the gateway stops."""
    while not viewer.over.is_set():
        viewer.changed.clear()
        event = viewer.take()
        if event is not None:
            await exchange.write(event)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await viewer.over.wait()
        try:
            async with asyncio.timeout(KEEP_ALIVE):
                await viewer.changed.wait()
        except TimeoutError:
            await exchange.write(b": keep-alive\n\n")


async def _news(viewer: Viewer) -> None:
    await viewer.changed.wait()
    viewer.changed.clear()


def _parse(query: bytes) -> tuple[int, bool]:
    """(interval_ms, whether the level is trace). Raises ApiError."""
    values = {"interval_ms": str(DEFAULT_INTERVAL_MS), "level": LEVELS[0]}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name not in values:
            raise invalid(name[:100], "there is no such parameter; there are interval_ms and level")
        values[name] = value
    text = values["interval_ms"]
    digits = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_INTERVAL_MS))
    if not (digits and MIN_INTERVAL_MS <= int(text) <= MAX_INTERVAL_MS):
        bounds = f"{MIN_INTERVAL_MS} and {MAX_INTERVAL_MS}"
        raise invalid("interval_ms", f"must be a whole number between {bounds}, got {text[:100]!r}")
    if values["level"] not in LEVELS:
        raise invalid("level", f"must be one of {', '.join(LEVELS)}, got {values['level'][:100]!r}")
    return int(text), values["level"] == "trace"
