"""Watching through each service. None need tell anything; what one does tell has to be so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quartet.shared.conformance.columns import unpack_u16, unpack_u32
from quartet.shared.messages import (
    RequestState,
    Role,
    StepResult,
    StepTimed,
    Watch,
    WatchedService,
    WatchEnded,
    WatchEvents,
    WatchSteps,
)

if TYPE_CHECKING:
    from quartet.shared.conformance.executor import ExecutorKit
    from quartet.shared.conformance.report import Report
    from quartet.shared.conformance.scheduler import SchedulerKit
    from quartet.shared.conformance.tokenizer import TokenizerKit

EXECUTOR_RULES = {"watch.timed": "while it is asked for, StepTimed goes before the result of the step that it names"}
SCHEDULER_RULES = {
    "watch.account": "what is told from seq 0 on is what is so: who holds which blocks, and what requests have",
    "watch.end": "nothing is told after a Watch with interval 0",
    "watch.steps": "the executor is told with the first Watch and after the last, and after each Granted in between",
}
TOKENIZER_RULES = {
    "watch.passed-on": "a gateway's Watch reaches the scheduler, and each next one, and events the gateways that watch",
    "watch.ended": "gateways that watch are told when the scheduler goes",
}
# So long a service may take to tell anything; then it is taken for one that does not.
PATIENCE = 2.0
INTERVAL_MS = 50
REST = 0.4


class _Account:
    """What the events have told so far."""

    def __init__(self, report: Report) -> None:
        self._check = report.check
        self._seq = -1
        self.refs: dict[int, int] = {}
        self.requests: dict[int, Any] = {}
        self.tables: dict[int, list[int]] = {}

    def take(self, told: list[WatchEvents]) -> None:
        for events in told:
            right = events.seq in (0, self._seq + 1) if self._seq >= 0 else events.seq == 0
            self._check("watch.account", right, f"seq {events.seq} came after {self._seq}")
            self._seq = events.seq
            if not events.seq:
                self.refs, self.requests, self.tables = {}, {}, {}
            ids, refs = unpack_u32(events.block_ids), unpack_u16(events.block_refs)
            sizes = {len(ids), len(refs), len(unpack_u32(events.block_hits))}
            sizes |= {-(-len(events.block_hashes) // 8), -(-len(events.block_parents) // 8)}
            self._check("watch.account", len(sizes) == 1, f"the columns of blocks have {sorted(sizes)} entries")
            self.refs.update(zip(ids, refs, strict=True))
            for request in events.requests:
                table = self.tables.get(request.request_id, [])
                start = request.table_start
                self._check("watch.account", start <= len(table), f"a table of {len(table)} blocks goes on at {start}")
                self.requests[request.request_id] = request
                self.tables[request.request_id] = table[:start] + unpack_u32(request.table)
        told.clear()


def watched_line(kit: SchedulerKit) -> None:
    """One session works and another one looks."""
    tokenizer, executor = kit.start(running=False)
    watcher, check = kit.tokenizer(), kit.report.check
    kit.loop.expect("plan.takeover", lambda: executor.granted, "no Takeover came to an executor")
    watcher.link.send(Watch(INTERVAL_MS))
    watcher.get_loads()
    if not kit.loop.until(lambda: watcher.watched, PATIENCE):
        return
    account = _Account(kit.report)
    asked = tokenizer.ask(kit.prompt(40), max_tokens=12)
    kit.until_outputs(asked, 4)
    kit.loop.run_for(REST)
    account.take(watcher.watched)
    request = account.requests.get(asked.request_id)
    check("watch.account", request is not None, "a request that runs is not told of")
    assert request is not None
    state, count = RequestState(request.state), request.num_output_tokens
    right = state is RequestState.RUNNING and count == len(asked.outputs[0])
    check("watch.account", right, f"it is {state.name} with {count} outputs, and runs with {len(asked.outputs[0])}")
    held = {block_id for row in executor.rows.values() for block_id in row.table}
    table = account.tables[asked.request_id]
    check("watch.account", held <= set(table), f"its table is {table}, the executor's rows hold {sorted(held)}")
    owned = {block_id for block_id, refs in account.refs.items() if refs}
    check("watch.account", owned == set(table), f"held are the blocks {sorted(owned)}, its table is {table}")
    executor.running = True
    tokenizer.wait(asked)
    kit.loop.run_for(REST)
    account.take(watcher.watched)
    state = RequestState(account.requests[asked.request_id].state)
    check("watch.account", state is RequestState.FINISHED, f"a finished request is told to be {state.name}")
    owned = {block_id for block_id, refs in account.refs.items() if refs}
    check("watch.account", not owned, f"nobody is there, and the blocks {sorted(owned)} are held")

    check("watch.steps", executor.watch_steps == [True], f"WatchSteps came as {executor.watch_steps}, right is [true]")
    executor.die(keep_blocks=True)
    kit.loop.expect("watch.steps", lambda: executor.watch_steps == [True, True], "WatchSteps after another Granted")
    watcher.link.send(Watch(0))
    watcher.get_loads()
    kit.loop.expect("watch.steps", lambda: executor.watch_steps == [True, True, False], "WatchSteps after the last")
    watcher.watched.clear()
    tokenizer.wait(tokenizer.ask(kit.prompt(9)))
    kit.loop.run_for(REST)
    check("watch.end", not watcher.watched, f"{len(watcher.watched)} WatchEvents came after Watch with interval 0")
    kit.idle(tokenizer)


def watching_gateway(kit: TokenizerKit) -> None:
    """It goes through, whichever scheduler there is."""
    kit.start()
    link, scheduler = kit.gateway.link, kit.scheduler
    link.send(Watch(100))
    if not kit.loop.until(lambda: scheduler.of(Watch), PATIENCE):
        return
    watch = scheduler.take("watch.passed-on", Watch)
    kit.report.check("watch.passed-on", watch.interval_ms == 100, f"an interval of 100 came as {watch.interval_ms}")
    events = _events(scheduler.incarnation)
    scheduler.send(events)
    kit.loop.expect("watch.passed-on", lambda: kit.gateway.watched == [events], "the events at the gateway, as sent")
    scheduler.close()
    kit.loop.expect("watch.ended", lambda: kit.gateway.watched[1:] == [WatchEnded()], "WatchEnded without a scheduler")
    scheduler.inbox.clear()
    scheduler.restart()
    scheduler.wait_open()
    kit.loop.expect("watch.passed-on", lambda: scheduler.of(Watch), "Watch to a scheduler that comes back")
    scheduler.inbox.clear()
    link.send(Watch(0))
    kit.loop.expect("watch.passed-on", lambda: scheduler.of(Watch), "Watch to the scheduler after the last")
    watch = scheduler.take("watch.passed-on", Watch)
    kit.report.check("watch.passed-on", watch.interval_ms == 0, f"an interval of 0 came as {watch.interval_ms}")


def _events(incarnation: int) -> WatchEvents:
    service = WatchedService(Role.SCHEDULER, "conformance-scheduler", incarnation, "1", True, False, False)
    return WatchEvents(
        incarnation, 0, 1.5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        b"", b"", b"", b"", b"", [], 0, [], 0, [], [service],
    )  # fmt: skip


def timed_steps(kit: ExecutorKit) -> None:
    """With StepTimed before each result, or without."""
    kit.start()
    link, check = kit.link, kit.report.check
    link.send(WatchSteps(True))
    row = kit.row(0, kit.tokens(5), kit.blocks(1, 12))
    plans = [kit.send(new=[row], prefill=[(0, 5)]), kit.send(decode=[0])]
    kit.loop.expect("result.step", lambda: len(link.of(StepResult)) == 2, "the results of two steps")
    timed = link.of(StepTimed)
    if not timed:
        return
    names = [(type(m).__name__, m.step_id) for m in link.inbox if isinstance(m, (StepTimed, StepResult))]
    right = [(kind, plan.step_id) for plan in plans for kind in ("StepTimed", "StepResult")]
    check("watch.timed", names == right, f"{names} came, right is {right}")
    for message in timed:
        check("watch.timed", message.epoch == kit.epoch, f"it is of epoch {message.epoch}, which is {kit.epoch}")
        ends = [span.start_us + span.duration_us for span in message.spans]
        starts = [span.start_us for span in message.spans]
        ordered = bool(starts) and starts == sorted(starts) and min(starts) >= 0
        check("watch.timed", ordered and ends == sorted(ends), f"its spans are {message.spans}")
    link.inbox.clear()
    link.send(WatchSteps(False))
    kit.send(decode=[0])
    kit.loop.expect("result.step", lambda: link.of(StepResult), "the result of a step")
    check("watch.timed", not link.of(StepTimed), "a StepTimed came after WatchSteps had ended them")
    link.inbox.clear()
