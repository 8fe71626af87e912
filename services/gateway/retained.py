"""Finished streams, kept for a client that attaches again."""

from __future__ import annotations

from collections import OrderedDict

from quartet.services.gateway.stream import Stream


class Retained:
    """Bounded in seconds and bytes; the one that finished first goes first."""

    def __init__(self, grace: float, max_bytes: int) -> None:
        self._grace = grace
        self._max_bytes = max_bytes
        self._streams: OrderedDict[int, tuple[Stream, float, int]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: Stream, now: float) -> None:
        size = stream.size()
        self._streams[stream.request_id] = (stream, now, size)
        self._num_bytes += size

    def get(self, request_id: int) -> Stream | None:
        found = self._streams.get(request_id)
        return None if found is None else found[0]

    def tick(self, now: float) -> None:
        while self._streams:
            stream, finished_at, size = next(iter(self._streams.values()))
            if now - finished_at <= self._grace and self._num_bytes <= self._max_bytes:
                return
            del self._streams[stream.request_id]
            self._num_bytes -= size
