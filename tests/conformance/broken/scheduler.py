"""The scheduler with one fault: `python scheduler.py FAULT [flags]`. What the conformance kit has to find."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable
from typing import Any

from quartet.services.scheduler import __main__, admission, core, request, schedule
from quartet.services.scheduler.block_pool import BlockPool
from quartet.services.scheduler.core import SchedulerCore
from quartet.services.scheduler.free_block_queue import FreeBlockQueue
from quartet.services.scheduler.kv_cache_manager import KVCacheManager
from quartet.services.scheduler.ledger import Ledger
from quartet.services.scheduler.rows import Rows
from quartet.services.scheduler.schedule import StepScheduler
from quartet.services.scheduler.service import SchedulerService
from quartet.services.scheduler.state import SchedulerState
from quartet.services.scheduler.watchers import Watchers
from quartet.shared import link
from quartet.shared.block_hash import hash_root
from quartet.shared.link import BinderLink
from quartet.shared.messages import ChoicePast, Output, StepPlan


def forgets_session_check() -> None:
    original = BinderLink.on_frame

    def on_frame(self: BinderLink, route: bytes, session: bytes, payload: bytes) -> None:
        peer = self.peers.get(route)
        original(self, route, peer.session if peer and payload[:2] != b"\x99\x01" else session, payload)

    BinderLink.on_frame = on_frame  # type: ignore[method-assign]


def takes_any_version() -> None:
    link.incompatible = lambda hello: None


def stands_still() -> None:
    original = SchedulerService.status
    SchedulerService.status = lambda self: original(self)._replace(progress=1)  # type: ignore[method-assign]


def plans_before_granted() -> None:
    original = SchedulerCore.executor_up

    def executor_up(self: SchedulerCore, model: Any) -> Any:
        effects = original(self, model)
        self.state.epoch = 1
        return effects

    SchedulerCore.executor_up = executor_up  # type: ignore[method-assign]


def skips_a_step_id() -> None:
    original = StepScheduler.schedule

    def step(self: StepScheduler) -> StepPlan | None:
        if self._state.next_step_id == 3:
            self._state.next_step_id += 1
        return original(self)

    StepScheduler.schedule = step  # type: ignore[method-assign]


def three_plans_in_flight() -> None:
    core.MAX_PLANS_IN_FLIGHT = 3


def reuses_a_row_early() -> None:
    def take_left(self: Rows) -> list[int]:
        left, self._left = self._left, []
        for row in left:
            heapq.heappush(self._free, row)
        return left

    Rows.take_left = take_left  # type: ignore[method-assign]
    Rows.release = lambda self, rows: None  # type: ignore[method-assign]


def hands_out_block_0() -> None:
    original = BlockPool.reset

    def reset(self: BlockPool) -> None:
        original(self)
        self.blocks = [type(self.null_block)(i) for i in range(self.num_blocks + 1)]
        self.free_block_queue = FreeBlockQueue(self.blocks[:-1])

    BlockPool.reset = reset  # type: ignore[method-assign]


def shares_blocks_by_position() -> None:
    request.block_hash = lambda parent, tokens: len(parent + tokens).to_bytes(4, "little") + parent[:28]


def forgets_the_salt() -> None:
    request.hash_root = lambda keys: hash_root()


def exceeds_the_budget() -> None:
    original = SchedulerState.configure

    def configure(self: SchedulerState, model: Any) -> None:
        original(self, model)
        self.max_num_batched_tokens += 8

    SchedulerState.configure = configure  # type: ignore[method-assign]


def leaks_blocks() -> None:
    KVCacheManager.free = KVCacheManager.forget  # type: ignore[method-assign]


def ignores_attempts() -> None:
    Ledger.is_outdated = lambda self, request_id, attempt: False  # type: ignore[method-assign]


def loses_the_past() -> None:
    original = SchedulerCore._add_choice
    SchedulerCore._add_choice = lambda self, group, past: original(  # type: ignore[method-assign]
        self, group, ChoicePast(past.index)
    )


def loses_an_output() -> None:
    original = SchedulerCore._take_effects

    def take_effects(self: SchedulerCore) -> Any:
        for owner in self.ledger.owners.values():
            owner.outbox[:] = [output for output in owner.outbox if output.start != 2 or output.finish_reason]
        return original(self)

    SchedulerCore._take_effects = take_effects  # type: ignore[method-assign]


def swaps_outputs() -> None:
    original = SchedulerCore._take_effects

    def take_effects(self: SchedulerCore) -> Any:
        for owner in self.ledger.owners.values():
            steps: list[Output] = [output for output in owner.outbox if len(output.token_ids) == 1]
            if len(steps) > 1:
                steps[0].token_ids, steps[1].token_ids = steps[1].token_ids, steps[0].token_ids
        return original(self)

    SchedulerCore._take_effects = take_effects  # type: ignore[method-assign]


def computes_an_ended_past() -> None:
    request.Request.finish_condition = lambda self: (  # type: ignore[method-assign]
        original(self) if self.was_scheduled else None
    )


original = request.Request.finish_condition


def forgets_after_finish() -> None:
    finish = SchedulerCore.finish

    def and_forget(self: SchedulerCore, message: Any) -> Any:
        effects = finish(self, message)
        group = self.ledger.current(message.request_id, message.attempt)
        if group is not None:
            self._drop(group)
        return effects

    SchedulerCore.finish = and_forget  # type: ignore[method-assign]


def ignores_offers() -> None:
    original = SchedulerState.granted
    SchedulerState.granted = lambda self, epoch, ids, hashes: original(  # type: ignore[method-assign]
        self, epoch, [], []
    )


def ignores_a_failed_step() -> None:
    SchedulerCore.step_failed = lambda self, message: []  # type: ignore[method-assign]


def takes_results_of_old_epochs() -> None:
    original = SchedulerCore.step_result

    def step_result(self: SchedulerCore, message: Any) -> Any:
        message.epoch = self.state.epoch
        return original(self, message)

    SchedulerCore.step_result = step_result  # type: ignore[method-assign]


def refuses_nothing() -> None:
    admission.never_fits = lambda model, message: None


def keeps_vocabularies_to_itself() -> None:
    SchedulerCore._tell = lambda self, parts: None  # type: ignore[method-assign]


def takes_the_blame_for_texts() -> None:
    original = SchedulerCore.step_result

    def step_result(self: SchedulerCore, message: Any) -> Any:
        message.invalid_rows = []
        return original(self, message)

    SchedulerCore.step_result = step_result  # type: ignore[method-assign]


def tells_of_no_freed_blocks() -> None:
    original = BlockPool.free_blocks

    def free_blocks(self: BlockPool, block_table: Any) -> None:
        changed, self.changed = self.changed, None
        original(self, block_table)
        self.changed = changed

    BlockPool.free_blocks = free_blocks  # type: ignore[method-assign]


def goes_on_telling() -> None:
    Watchers.leave = lambda self, key: None  # type: ignore[method-assign]


# Each fault with the scenario that meets it and the rule that must be named.
FAULTS: dict[Callable[[], None], tuple[str, str]] = {
    forgets_session_check: ("tokenizer_link", "link.fencing"),
    takes_any_version: ("executor_link", "link.version"),
    stands_still: ("heartbeats", "link.progress"),
    plans_before_granted: ("takeover_first", "plan.takeover"),
    skips_a_step_id: ("busy", "plan.step-ids"),
    three_plans_in_flight: ("in_flight", "plan.in-flight"),
    reuses_a_row_early: ("rows", "plan.row-reuse"),
    hands_out_block_0: ("busy", "plan.null-block"),
    shares_blocks_by_position: ("busy", "plan.blocks"),
    forgets_the_salt: ("prefixes", "plan.hash-root"),
    exceeds_the_budget: ("busy", "plan.budget"),
    leaks_blocks: ("attempts", "loads.idle"),
    ignores_attempts: ("attempts", "request.attempts"),
    loses_the_past: ("other_past", "output.unchanged"),
    loses_an_output: ("ends", "output.contiguous"),
    swaps_outputs: ("busy", "output.tokens"),
    computes_an_ended_past: ("ended_past", "request.ended-past"),
    forgets_after_finish: ("finish", "request.finish"),
    ignores_offers: ("offers", "recovery.offers"),
    ignores_a_failed_step: ("failure", "recovery.failure"),
    takes_results_of_old_epochs: ("old_epoch", "recovery.old-epoch"),
    refuses_nothing: ("refusals", "refuse.field"),
    keeps_vocabularies_to_itself: ("structured_requests", "structured.passed"),
    takes_the_blame_for_texts: ("structured_requests", "structured.invalid"),
    tells_of_no_freed_blocks: ("watched_line", "watch.account"),
    goes_on_telling: ("watched_line", "watch.steps"),
}

if __name__ == "__main__":
    {fault.__name__: fault for fault in FAULTS}[sys.argv[1]]()
    assert schedule  # patched through its users
    raise SystemExit(__main__.main(sys.argv[2:]))
