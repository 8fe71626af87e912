"""`python -m bench.claims.watched_scheduler FILE [flags]`: the scheduler, its block tables looked at in each step.

On SIGUSR1 it writes what it has seen so far to FILE, as JSON. What a look costs grows with the running requests, about
a microsecond each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from quartet.services.scheduler.__main__ import main
from quartet.services.scheduler.core import SchedulerCore
from quartet.services.scheduler.kv_cache_manager import KVCacheManager
from quartet.services.scheduler.state import SchedulerState


class Watch:
    """Sums over steps; slots are tokens' places in KV memory. `tables`: of the blocks in all requests' tables, each
    as often as it is in one; `allocated`: of the blocks that anybody holds. `reserved` is what the same running
    requests would have taken in one piece each, for the whole context, for the answer's length rounded up to a power
    of two, or for exactly what they will need."""

    def __init__(self) -> None:
        self.steps = 0
        self.running = 0
        self.max_running = 0
        self.allocated = 0
        self.tables = 0
        self.tokens = 0
        self.reserved = {"max_model_len": 0, "power_of_two": 0, "exact": 0}
        self.max_allocated = 0
        # Blocks that requests got, by hits and anew.
        self.hit_blocks = 0
        self.new_blocks = 0
        self.preemptions = 0

    def look(self, state: SchedulerState) -> None:
        if not state.running or state.model is None:
            return
        block_size, max_model_len = state.kv.block_size, state.model.max_model_len
        self.steps += 1
        self.running += len(state.running)
        self.max_running = max(self.max_running, len(state.running))
        allocated = (state.kv.pool.num_blocks - state.kv.num_free_blocks) * block_size
        self.allocated += allocated
        self.max_allocated = max(self.max_allocated, allocated)
        self.preemptions = state.totals.preemptions
        for request in state.running:
            answer = min(request.max_tokens, max_model_len - request.num_prompt_tokens)
            self.tables += len(request.blocks) * block_size
            self.tokens += request.num_computed_tokens
            self.reserved["max_model_len"] += max_model_len
            self.reserved["power_of_two"] += request.num_prompt_tokens + (1 << (answer - 1).bit_length())
            self.reserved["exact"] += request.num_prompt_tokens + answer

    def write(self, path: Path) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(vars(self)))
        os.replace(part, path)


def watch(watcher: Watch) -> None:
    """Has the core and its block tables tell the watcher; their results are as before."""
    step_result, allocate, take = (
        SchedulerCore.step_result,
        KVCacheManager.allocate_slots,
        KVCacheManager.take_computed_blocks,
    )

    def looked_at(core: SchedulerCore, *arguments: Any) -> Any:
        watcher.look(core.state)
        return step_result(core, *arguments)

    def counted_new(manager: KVCacheManager, *arguments: Any) -> Any:
        blocks = allocate(manager, *arguments)
        watcher.new_blocks += len(blocks)
        return blocks

    def counted_hits(manager: KVCacheManager, request: Any, computed_blocks: Any) -> Any:
        watcher.hit_blocks += len(computed_blocks)
        return take(manager, request, computed_blocks)

    SchedulerCore.step_result = looked_at  # type: ignore[method-assign]
    KVCacheManager.allocate_slots = counted_new  # type: ignore[method-assign]
    KVCacheManager.take_computed_blocks = counted_hits  # type: ignore[method-assign]


if __name__ == "__main__":
    seen = Watch()
    watch(seen)
    signal.signal(signal.SIGUSR1, lambda *_: seen.write(Path(sys.argv[1])))
    sys.exit(main(sys.argv[2:]))
