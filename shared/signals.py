"""How a service in an event loop is told to leave."""

from __future__ import annotations

import asyncio
import os
import signal

from quartet.shared.log import get_logger

_log = get_logger()


def stop_on_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; a second one ends the process at once. Call it in the running loop."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            _log.warning("stopped by a second signal")
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop
