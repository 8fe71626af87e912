"""What a viewer knows, from WatchEvents alone, and whether it is so."""

from __future__ import annotations

from typing import Any

from quartet.services.scheduler.core import SchedulerCore
from quartet.services.scheduler.plan import unpack_u16, unpack_u32
from quartet.services.scheduler.request import RequestStatus
from quartet.shared.messages import RequestState, WatchedRequest, WatchedStep, WatchEvents


class Replay:
    """`blocks`: id -> (refs, hash, parent); free nameless ones are left out. `tables` and `requests` by key."""

    def __init__(self) -> None:
        self.seq = -1
        self.last: WatchEvents | None = None
        self.blocks: dict[int, tuple[int, bytes, bytes]] = {}
        self.hits: dict[int, int] = {}
        self.requests: dict[tuple[int, int], WatchedRequest] = {}
        self.tables: dict[tuple[int, int], list[int]] = {}
        self.ended: list[WatchedRequest] = []
        self.steps: list[WatchedStep] = []
        self.events: list[Any] = []
        self.num_accounts = 0

    def apply(self, events: WatchEvents) -> None:
        if events.seq == 0:
            self.blocks.clear()
            self.hits.clear()
            self.requests.clear()
            self.tables.clear()
            self.num_accounts += 1
        else:
            assert events.seq == self.seq + 1, "events are missing"
        self.seq, self.last = events.seq, events
        ids, refs, hits = unpack_u32(events.block_ids), unpack_u16(events.block_refs), unpack_u32(events.block_hits)
        assert len(ids) == len(refs) == len(hits) == len(events.block_hashes) // 8 == len(events.block_parents) // 8
        for i, block_id in enumerate(ids):
            place = slice(8 * i, 8 * i + 8)
            self.blocks[block_id] = refs[i], events.block_hashes[place], events.block_parents[place]
            self.hits[block_id] = hits[i]
            if not refs[i] and not any(self.blocks[block_id][1]):
                del self.blocks[block_id], self.hits[block_id]
        for request in events.requests:
            self._apply_request(request)
        self.steps += events.steps
        self.events += events.request_events

    def _apply_request(self, request: WatchedRequest) -> None:
        key = request.request_id, request.index
        table = self.tables.get(key, [])
        assert request.table_start <= len(table), "a table goes on from what was never told"
        table = table[: request.table_start] + unpack_u32(request.table)
        if request.state in (RequestState.FINISHED, RequestState.DROPPED):
            assert not table
            self.requests.pop(key, None)
            self.tables.pop(key, None)
            self.ended.append(request)
        else:
            self.requests[key], self.tables[key] = request, table

    def check(self, core: SchedulerCore, *, all_blocks: bool = True) -> None:
        """Against what is so now, where all news have been taken. `all_blocks`: none is still to be told."""
        state = core.state
        assert self.last is not None and self.last.num_blocks == state.kv.pool.num_blocks
        assert self.last.num_free_blocks == state.kv.num_free_blocks
        assert self.last.num_cached_blocks == state.kv.pool.num_cached_blocks
        if all_blocks:
            expected = {
                block.block_id: (block.ref_cnt, (block.block_hash or bytes(8))[:8])
                for block in state.kv.pool.blocks
                if block.ref_cnt or block.block_hash is not None
            }
            assert {block_id: told[:2] for block_id, told in self.blocks.items()} == expected
        unfinished = [*state.running, *state.preempted, *state.waiting]
        assert len(self.requests) + self.last.num_requests_more == len(unfinished)
        for request in unfinished:
            told = self.requests.get((request.request_id, request.index))
            if told is None:
                assert self.last.num_requests_more
                continue
            assert told.state == _STATES[request.status]
            assert told.num_computed_tokens == request.num_computed_tokens
            assert told.num_output_tokens == request.num_output_tokens
            assert told.num_preemptions == request.num_preemptions
            table = self.tables[request.request_id, request.index]
            assert table == [block.block_id for block in request.blocks]

    def check_chains(self, core: SchedulerCore) -> None:
        """The parents of what running requests hold are their own chains."""
        for request in core.state.running:
            before = b"\xff" * 8
            for block in request.blocks[: request.num_hashed_blocks]:
                if block.block_hash is None:
                    break  # another block holds the same
                _, block_hash, parent = self.blocks[block.block_id]
                assert parent == before
                before = block_hash


_STATES = {
    RequestStatus.WAITING: RequestState.WAITING,
    RequestStatus.PREEMPTED: RequestState.PREEMPTED,
    RequestStatus.RUNNING: RequestState.RUNNING,
}
