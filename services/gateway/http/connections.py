"""How many connections there may be, and which one has to go for a new one."""

from __future__ import annotations

import array
import asyncio
import fcntl
import termios
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
            longest = next((idle for idle in self._idle if _has_sent(idle.transport)), None)
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


def _has_sent(transport: asyncio.Transport) -> bool:
    """Whether all that was written is on its way without us."""
    if transport.get_write_buffer_size():
        return False
    # TLS has a transport of its own below, whose buffer nobody can ask for; it is empty where the kernel's is.
    return transport.get_extra_info("ssl_object") is None or not _num_unsent(transport)


def _num_unsent(transport: asyncio.Transport) -> int:
    """Bytes that the kernel has and the other side has not taken."""
    connected = transport.get_extra_info("socket")
    if connected is None:
        return 0
    number = array.array("i", [0])
    fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, number)
    return number[0]
