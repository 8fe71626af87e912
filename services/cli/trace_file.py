"""Events of /live as a trace in Chrome's format, which Perfetto and chrome://tracing read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

GATEWAY, SCHEDULER, EXECUTOR, REQUESTS, LINE = 1, 3, 4, 5, 6
# Of the first tokenizer; each is a process of its own.
TOKENIZER = 20
NAMES = {
    GATEWAY: "gateway",
    SCHEDULER: "scheduler",
    EXECUTOR: "executor",
    REQUESTS: "requests",
    LINE: "services",
}
# Tracks. Two steps are in flight at a time, so each has its own.
SCHEDULE, UPDATE, IN_FLIGHT = 1, 2, 3
PHASES, STEPS = 1, 2
THREADS = {
    (GATEWAY, 1): "deltas",
    (SCHEDULER, SCHEDULE): "schedule",
    (SCHEDULER, UPDATE): "update",
    (SCHEDULER, IN_FLIGHT): "in flight, even steps",
    (SCHEDULER, IN_FLIGHT + 1): "in flight, odd steps",
    (EXECUTOR, PHASES): "phases",
    (EXECUTOR, STEPS): "even steps",
    (EXECUTOR, STEPS + 1): "odd steps",
    (LINE, 1): "changes",
}
# What a request does after each of its events.
SPANS = {"queued": "queued", "admitted": "prefill", "first_token": "decode", "preempted": "preempted"}
# And what its client's stream does at the gateway.
STREAM_SPANS = {"opened": "until accepted", "accepted": "until its first token", "first_token": "streaming"}


class Trace:
    """`add` takes events in their order; `build` gives the file's object."""

    def __init__(self) -> None:
        self.steps: dict[tuple[int, int, float], dict[str, Any]] = {}
        self.num_steps_dropped = 0
        self.first_t = 0.0
        self.last_t = 0.0
        self._request_events: list[tuple[float, str, str]] = []
        self._stream_events: list[tuple[float, str, str]] = []
        self._spans: list[tuple[str, str, str, float, float, int, str | None]] = []
        self._counters: list[tuple[float, str, dict[str, int]]] = []
        self._services: dict[tuple[str, str], dict[str, Any]] = {}
        self._changes: list[tuple[float, str]] = []
        self._seen: set[str] = set()

    def add(self, name: str, data: dict[str, Any]) -> None:
        self.last_t = data["t"]
        self.first_t = self.first_t or data["t"]
        for step in data.get("steps", ()):
            # A snapshot has the last ones once more, and some from before.
            if step["returned_at"] >= self.first_t:
                self.steps[step["epoch"], step["step_id"], step["t"]] = step
        self.num_steps_dropped += data.get("num_steps_dropped", 0)
        for request in data.get("requests", ()):
            self._begin(request)
        for t, key, what in data.get("request_events", ()):
            self._seen.add(key)
            self._request_events.append((t, key, what))
        self._stream_events += map(tuple, data.get("stream_events", ()))
        self._spans += map(tuple, data.get("spans", ()))
        if pool := data.get("pool"):
            held = pool["num_blocks"] - pool["num_free"]
            self._counters.append((data["t"], "KV blocks", {"held": held, "named": pool["num_cached"]}))
        if queue := data.get("queue"):
            counts = {name: queue[f"num_{name}"] for name in ("running", "waiting", "preempted")}
            self._counters.append((data["t"], "requests", counts))
        if "services" in data:
            self._note_services(data["t"], data["services"])

    @property
    def num_requests(self) -> int:
        return len({key for _, key, _ in self._request_events})

    def build(self) -> dict[str, Any]:
        steps = sorted(self.steps.values(), key=lambda step: step["t"])
        offset = clock_offset(steps)
        events = list(_metadata())
        for step in steps:
            events += _scheduler_part(step)
            events += _executor_part(step, offset)
        events += _Spans(REQUESTS, "request", SPANS).build(self._request_events, self.last_t)
        events += _Spans(GATEWAY, "stream", STREAM_SPANS).build(self._stream_events, self.last_t)
        events += _work(self._spans)
        for t, name, values in self._counters:
            events.append({"ph": "C", "pid": SCHEDULER, "ts": _us(t), "name": name, "args": values})
        for t, what in self._changes:
            events.append({"ph": "i", "s": "g", "pid": LINE, "tid": 1, "ts": _us(t), "name": what, "cat": "service"})
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {
                "clock": "seconds since 1970 of the scheduler, in microseconds",
                "executor_clock_offset_ms": round(1000 * offset, 3),
                "num_steps_dropped": self.num_steps_dropped,
            },
        }

    def _begin(self, request: dict[str, Any]) -> None:
        """A request that was there before its first event is seen: what it does has begun before."""
        key = request["key"]
        if key in self._seen or request["state"] in ("finished", "dropped"):
            return
        self._seen.add(key)
        if request.get("arrived_at", self.first_t) >= self.first_t:
            return  # its own events tell
        prefilled = request["num_computed_tokens"] >= request.get("num_prompt_tokens", 0)
        running = "first_token" if prefilled else "admitted"
        what = {"running": running, "preempted": "preempted"}.get(request["state"], "queued")
        self._request_events.append((self.first_t, key, what))

    def _note_services(self, t: float, services: list[dict[str, Any]]) -> None:
        known = {(s["role"], s["incarnation"]): s for s in services}
        for key, service in known.items():
            before, name = self._services.get(key), f"{service['role']} {service['name']}"
            if before is None:
                if self._services:
                    self._changes.append((t, f"{name} came"))
            elif before["alive"] and not service["alive"]:
                self._changes.append((t, f"{name} went"))
            elif before["ready"] != service["ready"]:
                self._changes.append((t, f"{name} is {'ready' if service['ready'] else 'not ready'}"))
        self._services |= known


