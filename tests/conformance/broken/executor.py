"""The executor with one fault: `python executor.py FAULT [flags]`. What the conformance kit has to find."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from quartet.services.executor import __main__, noise, sampler
from quartet.services.executor.block_hashes import BlockHashes, _Chain
from quartet.services.executor.input_batch import InputBatch
from quartet.services.executor.loop import ExecutorLoop
from quartet.services.executor.model_runner import ModelRunner
from quartet.services.executor.plan_columns import PlanError
from quartet.services.executor.service import ExecutorService
from quartet.services.executor.step_timing import StepTiming
from quartet.services.executor.structured_rows import StructuredRows
from quartet.shared.block_hash import hash_root
from quartet.shared.link import DialerLink


def forgets_session_check() -> None:
    original = DialerLink.on_frame
    DialerLink.on_frame = lambda self, session, payload: original(  # type: ignore[method-assign]
        self, self._session, payload
    )


def stands_still() -> None:
    original = ExecutorService._status
    ExecutorService._status = lambda self: original(self)._replace(progress=1)  # type: ignore[method-assign]


def grants_one_epoch() -> None:
    original = ExecutorLoop._takeover

    def takeover(self: ExecutorLoop, message: Any) -> Any:
        self._epoch -= 1
        return original(self, message)

    ExecutorLoop._takeover = takeover  # type: ignore[method-assign]


def keeps_rows_over_a_takeover() -> None:
    ModelRunner.reset = lambda self: None  # type: ignore[method-assign]


def runs_over_gaps() -> None:
    original = ExecutorLoop._plan

    def plan(self: ExecutorLoop, plan: Any) -> Any:
        self._next_step_id = plan.step_id
        return original(self, plan)

    ExecutorLoop._plan = plan  # type: ignore[method-assign]


def goes_on_after_a_refusal() -> None:
    original = ExecutorLoop._refuse

    def refuse(self: ExecutorLoop, plan: Any, reason: str) -> Any:
        answer = original(self, plan, reason)
        self._accepts_plans = True
        return answer

    ExecutorLoop._refuse = refuse  # type: ignore[method-assign]


def applies_before_it_checks() -> None:
    original = ModelRunner.launch

    def launch(self: ModelRunner, plan: Any) -> Any:
        try:
            return original(self, plan)
        except PlanError:
            ids = [np.frombuffer(row.block_ids, "<u4").astype(np.int64) for row in plan.new_rows]
            if ids:
                self._hashes.erase(np.minimum(np.concatenate(ids), self._batch.num_blocks))
            raise

    ModelRunner.launch = launch  # type: ignore[method-assign]


def takes_block_0() -> None:
    InputBatch._check_block_ids = lambda self, block_ids: None  # type: ignore[method-assign]


def sorts_prefill_rows() -> None:
    original = ModelRunner.finish

    def finish(self: ModelRunner, launched: Any) -> Any:
        result = original(self, launched)
        order = np.argsort(launched.step.sampled_rows, kind="stable")
        if len(order):
            result.token_ids = np.frombuffer(result.token_ids, "<u4")[order].tobytes()
        return result

    ModelRunner.finish = finish  # type: ignore[method-assign]


def offers_half_written_blocks() -> None:
    original = BlockHashes.record

    def record(self: BlockHashes, rows: Any, num_computed: Any, table: Any, tokens: Any) -> None:
        original(self, rows, num_computed + self._block_size - 1, table, tokens)

    BlockHashes.record = record  # type: ignore[method-assign]


def offers_blocks_under_old_names() -> None:
    BlockHashes.erase = lambda self, block_ids: None  # type: ignore[method-assign]


def hashes_without_the_root() -> None:
    original = BlockHashes.start_row

    def start_row(self: BlockHashes, req_index: int, root: bytes, num_computed: int, records: bool) -> None:
        original(self, req_index, root, num_computed, records)
        self._chains[req_index] = _Chain(hash_root(), num_computed // self._block_size, records)

    BlockHashes.start_row = start_row  # type: ignore[method-assign]


def draws_by_the_clock() -> None:
    draws = np.random.default_rng()
    uniform = lambda seeds, choices, outputs: draws.random(len(seeds))  # noqa: E731
    noise.uniform = sampler.uniform = uniform


def draws_alike_for_all_choices() -> None:
    original = noise.uniform
    noise.uniform = sampler.uniform = lambda seeds, choices, outputs: original(seeds, choices * np.uint64(0), outputs)


def ignores_structured_output() -> None:
    StructuredRows.allowed = lambda self, rows: None  # type: ignore[method-assign]


def begins_structured_output_anew() -> None:
    original = StructuredRows.add
    StructuredRows.add = lambda self, index, structured, vocabulary, outputs, ends: original(  # type: ignore[method-assign]
        self, index, structured, vocabulary, [], ends
    )


def blames_no_text() -> None:
    StructuredRows.invalid = lambda self, req_index: False  # type: ignore[method-assign]


def names_another_step() -> None:
    original = StepTiming.end

    def end(self: StepTiming, epoch: int, step_id: int) -> Any:
        timed = original(self, epoch, step_id)
        if timed is not None:
            timed.step_id += 1
        return timed

    StepTiming.end = end  # type: ignore[method-assign]


# Each fault with the scenario that meets it and the rule that must be named.
FAULTS: dict[Callable[[], None], tuple[str, str]] = {
    forgets_session_check: ("scheduler_link", "link.fencing"),
    stands_still: ("heartbeats", "link.progress"),
    grants_one_epoch: ("takeovers", "takeover.granted"),
    keeps_rows_over_a_takeover: ("takeovers", "result.step"),
    runs_over_gaps: ("gaps", "plan.gap"),
    goes_on_after_a_refusal: ("nothing_applied", "plan.nothing-applied"),
    applies_before_it_checks: ("nothing_applied", "plan.nothing-applied"),
    takes_block_0: ("contradictions", "plan.contradiction"),
    sorts_prefill_rows: ("order", "result.order"),
    offers_half_written_blocks: ("hashes", "hashes.rewritten"),
    offers_blocks_under_old_names: ("hashes", "hashes.rewritten"),
    hashes_without_the_root: ("hashes", "hashes.root"),
    draws_by_the_clock: ("seeds", "sampling.seed"),
    draws_alike_for_all_choices: ("seeds", "sampling.choice"),
    ignores_structured_output: ("structured_rows", "structured.kept"),
    begins_structured_output_anew: ("structured_rows", "structured.resumed"),
    blames_no_text: ("structured_rows", "structured.invalid"),
    names_another_step: ("timed_steps", "watch.timed"),
}

if __name__ == "__main__":
    {fault.__name__: fault for fault in FAULTS}[sys.argv[1]]()
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    raise SystemExit(__main__.main())
