"""What a client of /live knows, by the rules of docs/live.md alone."""

from __future__ import annotations

import json
from typing import Any

REPLACED = ("model", "pool", "queue", "counters", "num_requests_more", "latency", "services")
FREE = (0, "", -1, 0)


class LiveView:
    """`blocks`: id -> (ref_cnt, hash, parent, hits), free ones left out; `requests` and `tables` by key."""

    def __init__(self) -> None:
        self.seq = -1
        self.state: dict[str, Any] = dict.fromkeys(REPLACED)
        self.blocks: dict[int, tuple[int, str, int, int]] = {}
        self.requests: dict[str, dict[str, Any]] = {}
        self.tables: dict[str, list[int]] = {}
        self.ended: dict[str, dict[str, Any]] = {}
        self.steps: dict[tuple[int, int], dict[str, Any]] = {}
        self.request_events: list[list[Any]] = []
        self.stream_events: list[list[Any]] = []
        self.spans: list[list[Any]] = []
        self.num_snapshots = 0

    def take(self, text: bytes) -> None:
        """A server-sent event, comments included."""
        if text.startswith(b":"):
            return
        head, _, data = text.rstrip(b"\n").partition(b"\n")
        assert data.startswith(b"data: ") and b"\n" not in data
        self.apply(head.removeprefix(b"event: ").decode(), json.loads(data[6:], parse_constant=_refuse))

    def apply(self, name: str, data: dict[str, Any]) -> None:
        assert name == "snapshot" if self.seq < 0 else name in ("snapshot", "delta")
        assert data["seq"] == self.seq + 1 and data["t"] > 0
        self.seq = data["seq"]
        if name == "snapshot":
            self.num_snapshots += 1
            self.blocks.clear()
            self.requests.clear()
            self.tables.clear()
            assert set(data) >= {*REPLACED, "blocks", "requests", "steps", "num_steps_dropped"}
        self.state |= {member: data[member] for member in REPLACED if member in data}
        self._apply_blocks(data.get("blocks", {"runs": [], "ref_cnt": [], "hash": [], "parent": [], "hits": []}))
        for request in data.get("requests", ()):
            self._apply_request(request)
        for step in data.get("steps", ()):
            self.steps[step["epoch"], step["step_id"]] = step
        self.request_events += data.get("request_events", [])
        self.stream_events += data.get("stream_events", [])
        self.spans += data.get("spans", [])

    def service(self, role: str) -> dict[str, Any] | None:
        """The one that is there."""
        found = [s for s in self.state["services"] or () if s["role"] == role and s["alive"]]
        return found[-1] if found else None

    def _apply_blocks(self, columns: dict[str, list[Any]]) -> None:
        runs = columns["runs"]
        ids = [i for first, count in zip(runs[::2], runs[1::2], strict=True) for i in range(first, first + count)]
        names = ("ref_cnt", "hash", "parent", "hits")
        for block_id, *block in zip(ids, *(columns[name] for name in names), strict=True):
            self.blocks[block_id] = tuple(block)  # type: ignore[assignment]
            if self.blocks[block_id] == FREE:
                del self.blocks[block_id]

    def _apply_request(self, entry: dict[str, Any]) -> None:
        key = entry["key"]
        known = self.requests.setdefault(key, {})
        table = entry.pop("block_table", None)
        known |= entry
        if table is not None:
            before = self.tables.get(key, [])
            assert table["from"] <= len(before)
            self.tables[key] = before[: table["from"]] + table["ids"]
        if entry["state"] in ("finished", "dropped"):
            self.ended[key] = self.requests.pop(key)
            self.tables.pop(key, None)
        else:
            assert key == f"{known['request_id']}/{known['choice']}" and key in self.tables


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
