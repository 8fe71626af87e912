"""One who looks: what it has not been told yet, and the events that tell it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from quartet.services.gateway.live.account import FREE, Account, Changes, LiveRequest, Step
from quartet.shared.messages import RequestState

if TYPE_CHECKING:
    from quartet.services.gateway.live.feed import LiveFeed

# Blocks of one event: more make the gateway's loop wait too long.
MAX_BLOCKS = 8192
# A viewer that has left so many unread gets a new snapshot, with the last of them.
MAX_UNREAD_STEPS = 1024
MAX_UNREAD_EVENTS = 8192
MEMBERS = ("model", "pool", "queue", "counters", "num_requests_more", "latency", "services")

# role, name, what, t, ms, number of tokens, request id where it is of one
Span = tuple[str, str, str, float, float, int, str | None]

_encode = msgspec.json.encode


class Viewer:
    """`take` gives the next event; what is new in between is merged, so that it never grows beyond a snapshot.
    `changed` is set whenever there may be something, and with `over`."""

    def __init__(self, feed: LiveFeed, interval_ms: int, trace: bool) -> None:
        self.interval_ms = interval_ms
        self.trace = trace
        self.changed = asyncio.Event()
        self.over = asyncio.Event()
        # What a trace has besides: of streams (t, request id, what), and parts of the work of gateway and tokenizers.
        self.stream_events: deque[tuple[float, str, str]] = deque(maxlen=MAX_UNREAD_EVENTS)
        self.spans: deque[Span] = deque(maxlen=MAX_UNREAD_EVENTS)
        self._feed = feed
        self._seq = 0
        self._members: dict[str, Any] = {}
        self._known: set[str] = set()
        self._events: list[list[Any]] = []
        self._blocks: set[int] = set()
        self._tables: dict[str, int] = {}
        self._ended: dict[str, LiveRequest] = {}
        self._steps: list[Step] = []
        self._num_steps_dropped = 0
        self._needs_snapshot = True

    def merge(self, changes: Changes) -> None:
        """To be told with the next event."""
        if changes.reset:
            self._needs_snapshot = True
        self._num_steps_dropped += changes.num_steps_dropped
        if self.trace:
            self._events = (self._events + changes.request_events)[-MAX_UNREAD_EVENTS:]
        if self._needs_snapshot:
            return
        self._blocks |= changes.blocks
        self._steps += changes.steps
        for key, first in changes.requests.items():
            self._tables[key] = min(first, self._tables.get(key, first))
        for key in changes.ended:
            self._tables.pop(key, None)
        self._ended |= changes.ended
        if len(self._steps) > MAX_UNREAD_STEPS:
            self._needs_snapshot = True

    def take(self) -> bytes | None:
        """A whole server-sent event; None when there is nothing to tell."""
        account = self._feed.account
        name, data = b"delta", dict[str, Any]()
        if self._needs_snapshot:
            name = b"snapshot"
            self._needs_snapshot = False
            self._members.clear()
            self._known.clear()
            self._ended.clear()
            self._blocks = set(account.blocks)
            self._tables = dict.fromkeys(account.requests, 0)
            self._steps = list(account.steps)
        self._tell_members(data)
        if self._blocks or name == b"snapshot":
            data["blocks"] = self._take_blocks(account)
        if self._tables or self._ended or name == b"snapshot":
            data["requests"] = self._take_requests(account)
        if self._steps or name == b"snapshot":
            data["steps"] = [self._step(step) for step in self._steps]
            self._steps = []
        if self._num_steps_dropped or name == b"snapshot":
            data["num_steps_dropped"], self._num_steps_dropped = self._num_steps_dropped, 0
        if self.trace and (self._events or name == b"snapshot"):
            data["request_events"], self._events = self._events, []
        for member, unread in (("stream_events", self.stream_events), ("spans", self.spans)):
            if unread:
                data[member] = list(unread)
                unread.clear()
        if not data:
            return None
        head = {"seq": self._seq, "t": self._feed.wall_clock()}
        self._seq += 1
        if self._blocks:
            self.changed.set()  # the rest comes with the next event
        return b"event: %s\ndata: %s\n\n" % (name, _encode(head | data))

    def _tell_members(self, data: dict[str, Any]) -> None:
        for name in MEMBERS:
            value = self._feed.member(name)
            if name not in self._members or self._members[name] != value:
                self._members[name] = data[name] = value

    def _take_blocks(self, account: Account) -> dict[str, list[Any]]:
        block_ids = sorted(self._blocks)
        self._blocks = set(block_ids[MAX_BLOCKS:])
        del block_ids[MAX_BLOCKS:]
        blocks = [account.blocks.get(block_id, FREE) for block_id in block_ids]
        return {
            "runs": _runs(block_ids),
            "ref_cnt": [block[0] for block in blocks],
            "hash": ["" if block[1] == FREE[1] else block[1][:4].hex() for block in blocks],
            "parent": [account.parent_of(block) for block in blocks],
            "hits": [block[3] for block in blocks],
        }

    def _take_requests(self, account: Account) -> list[dict[str, Any]]:
        found = [self._request(key, request, 0) for key, request in self._ended.items()]
        for key, first in self._tables.items():
            if (request := account.requests.get(key)) is not None:
                found.append(self._request(key, request, first))
        self._known.difference_update(self._ended)
        self._ended, self._tables = {}, {}
        return found

    def _request(self, key: str, request: LiveRequest, first: int) -> dict[str, Any]:
        told = request.told
        fields: dict[str, Any] = {"key": key, "state": RequestState(told.state).name.lower()}
        if key not in self._known:
            self._known.add(key)
            fields |= {
                "request_id": f"{told.request_id:016x}",
                "choice": told.index,
                "num_prompt_tokens": told.num_prompt_tokens,
                "priority": told.priority,
                "tenant": told.tenant,
                "arrived_at": told.arrived_at,
            }
            first = 0
        fields |= {
            "num_cached_tokens": told.num_cached_tokens,
            "num_computed_tokens": told.num_computed_tokens,
            "num_output_tokens": told.num_output_tokens,
            "num_preemptions": told.num_preemptions,
        }
        if first < len(request.table) or first == 0:
            fields["block_table"] = {"from": first, "ids": request.table[first:]}
        return fields

    def _step(self, step: Step) -> dict[str, Any]:
        return step.fields | step.trace if self.trace else step.fields


def _runs(block_ids: Iterable[int]) -> list[int]:
    """Pairs of (first, count) of rising ids."""
    runs: list[int] = []
    for block_id in block_ids:
        if runs and runs[-2] + runs[-1] == block_id:
            runs[-1] += 1
        else:
            runs += (block_id, 1)
    return runs
