"""A simulated line around the scheduler's core: owners on the left, an executor that believes only its plans."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.fake_executor import EOS, FakeExecutor, continuation, model_info

from quartet.services.scheduler.core import EXECUTOR, Effect, SchedulerCore
from quartet.services.scheduler.invariants import check_invariants
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.shared.messages import (
    Abort,
    ChoicePast,
    EraseHashes,
    Failed,
    Finish,
    FinishReason,
    Loads,
    ModelInfo,
    NewRequest,
    Outputs,
    PrefixCacheReset,
    PromptLogprobs,
    Release,
    ResetPrefixCache,
    Takeover,
    TokenLogprobs,
    decode,
    encode,
)
from quartet.shared.sampling_params import SamplingParams


@dataclass
class Asked:
    """A request as the left side's ledger has it."""

    message: NewRequest
    owner: Hashable
    attempt: int = 1
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finish_at: dict[int, int] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    failed: Failed | None = None
    aborted: bool = False
    added_at: int = 0

    @property
    def done(self) -> bool:
        return self.failed is not None or self.aborted or len(self.finished) == len(self.outputs)


class Sim:
    """Drives a core event by event; checks every invariant after each, and every output it gives."""

    def __init__(self, model: ModelInfo | None = None, seed: int = 0, **settings: Any) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.model = model or model_info()
        self.settings = SchedulerSettings(**settings)
        self.asked: dict[int, Asked] = {}
        self.loads: Loads | None = None
        self.num_forgotten = -1
        self.owners: set[Hashable] = set()
        self.executor: FakeExecutor | None = None
        self.num_events = 0
        self.num_owners = 0
        self.auto_release = True
        self.todo: list[Callable[[], list[Effect]]] = []
        self.core = self._new_core()

    def _new_core(self) -> SchedulerCore:
        return SchedulerCore(self.settings, self.random.getrandbits(63), lambda: self.now)

    # --- events -----------------------------------------------------------------------------------

    def event(self, effects: list[Effect]) -> None:
        self.num_events += 1
        check_invariants(self.core)
        self._dispatch(effects)
        while self.todo:
            self.event(self.todo.pop(0)())

    def schedule(self) -> None:
        self.event(self.core.schedule())

    def executor_up(self, executor: FakeExecutor | None = None, incarnation: int = 0) -> FakeExecutor:
        self.executor = executor or FakeExecutor(self.model)
        self.event(self.core.executor_up(self.executor.model, incarnation))
        return self.executor

    def executor_dies(self, *, planned: bool = False) -> None:
        self.executor = None
        self.event(self.core.executor_down(planned=planned))

    def scheduler_dies(self) -> None:
        """A new core; the owners add everything again and the executor offers its blocks."""
        self.core = self._new_core()
        for owner in self.owners:
            self.event(self.core.owner_up(owner))
        if self.executor is not None:
            self.executor_up(self.executor)
        for asked in self.asked.values():
            if not asked.done and asked.owner in self.owners:
                self.add(asked)

    def owner_up(self, owner: Hashable = "t0") -> None:
        self.owners.add(owner)
        self.event(self.core.owner_up(owner))

    def new_owner(self) -> str:
        """A session that was never up before, as every reconnect is."""
        self.num_owners += 1
        owner = f"owner {self.num_owners}"
        self.owner_up(owner)
        return owner

    def owner_dies(self, owner: Hashable) -> None:
        self.owners.discard(owner)
        self.event(self.core.owner_down(owner))

    def ask(
        self,
        prompt: list[int],
        *,
        owner: Hashable = "t0",
        n: int = 1,
        salt: str = "",
        priority: int = 0,
        tenant: str = "",
        pasts: dict[int, list[int]] | None = None,
        attempt: int = 1,
        prompt_logprobs_start: int = 0,
        read: bool = True,
        write: bool = True,
        **sampling: Any,
    ) -> Asked:
        if owner not in self.owners:
            self.owner_up(owner)
        sampling.setdefault("max_tokens", 8)
        sampling.setdefault("ignore_eos", True)
        message = NewRequest(
            request_id=self.random.getrandbits(64),
            attempt=attempt,
            prompt_token_ids=prompt,
            sampling=SamplingParams(**sampling),
            eos_token_ids=[EOS],
            choices=[],
            priority=priority,
            cache_salt=salt,
            tenant=tenant,
            prompt_logprobs_start=prompt_logprobs_start,
            read_prefix_cache=read,
            write_prefix_cache=write,
        )
        asked = Asked(message, owner, attempt, added_at=self.num_events)
        asked.outputs = {i: list((pasts or {}).get(i, [])) for i in range(n)}
        self.asked[message.request_id] = asked
        self.add(asked)
        return asked

    def add(self, asked: Asked) -> None:
        """Submits what is unfinished of it, with all that its owner has."""
        message = asked.message
        message.attempt = asked.attempt
        message.choices = [ChoicePast(i, list(ids)) for i, ids in asked.outputs.items() if i not in asked.finished]
        message.prompt_logprobs_start = max(message.prompt_logprobs_start, len(asked.prompt_logprobs))
        self.event(self.core.new_request(asked.owner, decode(encode(message))))

    def move(self, asked: Asked, owner: Hashable, lose: int = 0) -> None:
        """Another owner adds it, with some of the last tokens lost."""
        if owner not in self.owners:
            self.owner_up(owner)
        asked.owner = owner
        asked.attempt += 1
        for index, ids in asked.outputs.items():
            if index not in asked.finished:
                keep = max(0, len(ids) - lose)
                del ids[keep:]
                del asked.logprobs.get(index, [])[keep:]
        self.add(asked)

    def abort(self, asked: Asked) -> None:
        asked.aborted = True
        self.event(self.core.abort(Abort(asked.message.request_id, asked.attempt)))

    def reset_prefix_cache(self) -> int:
        """The number of blocks that held a known prefix."""
        self.num_forgotten = -1
        self.event(self.core.reset_prefix_cache("t0", ResetPrefixCache(1)))
        return self.num_forgotten

    def step(self) -> None:
        """The executor runs its oldest plan and the result arrives."""
        assert self.executor is not None
        if self.executor.queue:
            result = decode(encode(self.executor.step()))
            self.executor.delivered()
            self.event(self.core.step_result(result))

    def step_fails(self) -> None:
        assert self.executor is not None
        if self.executor.queue:
            self.event(self.core.step_failed(self.executor.fail_step()))

    def run(self, max_steps: int = 10_000) -> int:
        """Until nothing is left to do; gives the number of steps."""
        for steps in range(max_steps):
            self.schedule()
            if self.executor is None or not self.executor.queue:
                return steps
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    # --- what comes back --------------------------------------------------------------------------

    def _dispatch(self, effects: list[Effect]) -> None:
        for destination, message in effects:
            message = decode(encode(message))
            if destination is EXECUTOR:
                assert self.executor is not None
                if isinstance(message, Takeover):
                    granted = self.executor.take_over()
                    self.todo.append(lambda granted=granted: self.core.granted(granted))
                elif isinstance(message, EraseHashes):
                    self.executor.erase_hashes()
                else:
                    self.executor.receive(message)
            elif isinstance(message, Loads):
                self.loads = message
            elif isinstance(message, PrefixCacheReset):
                self.num_forgotten = message.num_blocks
            elif destination in self.owners:
                self._receive(destination, message)

    def _receive(self, owner: Hashable, message: Any) -> None:
        if isinstance(message, Outputs):
            for output in message.items:
                self._receive_output(owner, output)
        elif isinstance(message, PromptLogprobs):
            asked = self.asked[message.request_id]
            known = len(asked.prompt_logprobs)
            assert message.start <= known, "a gap in prompt logprobs"
            asked.prompt_logprobs += message.entries[known - message.start :]
        elif isinstance(message, Failed):
            self.asked[message.request_id].failed = message
        else:
            raise AssertionError(message)

    def _receive_output(self, owner: Hashable, output: Any) -> None:
        asked = self.asked[output.request_id]
        assert asked.owner == owner and output.attempt == asked.attempt
        assert not asked.aborted, "an output of an aborted request"
        index, ids = output.index, asked.outputs[output.index]
        assert index not in asked.finished, "an output after the finish"
        assert output.start <= len(ids), f"a gap: {output.start} after {len(ids)}"
        overlap = len(ids) - output.start
        assert output.token_ids[:overlap] == ids[output.start :], "a delivered token changed"
        ids += output.token_ids[overlap:]
        asked.cached[index] = output.num_cached_tokens
        if asked.message.sampling.logprobs is not None:
            assert len(output.logprobs) == len(output.token_ids)
            asked.logprobs.setdefault(index, []).extend(entry.logprob for entry in output.logprobs[overlap:])
        expected, _ = continuation(asked.message, index, [], self.model)
        assert ids == expected[: len(ids)], f"wrong content from output {output.start} on"
        stop_at = asked.finish_at.get(index, 1 << 60)
        if len(ids) > stop_at or (len(ids) == stop_at and output.finish_reason is None):
            self._stop_string(asked, index)
        elif output.finish_reason is not None:
            asked.finished[index] = output.finish_reason
        if asked.done and self.auto_release:
            self.todo.append(lambda: self.core.release(Release(output.request_id, asked.attempt)))

    def _stop_string(self, asked: Asked, index: int) -> None:
        del asked.outputs[index][asked.finish_at[index] :]
        asked.finished[index] = FinishReason.STOP
        finish = Finish(asked.message.request_id, asked.attempt, index, asked.finish_at[index])
        self.todo.append(lambda: self.core.finish(finish))

    # --- checks -----------------------------------------------------------------------------------

    def check_finished(self, asked: Asked) -> None:
        assert asked.failed is None, asked.failed
        assert not asked.aborted and asked.done, asked
        if asked.message.sampling.prompt_logprobs is not None:
            entries = [entry and entry.token_id for entry in asked.prompt_logprobs]
            assert entries == [None, *asked.message.prompt_token_ids[1:]]
        assert asked.message.read_prefix_cache or not any(asked.cached.values())
        for index, ids in asked.outputs.items():
            expected, reason = continuation(asked.message, index, [], self.model)
            if index in asked.finish_at and asked.finish_at[index] < len(expected):
                expected, reason = expected[: asked.finish_at[index]], FinishReason.STOP
            assert ids == expected
            assert asked.finished[index] == reason
            if asked.message.sampling.logprobs is not None and not asked.message.choices[0].output_token_ids:
                assert asked.logprobs[index][: len(ids)] == [-float(token_id) for token_id in ids]

    def check_idle(self) -> None:
        """Nothing is left of anything: no request, no row, no block."""
        state = self.core.state
        assert state.num_unfinished == 0 and not state.in_flight and not self.core.ledger.groups
        assert state.kv.num_free_blocks == self.model.num_blocks
        assert state.rows.num_free + state.rows.num_left == state.max_num_seqs


@pytest.fixture
def make_sim() -> Callable[..., Sim]:
    """Sim(model=None, seed=0, **settings), with an executor and owner "t0" up unless executor=False."""

    def make(executor: bool = True, model: dict[str, Any] | None = None, seed: int = 0, **settings: Any) -> Sim:
        sim = Sim(model_info(**(model or {})), seed, **settings)
        sim.owner_up("t0")
        if executor:
            sim.executor_up()
        return sim

    return make


@pytest.fixture
def fake_executor() -> type[FakeExecutor]:
    return FakeExecutor
