"""Taking an address, or saying why it cannot be had."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any


class BindError(OSError):
    """The address cannot be served."""


def look_up(address: str) -> list[Any]:
    """All that the host's name of a host:port stands for, as getaddrinfo gives it. Raises OSError."""
    host, _, port = address.rpartition(":")
    return socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)


def tcp_sockets(setting: str, address: str, send_timeout: float = 0.0) -> list[socket.socket]:
    """Listening sockets on all that the host's name stands for, whose connections end when the other side has taken
    nothing of what is there for it for `send_timeout` seconds (0: the system's own). Raises BindError."""
    any_port = address.endswith(":0")
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as undo:
        try:
            for family, kind, protocol, _, target in look_up(address):
                listener = undo.enter_context(socket.socket(family, kind, protocol))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if send_timeout and hasattr(socket, "TCP_USER_TIMEOUT"):
                    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(send_timeout * 1000))
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if sockets and any_port:
                    target = (target[0], sockets[0].getsockname()[1], *target[2:])
                listener.bind(target)
                listener.listen(2048)
                listener.setblocking(False)
                sockets.append(listener)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise BindError(f"{setting}: cannot bind {address}: {reason}") from error
        undo.pop_all()
    return sockets


def is_reached_from_elsewhere(address: str) -> bool:
    """Whether others than this host's own programs may come to it. An unknown name is nobody's."""
    if address.startswith("unix:"):
        return False
    try:
        found = look_up(address)
    except OSError:
        return False
    return not all(ipaddress.ip_address(str(target[0]).partition("%")[0]).is_loopback for *_, target in found)