def clock_offset(steps: Iterable[dict[str, Any]]) -> float:
    """Seconds to add to the executor's clock: 0 where all of its steps lie between their plans and results, else
    what puts most of them there."""
    least, most = float("-inf"), float("inf")
    for step in steps:
        executor = step["executor"]
        if executor and executor["phases"]:
            _, start, duration = executor["phases"][-1]
            least = max(least, step["t"] - executor["t"])
            most = min(most, step["returned_at"] - executor["t"] - (start + duration) / 1000)
    return 0.0 if least <= 0.0 <= most or least == float("-inf") else (least + most) / 2


def _metadata() -> Iterable[dict[str, Any]]:
    for pid, name in NAMES.items():
        yield from _process(pid, name, pid)
    for (pid, tid), name in THREADS.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _process(pid: int, name: str, place: int) -> Iterable[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": place}}


def _scheduler_part(step: dict[str, Any]) -> list[dict[str, Any]]:
    number, planned, returned = step["step_id"], step["t"], step["returned_at"]
    schedule, update = step["schedule_ms"] / 1000, step["update_ms"] / 1000
    names = ("epoch", "num_prefill_tokens", "num_decode_tokens", "token_budget", "num_running", "num_waiting", "lost")
    args = {name: step[name] for name in names} | {"prefills": dict(step["prefills"])}
    kind = f"{step['num_prefill_tokens']} prefill + {step['num_decode_tokens']} decode"
    track = IN_FLIGHT + number % 2
    parts = [
        _slice(SCHEDULER, SCHEDULE, f"schedule {number}", planned - schedule, schedule, args),
        _slice(SCHEDULER, track, f"step {number}: {kind}", planned, returned - planned, args),
    ]
    if not step["lost"]:
        parts.append(_slice(SCHEDULER, UPDATE, f"update {number}", returned, update, {}))
    return parts


def _executor_part(step: dict[str, Any], offset: float) -> list[dict[str, Any]]:
    executor = step["executor"]
    if not executor or not executor["phases"]:
        return []
    began = executor["t"] + offset
    _, start, duration = executor["phases"][-1]
    number = step["step_id"]
    args = {"epoch": step["epoch"], "num_tokens": step["num_prefill_tokens"] + step["num_decode_tokens"]}
    parts = [_slice(EXECUTOR, STEPS + number % 2, f"step {number}", began, (start + duration) / 1000, args)]
    parts += [
        _slice(EXECUTOR, PHASES, phase, began + start / 1000, duration / 1000, {"step": number})
        for phase, start, duration in executor["phases"]
    ]
    return parts


class _Spans:
    """What requests do one after the other, under `pid`; those that go on are cut at the end. `names` has what each
    of their events begins; any other is an end."""

    def __init__(self, pid: int, whole: str, names: dict[str, str]) -> None:
        self._pid = pid
        self._whole = whole
        self._names = names

    def build(self, events: Iterable[tuple[float, str, str]], end: float) -> list[dict[str, Any]]:
        open_spans: dict[str, str] = {}
        found: list[dict[str, Any]] = []
        for t, key, what in sorted(events, key=lambda e: e[0]):
            if key in open_spans:
                found.append(self._event("e", open_spans.pop(key), key, t))
            else:
                found.append(self._event("b", self._whole, key, t))
            if what in self._names:
                open_spans[key] = self._names[what]
                found.append(self._event("b", self._names[what], key, t))
            else:
                found.append(self._event("e", self._whole, key, t, {"ends": what}))
        for key, name in open_spans.items():
            found.append(self._event("e", name, key, end))
            found.append(self._event("e", self._whole, key, end, {"ends": "after the trace"}))
        return found

    def _event(self, ph: str, name: str, key: str, t: float, args: dict[str, Any] | None = None) -> dict[str, Any]:
        return _async(ph, self._whole, key, self._pid, name, t, args)


def _work(spans: Iterable[tuple[str, str, str, float, float, int, str | None]]) -> Iterable[dict[str, Any]]:
    """Parts of the work of gateway and tokenizers: slices, or, of one request, a span, since several may be at once."""
    tokenizers: dict[str, int] = {}
    for role, service, name, t, ms, num_tokens, request_id in spans:
        pid = GATEWAY
        if role == "tokenizer":
            pid = tokenizers.setdefault(service, TOKENIZER + len(tokenizers))
        args = {"num_tokens": num_tokens}
        if request_id is None:
            yield _slice(pid, 1, name, t, ms / 1000, args)
        else:
            yield _async("b", name, request_id, pid, name, t, args | {"request_id": request_id})
            yield _async("e", name, request_id, pid, name, t + ms / 1000, None)
    for service, pid in tokenizers.items():
        yield from _process(pid, f"tokenizer {service}", 2)
        yield {"ph": "M", "pid": pid, "tid": 1, "name": "thread_name", "args": {"name": "outputs"}}


def _async(
    ph: str, category: str, key: str, pid: int, name: str, t: float, args: dict[str, Any] | None
) -> dict[str, Any]:
    event = {"ph": ph, "cat": category, "id": key, "pid": pid, "tid": 1, "name": name, "ts": _us(t)}
    return event | {"args": args} if args else event


def _slice(pid: int, tid: int, name: str, t: float, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": _us(t), "dur": _us(max(0.0, seconds)), "args": args}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)
