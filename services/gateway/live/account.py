"""What is known of blocks, requests and steps, from a scheduler's WatchEvents."""

from __future__ import annotations

import sys
from array import array
from collections import deque
from typing import Any

from quartet.shared.messages import RequestEvent, RequestState, WatchedRequest, WatchedStep, WatchEvents

# Steps that a viewer who comes gets to see.
MAX_PAST_STEPS = 256
# Far more than a scheduler tells of at a time.
MAX_REQUESTS = 4096
NO_HASH = bytes(8)
FIRST = b"\xff" * 8
FREE = (0, NO_HASH, NO_HASH, 0)

# references, beginnings of its hash and of its parent's, hits
Block = tuple[int, bytes, bytes, int]


class Contradiction(ValueError):
    """Events that do not go on from those before: something was lost."""


class LiveRequest:
    """A choice as it was told last; `table` holds block ids."""

    __slots__ = ("table", "told")

    def __init__(self, told: WatchedRequest) -> None:
        self.told = told
        self.table: list[int] = []


class Step:
    """A step in the form that viewers get it, and what those of level trace get more."""

    __slots__ = ("fields", "trace")

    def __init__(self, step: WatchedStep, token_budget: int) -> None:
        self.fields: dict[str, Any] = {
            "epoch": step.epoch,
            "step_id": step.step_id,
            "t": step.scheduled_at,
            "num_prefill_tokens": step.num_prefill_tokens,
            "num_decode_tokens": step.num_decode_tokens,
            "token_budget": token_budget,
            "prefills": [[key_of(c.request_id, c.index), c.num_tokens] for c in step.chunks],
            "num_running": step.num_running,
            "num_waiting": step.num_waiting,
            "num_preempted": step.num_preempted,
            "schedule_ms": step.schedule_us / 1000,
            "update_ms": step.update_us / 1000,
            "executor_ms": sum(s.duration_us for s in step.spans) / 1000 if step.started_at else None,
            "total_ms": round(1000 * (step.returned_at - step.scheduled_at), 3),
            "lost": step.lost,
        }
        phases = [[s.phase, s.start_us / 1000, s.duration_us / 1000] for s in step.spans]
        self.trace = {
            "returned_at": step.returned_at,
            "executor": {"t": step.started_at, "phases": phases} if step.started_at else None,
        }


class Changes:
    """What one WatchEvents changed. `requests`: from which entry on the table is another; `ended` are no longer in
    the account. `reset`: nothing from before holds."""

    def __init__(self) -> None:
        self.reset = False
        self.members: set[str] = set()
        self.blocks: set[int] = set()
        self.requests: dict[str, int] = {}
        self.ended: dict[str, LiveRequest] = {}
        self.steps: list[Step] = []
        self.num_steps_dropped = 0
        self.request_events: list[list[Any]] = []


