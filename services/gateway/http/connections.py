"""How many connections there may be, and which one has to go for a new one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol


class Connected(Protocol):
    transport: asyncio.Transport


class Connections:
    """Those of one server. Idle are the ones on which no request is worked on and no answer is still to be sent: they
    wait for a first or a further one, or have part of its head."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._open: set[Connected] = set()
        self._idle: OrderedDict[Connected, None] = OrderedDict()  # some with an answer still to be sent

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connected) -> bool:
        """False when there are too many and none of them is idle. Ends the one that has been so the longest."""
        if len(self._open) >= self._max_connections:
            longest = next((idle for idle in self._idle if not idle.transport.get_write_buffer_size()), None)
            if longest is None:
                return False
            self.remove(longest)
            # Not closed: who reads nothing would keep it, and what it was sent.
            longest.transport.abort()
        self._open.add(connection)
        self._idle[connection] = None
        return True

    def busy(self, connection: Connected) -> None:
        self._idle.pop(connection, None)

    def idle(self, connection: Connected) -> None:
        if connection in self._open:
            self._idle[connection] = None
            self._idle.move_to_end(connection)

    def remove(self, connection: Connected) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)
