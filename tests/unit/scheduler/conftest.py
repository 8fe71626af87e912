"""A simulated line around the scheduler's core: owners on the left, an executor that believes only its plans."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import pytest

from quartet.services.scheduler.core import EXECUTOR, Effect, SchedulerCore
from quartet.services.scheduler.invariants import check_invariants
from quartet.services.scheduler.plan import pack_u32, unpack_u16, unpack_u32
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.shared.block_hash import block_hash, hash_root, pack_token_ids
from quartet.shared.messages import (
    FAILED_TOKEN_ID,
    Abort,
    ChoicePast,
    ErrorCode,
    Failed,
    Finish,
    FinishReason,
    Granted,
    Loads,
    ModelInfo,
    NewRequest,
    Outputs,
    PromptLogprobs,
    Release,
    RowPromptLogprobs,
    StepFailed,
    StepPlan,
    StepResult,
    Takeover,
    TokenLogprobs,
    decode,
    encode,
)
from quartet.shared.sampling_params import SamplingParams

EOS = 2


def model_info(**changes: Any) -> ModelInfo:
    fields = {
        "name": "fake",
        "model_fingerprint": "f",
        "vocab_size": 1000,
        "max_model_len": 256,
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "dtype": "float32",
        "device": "cpu",
    }
    return ModelInfo(**{**fields, **changes})


def chain_start(root: bytes) -> int:
    return int.from_bytes(root[:7], "little")


def next_token(chain: int, seed: int, choice: int, vocab_size: int, banned: frozenset[int]) -> int:
    """The fake model: a pure function of the whole sequence, the seed and the choice."""
    token_id = hash((chain, seed, choice)) % vocab_size
    while token_id in banned:
        token_id = (token_id + 1) % vocab_size
    return token_id


def continuation(message: NewRequest, choice: int, past: list[int], model: ModelInfo) -> tuple[list[int], FinishReason]:
    """All outputs of a choice, the past included, and how it ends."""
    sampling = message.sampling
    root = hash_root([("cache_salt", message.cache_salt)] if message.cache_salt else [])
    stops = frozenset(sampling.stop_token_ids) | (
        frozenset() if sampling.ignore_eos else frozenset(message.eos_token_ids)
    )
    chain = chain_start(root)
    for token_id in [*message.prompt_token_ids, *past]:
        chain = hash((chain, token_id))
    outputs = list(past)
    while True:
        if outputs and len(outputs) >= sampling.min_tokens and outputs[-1] in stops:
            return outputs, FinishReason.STOP
        end = model.max_model_len - len(message.prompt_token_ids)
        if len(outputs) >= min(end if sampling.max_tokens is None else sampling.max_tokens, end):
            return outputs, FinishReason.LENGTH
        banned = stops if len(outputs) + 1 < sampling.min_tokens else frozenset()
        token_id = next_token(chain, sampling.seed, choice, model.vocab_size, banned)
        outputs.append(token_id)
        chain = hash((chain, token_id))


@dataclass
class Row:
    tokens: list[int]
    num_prompt: int
    num_computed: int
    table: list[int]
    new: Any
    sampled: bool = False
    chains: list[int] = field(default_factory=list)

    def chain(self, position: int) -> int:
        while len(self.chains) <= position:
            before = self.chains[-1] if self.chains else chain_start(self.new.hash_root)
            self.chains.append(hash((before, self.tokens[len(self.chains)])))
        return self.chains[position]


class FakeExecutor:
    """Simulates rows strictly from the plans. KV memory is (block, slot) -> chain of all tokens so
    far, so that a block shared wrongly or hashed wrongly is read as wrong content."""

    def __init__(self, model: ModelInfo) -> None:
        self.model = model
        self.kv: dict[tuple[int, int], int] = {}
        self.hashes: dict[int, bytes] = {}
        self.rows: dict[int, Row] = {}
        self.epoch = 0
        self.next_step_id = 0
        self.queue: collections.deque[StepPlan] = collections.deque()
        self.undelivered: collections.deque[set[int]] = collections.deque()
        self.num_computed_tokens = 0
        self.largest_plan = 0
        self.plan_log: list[tuple[int, dict[int, int]]] = []
        self.fail_rows: set[int] = set()

    def take_over(self) -> Granted:
        self.epoch += 1
        self.next_step_id = 0
        self.rows.clear()
        self.queue.clear()
        self.undelivered.clear()
        return Granted(self.epoch, pack_u32(list(self.hashes)), b"".join(self.hashes.values()))

    def receive(self, plan: StepPlan) -> None:
        assert plan.epoch == self.epoch, "a plan of another epoch"
        new = {row.req_index for row in plan.new_rows}
        for named in self.undelivered:
            assert not new & named, f"rows {new & named} are reused before their last plan has returned"
        decodes = set(self._decode_rows(plan))
        self.undelivered.append(
            new
            | decodes
            | set(unpack_u16(plan.removed))
            | set(unpack_u16(plan.prefill_rows))
            | set(unpack_u16(plan.block_rows))
        )
        self.queue.append(plan)
        assert len(self.undelivered) <= 2, "more than two plans in flight"

    def delivered(self) -> None:
        self.undelivered.popleft()

    @staticmethod
    def _decode_rows(plan: StepPlan) -> list[int]:
        return [8 * i + bit for i, byte in enumerate(plan.decode_rows) for bit in range(8) if byte >> bit & 1]

    def fail_step(self) -> StepFailed:
        """The oldest plan raises halfway: what it and later ones wrote is not known."""
        plan = self.queue[0]
        self._apply(plan)
        for later in self.queue:
            touched = set(unpack_u32(later.block_ids))
            for row in later.new_rows:
                touched |= set(unpack_u32(row.block_ids)[row.num_computed_tokens // self.model.block_size :])
            for block in touched:
                self.hashes.pop(block, None)
                for slot in range(self.model.block_size):
                    self.kv[block, slot] = -1
        self.queue.clear()
        self.undelivered.clear()
        return StepFailed(plan.epoch, plan.step_id, "simulated")

    def step(self) -> StepResult:
        plan = self.queue.popleft()
        work = self._apply(plan)
        tokens, logprobs, prompt_logprobs, errors = [], [], [], []
        for index, count in work:
            row = self.rows[index]
            assert count >= 1
            first, end = row.num_computed, row.num_computed + count
            assert end <= len(row.tokens), f"row {index} would compute {end} of {len(row.tokens)} known tokens"
            assert end <= self.model.max_model_len
            for position in range(first, end):
                self._write(index, row, position)
            row.num_computed = end
            self.num_computed_tokens += count
            prompt_logprobs += self._prompt_logprobs(index, row, first, end)
            if end == len(row.tokens):
                token_id = self._sample(row)
                if index in self.fail_rows:
                    self.fail_rows.discard(index)
                    errors.append((index, "NaN in logits"))
                    tokens.append(FAILED_TOKEN_ID)
                    row.tokens.append(0)
                else:
                    tokens.append(token_id)
                    row.tokens.append(token_id)
                row.sampled = True
                wants = row.new.sampling.logprobs is not None
                logprobs.append(TokenLogprobs(token_id, -float(token_id), 1) if wants else None)
        for index, _ in work:
            self._hash_full_blocks(self.rows[index])
        any_logprobs = any(entry is not None for entry in logprobs)
        return StepResult(
            plan.epoch, plan.step_id, pack_u32(tokens), logprobs if any_logprobs else None, prompt_logprobs, errors
        )

    def _apply(self, plan: StepPlan) -> list[tuple[int, int]]:
        assert plan.step_id == self.next_step_id, "a gap in step ids"
        self.next_step_id += 1
        for index in unpack_u16(plan.removed):
            del self.rows[index]
        for new in plan.new_rows:
            assert new.req_index not in self.rows and 0 <= new.req_index < self.model.max_num_seqs
            tokens = unpack_u32(new.token_ids)
            assert new.num_computed_tokens < len(tokens) and new.num_computed_tokens % self.model.block_size == 0
            row = Row(tokens, new.num_prompt_tokens, new.num_computed_tokens, unpack_u32(new.block_ids), new)
            self.rows[new.req_index] = row
            for position in range(row.num_computed):
                assert self._read(row, position) == row.chain(position), "a prefix hit on wrong content"
        for index, block in zip(unpack_u16(plan.block_rows), unpack_u32(plan.block_ids), strict=True):
            self.rows[index].table.append(block)
        for row in self.rows.values():
            assert all(1 <= block <= self.model.num_blocks for block in row.table)
            assert len(set(row.table)) == len(row.table)
        decodes = self._decode_rows(plan)
        prefills = list(zip(unpack_u16(plan.prefill_rows), unpack_u32(plan.prefill_counts), strict=True))
        for index in decodes:
            row = self.rows[index]
            assert row.sampled and len(row.tokens) - row.num_computed == 1, f"row {index} cannot decode"
        work = [(index, 1) for index in decodes] + prefills
        assert len({index for index, _ in work}) == len(work), "a row is named twice"
        total = sum(count for _, count in work)
        assert total <= self.model.max_num_batched_tokens
        self.largest_plan = max(self.largest_plan, total)
        self.plan_log.append((plan.step_id, dict(work)))
        return work

    def _read(self, row: Row, position: int) -> int:
        size = self.model.block_size
        return self.kv[row.table[position // size], position % size]

    def _write(self, index: int, row: Row, position: int) -> None:
        size = self.model.block_size
        block = row.table[position // size]
        for other_index, other in self.rows.items():
            assert other_index == index or block not in other.table, f"rows {index}, {other_index} share {block}"
        self.hashes.pop(block, None)
        self.kv[block, position % size] = row.chain(position)

    def _sample(self, row: Row) -> int:
        for position in range(row.num_computed):
            assert self._read(row, position) == row.chain(position), f"position {position} was overwritten"
        sampling = row.new.sampling
        stops = frozenset(sampling.stop_token_ids) | frozenset(row.new.eos_token_ids)
        num_outputs = len(row.tokens) - row.num_prompt
        banned = stops if num_outputs + 1 < sampling.min_tokens else frozenset()
        chain = self._read(row, row.num_computed - 1)
        return next_token(chain, sampling.seed, row.new.choice_index, self.model.vocab_size, banned)

    def _prompt_logprobs(self, index: int, row: Row, first: int, end: int) -> list[RowPromptLogprobs]:
        due = row.new.prompt_logprobs_start
        if due < 0:
            return []
        start = max(due, 0 if first == 0 else first + 1)
        stop = min(end + 1, row.num_prompt)
        if start >= stop:
            return []
        entries = [None if p == 0 else TokenLogprobs(row.tokens[p], -float(p), 1) for p in range(start, stop)]
        return [RowPromptLogprobs(index, start, entries)]

    def _hash_full_blocks(self, row: Row) -> None:
        size = self.model.block_size
        parent = row.new.hash_root
        for i in range(row.num_computed // size):
            parent = block_hash(parent, pack_token_ids(row.tokens[i * size : (i + 1) * size]))
            self.hashes[row.table[i]] = parent


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

    def executor_up(self, executor: FakeExecutor | None = None) -> FakeExecutor:
        self.executor = executor or FakeExecutor(self.model)
        self.event(self.core.executor_up(self.executor.model))
        return self.executor

    def executor_dies(self) -> None:
        self.executor = None
        self.event(self.core.executor_down())

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
        pasts: dict[int, list[int]] | None = None,
        attempt: int = 1,
        prompt_logprobs_start: int = 0,
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
            prompt_logprobs_start=prompt_logprobs_start,
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
                else:
                    self.executor.receive(message)
            elif isinstance(message, Loads):
                self.loads = message
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


@pytest.fixture
def internal_error() -> ErrorCode:
    return ErrorCode.INTERNAL