class Account:
    """`members` holds what replaces as a whole, in the form that viewers get it; blocks that are free and hold
    nothing are not in `blocks`."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.requests: dict[str, LiveRequest] = {}
        self.steps: deque[Step] = deque(maxlen=MAX_PAST_STEPS)
        self.members: dict[str, Any] = {
            "pool": None,
            "queue": None,
            "counters": None,
            "num_requests_more": 0,
        }
        self._seq = -1
        self._by_hash: dict[bytes, int] = {}
        self._children: dict[bytes, set[int]] = {}

    def apply(self, events: WatchEvents) -> Changes:
        """Raises Contradiction, and then only events with seq 0 lead on."""
        changes = Changes()
        if events.seq == 0:
            changes.reset = True
            self.blocks.clear()
            self.requests.clear()
            self._by_hash.clear()
            self._children.clear()
        elif self._seq < 0 or events.seq != self._seq + 1:
            self._seq = -1
            raise Contradiction(f"events {events.seq} do not follow")
        self._seq = events.seq
        try:
            self._apply_blocks(events, changes)
            for request in events.requests:
                self._apply_request(request, changes)
        except (ValueError, IndexError) as error:
            self._seq = -1
            raise Contradiction(str(error)) from error
        changes.steps = [Step(step, events.max_num_batched_tokens) for step in events.steps]
        changes.num_steps_dropped = events.num_steps_dropped
        self.steps.extend(changes.steps)
        changes.request_events = [
            [event.at, key_of(event.request_id, event.index), RequestEvent(event.what).name.lower()]
            for event in events.request_events
        ]
        self._apply_members(events, changes)
        return changes

    def parent_of(self, block: Block) -> int:
        """A block's id; 0 where it is the first of its prefix, -1 where there is none or it is not known."""
        _, block_hash, parent, _ = block
        if block_hash == NO_HASH or parent == NO_HASH:
            return -1
        return 0 if parent == FIRST else self._by_hash.get(parent, -1)

    def _apply_members(self, events: WatchEvents, changes: Changes) -> None:
        pool = None
        if events.num_blocks:
            pool = {
                "num_blocks": events.num_blocks,
                "block_size": events.block_size,
                "num_free": events.num_free_blocks,
                "num_cached": events.num_cached_blocks,
            }
        members = {
            "pool": pool,
            "queue": {
                "num_running": events.num_running,
                "num_waiting": events.num_waiting,
                "num_preempted": events.num_preempted,
                "max_num_seqs": events.max_num_seqs,
                "token_budget": events.max_num_batched_tokens,
            },
            "counters": {
                "steps": events.num_steps_total,
                "preemptions": events.num_preemptions_total,
                "prefix_cache_queries": events.num_prompt_tokens_total,
                "prefix_cache_hits": events.num_cached_tokens_total,
                "output_tokens": events.num_output_tokens_total,
            },
            "num_requests_more": events.num_requests_more,
        }
        for name, value in members.items():
            if value != self.members[name]:
                self.members[name] = value
                changes.members.add(name)

    # --- blocks -------------------------------------------------------------------------------------

    def _apply_blocks(self, events: WatchEvents, changes: Changes) -> None:
        ids, refs = _column("I", events.block_ids), _column("H", events.block_refs)
        hashes, parents, hits = events.block_hashes, events.block_parents, _column("I", events.block_hits)
        if not len(ids) == len(refs) == len(hits) or not len(hashes) == len(parents) == 8 * len(ids):
            raise Contradiction("columns do not match")
        for i, block_id in enumerate(ids):
            if not 1 <= block_id <= events.num_blocks:
                raise Contradiction(f"there is no block {block_id}")
            place = slice(8 * i, 8 * i + 8)
            self._set_block(block_id, (refs[i], hashes[place], parents[place], hits[i]), changes)

    def _set_block(self, block_id: int, block: Block, changes: Changes) -> None:
        changes.blocks.add(block_id)
        _, old_hash, old_parent, _ = self.blocks.get(block_id, FREE)
        _, block_hash, parent, _ = block
        if parent != old_parent:
            siblings = self._children.get(old_parent)
            if siblings is not None:
                siblings.discard(block_id)
                if not siblings:
                    del self._children[old_parent]
            if parent not in (NO_HASH, FIRST):
                self._children.setdefault(parent, set()).add(block_id)
        if block_hash != old_hash:
            if self._by_hash.get(old_hash) == block_id:
                del self._by_hash[old_hash]
                changes.blocks |= self._children.get(old_hash, set())
            if block_hash != NO_HASH:
                self._by_hash[block_hash] = block_id
                changes.blocks |= self._children.get(block_hash, set())
        if block[:2] == FREE[:2]:
            self.blocks.pop(block_id, None)
        else:
            self.blocks[block_id] = block

    # --- requests -----------------------------------------------------------------------------------

    def _apply_request(self, told: WatchedRequest, changes: Changes) -> None:
        key = key_of(told.request_id, told.index)
        request = self.requests.get(key)
        if request is None:
            if len(self.requests) >= MAX_REQUESTS:
                raise Contradiction("too many requests are told of")
            request = self.requests[key] = LiveRequest(told)
        if not 0 <= told.table_start <= len(request.table):
            raise Contradiction("a table goes on from what was never told")
        request.told = told
        request.table[told.table_start :] = _column("I", told.table)
        if told.state >= RequestState.FINISHED:
            del self.requests[key]
            changes.requests.pop(key, None)
            changes.ended[key] = request
        else:
            changes.requests[key] = min(told.table_start, changes.requests.get(key, told.table_start))


def key_of(request_id: int, index: int) -> str:
    return f"{request_id:016x}/{index}"


def _column(typecode: str, data: bytes) -> array[int]:
    """Raises ValueError when it is cut short."""
    values = array(typecode)
    values.frombytes(data)
    if sys.byteorder != "little":
        values.byteswap()
    return values
