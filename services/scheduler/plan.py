"""A step as it is put together, as it travels, and as it is remembered until its result is back."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quartet.services.scheduler.free_block_queue import KVCacheBlock
from quartet.services.scheduler.request import Request
from quartet.services.scheduler.rows import Rows
from quartet.shared.block_hash import pack_token_ids
from quartet.shared.messages import NewRow, StepPlan


class Prefill(NamedTuple):
    """A row's chunk; `num_computed_tokens` counts it in. It samples when it reaches all known tokens."""

    request: Request
    req_index: int
    num_computed_tokens: int
    samples: bool


class PlanInFlight:
    """What has to be known when the result of a plan comes back."""

    __slots__ = ("decode_bits", "decodes", "num_tokens", "prefills", "removed", "sequence", "step_id")

    def __init__(self, sequence: int, step_id: int) -> None:
        self.sequence = sequence
        self.step_id = step_id
        self.removed: list[int] = []
        self.decodes: list[Request] = []
        self.decode_bits = b""
        self.prefills: list[Prefill] = []
        self.num_tokens = 0

    def sampling(self) -> list[Request]:
        """The requests that sample, in batch order."""
        return [*self.decodes, *(p.request for p in self.prefills if p.samples)]

    def rows(self) -> dict[int, Request]:
        """The requests by the row they had in this plan."""
        decode_rows = (row for row in range(8 * len(self.decode_bits)) if self.decode_bits[row >> 3] >> (row & 7) & 1)
        rows = dict(zip(decode_rows, self.decodes, strict=True))
        rows.update((p.req_index, p.request) for p in self.prefills)
        return rows

    def requests(self) -> set[Request]:
        return {*self.decodes, *(p.request for p in self.prefills)}


class PlanBuilder:
    """Collects one step. Decodes are set once, after everything that may preempt."""

    def __init__(self) -> None:
        self.decodes: list[Request] = []
        self.decode_bits = b""
        self._block_rows: list[int] = []
        self._block_ids: list[int] = []
        self._new: dict[Request, int] = {}
        self._counts: dict[Request, int] = {}

    @property
    def empty(self) -> bool:
        return not self.decodes and not self._counts

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(self._counts.values())

    def enter(self, request: Request) -> None:
        """It gets a row in this step; its blocks travel with the row."""
        self._new[request] = request.num_computed_tokens

    def append_blocks(self, request: Request, blocks: Iterable[KVCacheBlock]) -> None:
        if request not in self._new:
            for block in blocks:
                self._block_rows.append(request.req_index)
                self._block_ids.append(block.block_id)

    def forget_row(self, req_index: int) -> None:
        """The row leaves before this step: it takes no blocks."""
        if req_index in self._block_rows:
            kept = [i for i, row in enumerate(self._block_rows) if row != req_index]
            self._block_rows = [self._block_rows[i] for i in kept]
            self._block_ids = [self._block_ids[i] for i in kept]

    def compute(self, request: Request, num_tokens: int) -> None:
        self._counts[request] = self._counts.get(request, 0) + num_tokens

    def build(self, epoch: int, in_flight: PlanInFlight, rows: Rows) -> StepPlan:
        """Fills in `in_flight` and gives the message."""
        in_flight.removed = rows.take_left()
        in_flight.decodes = self.decodes
        in_flight.decode_bits = self.decode_bits
        in_flight.num_tokens = self.num_tokens
        for request in self._counts:
            samples = request.num_computed_tokens == len(request.token_ids)
            in_flight.prefills.append(Prefill(request, request.req_index, request.num_computed_tokens, samples))
        return StepPlan(
            epoch,
            in_flight.step_id,
            pack_u16(in_flight.removed),
            [new_row(request, num_computed) for request, num_computed in self._new.items()],
            pack_u16(self._block_rows),
            pack_u32(self._block_ids),
            self.decode_bits,
            pack_u16([request.req_index for request in self._counts]),
            pack_u32(list(self._counts.values())),
        )


def new_row(request: Request, num_computed_tokens: int) -> NewRow:
    group = request.group
    return NewRow(
        req_index=request.req_index,
        token_ids=pack_token_ids(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=pack_u32([block.block_id for block in request.blocks]),
        sampling=group.sampling,
        eos_token_ids=group.eos_token_ids,
        choice_index=request.index,
        hash_root=group.hash_root,
        prompt_logprobs_start=group.next_prompt_logprob if request.wants_prompt_logprobs else -1,
        write_prefix_cache=group.write_prefix_cache,
        vocabulary=group.vocabulary,
        trace_context=group.trace_context,
    )


def _pack(typecode: str, values: Sequence[int]) -> bytes:
    if not values:
        return b""
    column = array.array(typecode, values)
    if sys.byteorder != "little":
        column.byteswap()
    return column.tobytes()


def _unpack(typecode: str, column: bytes) -> list[int]:
    values = array.array(typecode)
    values.frombytes(column)
    if sys.byteorder != "little":
        values.byteswap()
    return values.tolist()


def pack_u16(values: Sequence[int]) -> bytes:
    return _pack("H", values)


def pack_u32(values: Sequence[int]) -> bytes:
    return _pack("I", values)


def unpack_u16(column: bytes) -> list[int]:
    """Raises ValueError when the column is cut short."""
    return _unpack("H", column)


def unpack_u32(column: bytes) -> list[int]:
    """Raises ValueError when the column is cut short."""
    return _unpack("I", column)
