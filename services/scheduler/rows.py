"""The executor's batch rows: which request has which, and which of them decode."""

from __future__ import annotations

import heapq

from quartet.services.scheduler.request import Request


class Rows:
    """Rows 0..max_num_seqs-1. A row that is left is reused only once the plan that carries its
    removal has returned: free -> held -> left -> leaving (in a plan) -> free."""

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._free = list(range(max_num_seqs))
        self._requests: list[Request | None] = [None] * max_num_seqs
        self._left: list[int] = []
        self._leaving: set[int] = set()
        self._decode_bits = bytearray((max_num_seqs + 7) // 8)
        self._decodes: list[Request] | None = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_left(self) -> int:
        return len(self._left)

    def enter(self, request: Request) -> None:
        """Gives it the lowest free row, which keeps the decode bit set short."""
        request.req_index = heapq.heappop(self._free)
        self._requests[request.req_index] = request

    def leave(self, request: Request) -> None:
        self.stop_decoding(request)
        self._requests[request.req_index] = None
        self._left.append(request.req_index)
        request.req_index = -1

    def take_left(self) -> list[int]:
        """The rows whose removal the next plan carries; give them to `release` when it has returned."""
        left, self._left = self._left, []
        self._leaving.update(left)
        return left

    def release(self, rows: list[int]) -> None:
        for row in rows:
            self._leaving.remove(row)
            heapq.heappush(self._free, row)

    def start_decoding(self, request: Request) -> None:
        """From the next plan on it computes its one next token, sampled by the plan before."""
        self._decode_bits[request.req_index >> 3] |= 1 << (request.req_index & 7)
        self._decodes = None

    def stop_decoding(self, request: Request) -> None:
        byte, bit = request.req_index >> 3, 1 << (request.req_index & 7)
        if self._decode_bits[byte] & bit:
            self._decode_bits[byte] ^= bit
            self._decodes = None

    def decodes(self) -> list[Request]:
        """The decoding requests by rising row. The list is never changed, so plans may keep it."""
        if self._decodes is None:
            bits = self._decode_bits
            self._decodes = [
                request
                for row, request in enumerate(self._requests)
                if request is not None and bits[row >> 3] >> (row & 7) & 1
            ]
        return self._decodes

    def decode_bits(self) -> bytes:
        return bytes(self._decode_bits).rstrip(b"\0")

    def check_invariants(self, running: set[Request], in_flight_removals: list[list[int]]) -> None:
        held = {row: request for row, request in enumerate(self._requests) if request is not None}
        assert set(held.values()) == running and all(r.req_index == row for row, r in held.items())
        leaving = [row for rows in in_flight_removals for row in rows]
        assert sorted(leaving) == sorted(self._leaving), "a removal is in flight that no plan carries"
        assert sorted([*self._free, *held, *self._left, *leaving]) == list(range(self.max_num_seqs))
        assert len(self.decodes()) == sum(byte.bit_count() for byte in self._decode_bits)
