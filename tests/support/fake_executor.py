"""A fake model and the executor that runs it: it believes only its plans, and checks each of them."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from quartet.services.executor.loop import AnsweredStep
from quartet.services.scheduler.plan import pack_u32, unpack_u16, unpack_u32
from quartet.shared.block_hash import block_hash, hash_root, pack_token_ids
from quartet.shared.messages import (
    FAILED_TOKEN_ID,
    FinishReason,
    Granted,
    ModelInfo,
    NewRequest,
    RowPromptLogprobs,
    StepFailed,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Vocabulary,
)

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
    records: bool = True
    chains: list[int] = field(default_factory=list)

    def chain(self, position: int) -> int:
        while len(self.chains) <= position:
            before = self.chains[-1] if self.chains else chain_start(self.new.hash_root)
            self.chains.append(hash((before, self.tokens[len(self.chains)])))
        return self.chains[position]


class FakeRunner:
    """What an executor's loop needs of a model runner. KV memory is (block, slot) -> chain of all tokens
    so far, so that a block shared wrongly or hashed wrongly is read as wrong content."""

    def __init__(self, model: ModelInfo) -> None:
        self.model = model
        self.kv: dict[tuple[int, int], int] = {}
        self.hashes: dict[int, bytes] = {}
        self.rows: dict[int, Row] = {}
        self.next_step_id = 0
        self.num_computed_tokens = 0
        self.largest_plan = 0
        self.plan_log: list[tuple[int, dict[int, int]]] = []
        self.fail_rows: set[int] = set()
        self.invalid_rows: set[int] = set()
        self.last_received = -1
        self.erased_after = -1

    def reset(self) -> None:
        self.next_step_id = 0
        self.last_received = self.erased_after = -1
        self.rows.clear()

    def offers(self) -> tuple[bytes, bytes]:
        return pack_u32(list(self.hashes)), b"".join(self.hashes.values())

    def add_vocabulary(self, part: Vocabulary) -> None:
        raise AssertionError("a model without structured_output is sent no vocabulary")

    def erase_hashes(self) -> None:
        """Rows of plans that have come and not run yet are there already."""
        self.hashes.clear()
        self.erased_after = max(self.last_received, self.next_step_id - 1)
        for row in self.rows.values():
            row.records = False

    def launch(self, plan: StepPlan) -> AnsweredStep:
        return AnsweredStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
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
        invalid = [index for index, _ in errors if index in self.invalid_rows]
        logprobs = logprobs if any_logprobs else None
        return StepResult(plan.epoch, plan.step_id, pack_u32(tokens), logprobs, prompt_logprobs, errors, invalid)

    def fail(self, plan: StepPlan, later: Iterable[StepPlan] = ()) -> None:
        """The plan raises halfway: what it and later ones wrote is not known."""
        self._apply(plan)
        for torn in (plan, *later):
            touched = set(unpack_u32(torn.block_ids))
            for row in torn.new_rows:
                touched |= set(unpack_u32(row.block_ids)[row.num_computed_tokens // self.model.block_size :])
            for block in touched:
                self.hashes.pop(block, None)
                for slot in range(self.model.block_size):
                    self.kv[block, slot] = -1

    @staticmethod
    def _decode_rows(plan: StepPlan) -> list[int]:
        return [8 * i + bit for i, byte in enumerate(plan.decode_rows) for bit in range(8) if byte >> bit & 1]

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
            row.records = new.write_prefix_cache and plan.step_id > self.erased_after
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
        return self._next_token(row, self._read(row, row.num_computed - 1), banned)

    def _next_token(self, row: Row, chain: int, banned: frozenset[int]) -> int:
        return next_token(chain, row.new.sampling.seed, row.new.choice_index, self.model.vocab_size, banned)

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
        if not row.records:
            return
        size = self.model.block_size
        parent = row.new.hash_root
        for i in range(row.num_computed // size):
            parent = block_hash(parent, pack_token_ids(row.tokens[i * size : (i + 1) * size]))
            self.hashes[row.table[i]] = parent


class FakeExecutor(FakeRunner):
    """With its queue of plans, for tests that have no loop around it."""

    def __init__(self, model: ModelInfo) -> None:
        super().__init__(model)
        self.epoch = 0
        self.queue: collections.deque[StepPlan] = collections.deque()
        self.undelivered: collections.deque[set[int]] = collections.deque()

    def take_over(self) -> Granted:
        self.reset()
        self.epoch += 1
        self.queue.clear()
        self.undelivered.clear()
        return Granted(self.epoch, *self.offers())

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
        self.last_received = plan.step_id
        assert len(self.undelivered) <= 2, "more than two plans in flight"

    def delivered(self) -> None:
        self.undelivered.popleft()

    def step(self) -> StepResult:
        return self.execute(self.queue.popleft())

    def fail_step(self) -> StepFailed:
        plan, *later = self.queue
        self.fail(plan, later)
        self.queue.clear()
        self.undelivered.clear()
        return StepFailed(plan.epoch, plan.step_id, "simulated")
