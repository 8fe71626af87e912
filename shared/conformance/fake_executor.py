"""An executor without a model that believes nothing but the plans, and judges each of them.

Its KV memory holds, for every slot, a fingerprint of the whole sequence up to that token. So a block
that is shared wrongly, reused too early or hit under a wrong name is read as another sequence's.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quartet.shared.block_hash import block_hash, hash_root, pack_token_ids
from quartet.shared.conformance.columns import pack_u32, unpack_bits, unpack_u16, unpack_u32
from quartet.shared.conformance.wire import Dialled, Loop
from quartet.shared.messages import (
    FAILED_TOKEN_ID,
    AnyMessage,
    Granted,
    ModelInfo,
    NewRequest,
    NewRow,
    PlanRefused,
    Role,
    RowPromptLogprobs,
    StepFailed,
    StepPlan,
    StepResult,
    Takeover,
    TokenLogprobs,
    Vocabulary,
    WatchSteps,
)

MODEL = ModelInfo("conformance", "conformance", 1000, 256, 64, 4, 8, 32, "float32", "none")


def salted_root(cache_salt: str) -> bytes:
    return hash_root([("cache_salt", cache_salt)] if cache_salt else [])


def chain_start(root: bytes) -> int:
    return int.from_bytes(root[:7], "little")


def chain_on(chain: int, token_id: int) -> int:
    """The fingerprint of a sequence with one more token."""
    return (chain * 6364136223846793005 + token_id * 2 + 1442695040888963407) & (2**63 - 1)


def next_token(chain: int, seed: int, choice: int, vocab_size: int) -> int:
    """What the fake model says after a sequence: a pure function, so that recomputing gives the same."""
    return (chain_on(chain_on(chain, seed), choice) >> 20) % (vocab_size - 10) + 10


@dataclass
class Row:
    new: NewRow
    tokens: list[int]
    num_computed: int
    table: list[int]
    choice: int
    seed: int
    chains: list[int] = field(default_factory=list)

    def chain(self, position: int) -> int:
        while len(self.chains) <= position:
            before = self.chains[-1] if self.chains else chain_start(self.new.hash_root)
            self.chains.append(chain_on(before, self.tokens[len(self.chains)]))
        return self.chains[position]


@dataclass
class Run:
    """A row's life in the batch, for scenarios to look at afterwards."""

    seed: int
    choice: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_skipped: int
    vocabulary: str = ""
    num_computed: int = 0


class FakeExecutor:
    """Plans wait in `queue`; with `running` they run one after the other, else when `step` is called.

    `forced[seed]` are tokens that a request samples instead of the fake model's, by output index;
    `asked[seed]` is what its tokenizer asked for.
    """

    def __init__(self, loop: Loop, address: str, model: ModelInfo = MODEL, name: str = "conformance-executor") -> None:
        self.link = Dialled(loop, address, Role.EXECUTOR, name, model)
        self.link.on_message = self._on_message
        self.report = loop.report
        self.loop = loop
        self.model = model
        self.running = True
        self.kv: dict[tuple[int, int], int] = {}
        self.hashes: dict[int, bytes] = {}
        self.rows: dict[int, Row] = {}
        self.watch_steps: list[bool] = []
        self.epoch = 0
        self.granting = True
        self.granted = False
        self.takeovers = 0
        self.queue: collections.deque[StepPlan] = collections.deque()
        self.in_flight: collections.deque[set[int]] = collections.deque()
        self.next_step_id = 0
        self.num_plans = 0
        self.largest_plan = 0
        self.runs: list[Run] = []
        self.forced: dict[int, dict[int, int]] = {}
        self.asked: dict[int, NewRequest] = {}
        self.fail_seeds: set[int] = set()
        self.invalid_seeds: set[int] = set()
        self.vocabularies: list[Vocabulary] = []
        self.before_result: Callable[[StepResult], None] = lambda result: None
        # No Takeover has come in this session yet.
        self._fresh = True
        loop.idle.append(self._work)

    def close(self) -> None:
        self.link.close()
        if self._work in self.loop.idle:
            self.loop.idle.remove(self._work)

    def open(self) -> None:
        self.link.open()
        self.loop.expect("plan.takeover", lambda: self.granted, "no Takeover came to a fresh executor")

    def die(self, keep_blocks: bool) -> None:
        """A new session, after which the scheduler has to take over; KV memory is kept or lost."""
        self._forget()
        if not keep_blocks:
            self.kv.clear()
            self.hashes.clear()
        self._fresh = True
        self.link.reopen()
        self.loop.expect("plan.takeover", lambda: self.granted, "no Takeover came to an executor that came back")

    def fail_step(self) -> None:
        """The oldest plan raises: what it and later ones would have written is not known."""
        plan = self.queue[0]
        for later in self.queue:
            for block_id in self._touched(later):
                self._forget_block(block_id)
        self._forget()
        self.link.send(StepFailed(plan.epoch, plan.step_id, "provoked by the conformance kit"))

    def refuse_plan(self) -> None:
        plan = self.queue[0]
        self._forget()
        self.link.send(PlanRefused(plan.epoch, plan.step_id, "provoked by the conformance kit"))

    def step(self) -> StepResult:
        """Runs the oldest plan and sends its result."""
        result = self._execute(self.queue.popleft())
        self.in_flight.popleft()
        self.before_result(result)
        self.link.send(result)
        return result

    # --- messages ---------------------------------------------------------------------------------

    def _work(self) -> bool:
        if self.running and self.queue and self.link.is_open:
            self.step()
            return True
        return False

    def _on_message(self, message: AnyMessage) -> None:
        if isinstance(message, Takeover):
            self._take_over()
        elif isinstance(message, StepPlan):
            self._plan(message)
        elif isinstance(message, Vocabulary) and self.model.structured_output:
            self.vocabularies.append(message)
        elif isinstance(message, WatchSteps):
            self.watch_steps.append(message.enabled)
        else:
            self.report.check("plan.takeover", False, f"a {type(message).__name__} came to an executor")

    def _take_over(self) -> None:
        self._forget()
        self.takeovers += 1
        if self.granting:
            self.grant()

    def grant(self) -> None:
        self._fresh = False
        self.epoch += 1
        self.next_step_id = 0
        self.granted = True
        self.rows.clear()
        self.link.send(Granted(self.epoch, pack_u32(list(self.hashes)), b"".join(self.hashes.values())))

    def _forget(self) -> None:
        self.granted = False
        self.queue.clear()
        self.in_flight.clear()

    def _plan(self, plan: StepPlan) -> None:
        check = self.report.check
        if not self.granted and not self._fresh:
            return  # sent before the scheduler knew of the end of its epoch
        check("plan.takeover", self.granted, "a plan came before the Takeover")
        check("plan.takeover", plan.epoch == self.epoch, f"a plan of epoch {plan.epoch}, granted is {self.epoch}")
        check("plan.step-ids", plan.step_id == self.next_step_id, f"step {plan.step_id}, due is {self.next_step_id}")
        self.next_step_id += 1
        self.num_plans += 1
        try:
            removed, named = unpack_u16(plan.removed), unpack_u16(plan.block_rows)
            prefills, counts = unpack_u16(plan.prefill_rows), unpack_u32(plan.prefill_counts)
            block_ids = unpack_u32(plan.block_ids)
            for row in plan.new_rows:
                block_ids += unpack_u32(row.block_ids)
                unpack_u32(row.token_ids)
        except struct.error as error:
            check("plan.columns", False, f"a column is cut short: {error}")
            return
        check(
            "plan.columns", len(named) == len(unpack_u32(plan.block_ids)), "block_rows and block_ids differ in length"
        )
        check("plan.columns", len(prefills) == len(counts), "prefill_rows and prefill_counts differ in length")
        check("plan.null-block", 0 not in block_ids, f"step {plan.step_id} hands out block 0")
        check(
            "plan.columns",
            all(1 <= block_id <= self.model.num_blocks for block_id in block_ids),
            f"a block id beyond the {self.model.num_blocks} there are",
        )
        decodes = unpack_bits(plan.decode_rows)
        total = len(decodes) + sum(counts)
        self.largest_plan = max(self.largest_plan, total)
        check(
            "plan.budget",
            total <= self.model.max_num_batched_tokens,
            f"{total} tokens in a step, max_num_batched_tokens is {self.model.max_num_batched_tokens}",
        )
        new = {row.req_index for row in plan.new_rows}
        for earlier in self.in_flight:
            check(
                "plan.row-reuse",
                not new & earlier,
                f"step {plan.step_id} gives row {min(new & earlier, default=0)} away, "
                "and an earlier plan that names it has not returned",
            )
        self.in_flight.append(new | set(removed) | set(named) | set(prefills) | set(decodes))
        self.queue.append(plan)
        check("plan.in-flight", len(self.in_flight) <= 2, f"{len(self.in_flight)} plans are in flight")

    # --- steps ------------------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> StepResult:
        work = self._apply(plan)
        result = StepResult(plan.epoch, plan.step_id, b"")
        sampled: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for index, count in work:
            row = self.rows[index]
            first, end = row.num_computed, row.num_computed + count
            self._check_work(plan, index, row, end)
            self._compute(index, row, end)
            self._score_prompt(result, index, row, first, end)
            if end == len(row.tokens):
                token_id = self._sample(row)
                if row.seed in self.fail_seeds:
                    result.errors.append((index, "provoked by the conformance kit"))
                    if row.seed in self.invalid_seeds:
                        result.invalid_rows.append(index)
                    sampled.append(FAILED_TOKEN_ID)
                    row.tokens.append(0)
                else:
                    sampled.append(token_id)
                    row.tokens.append(token_id)
                wants = row.new.sampling.logprobs is not None
                logprobs.append(TokenLogprobs(token_id, -float(token_id), 1) if wants else None)
        result.token_ids = pack_u32(sampled)
        if any(entry is not None for entry in logprobs):
            result.logprobs = logprobs
        for index, _ in work:
            self._hash_full_blocks(self.rows[index])
        return result

    def _apply(self, plan: StepPlan) -> list[tuple[int, int]]:
        check, step = self.report.check, plan.step_id
        for index in unpack_u16(plan.removed):
            check("plan.rows", index in self.rows, f"step {step} removes row {index}, which is not in use")
            del self.rows[index]
        for new in plan.new_rows:
            self._enter(step, new)
        for index, block_id in zip(unpack_u16(plan.block_rows), unpack_u32(plan.block_ids), strict=True):
            check("plan.rows", index in self.rows, f"step {step} gives a block to row {index}, which is not in use")
            self.rows[index].table.append(block_id)
        decodes = unpack_bits(plan.decode_rows)
        prefills = list(zip(unpack_u16(plan.prefill_rows), unpack_u32(plan.prefill_counts), strict=True))
        for index in [*decodes, *(index for index, _ in prefills)]:
            check("plan.rows", index in self.rows, f"step {step} computes row {index}, which is not in use")
        names = [*decodes, *(index for index, _ in prefills)]
        check("plan.rows", len(names) == len(set(names)), f"step {step} computes a row twice")
        for index in decodes:
            row = self.rows[index]
            check(
                "plan.positions",
                len(row.tokens) - row.num_computed == 1,
                f"step {step} decodes row {index}, which has {len(row.tokens) - row.num_computed} tokens to compute",
            )
        check("plan.positions", all(count > 0 for _, count in prefills), f"step {step} prefills no token of a row")
        return [(index, 1) for index in decodes] + prefills

    def _enter(self, step: int, new: NewRow) -> None:
        check, index, tokens = self.report.check, new.req_index, unpack_u32(new.token_ids)
        check("plan.rows", index not in self.rows, f"step {step} gives row {index} away, which is in use")
        check(
            "plan.rows", 0 <= index < self.model.max_num_seqs, f"row {index}: max_num_seqs is {self.model.max_num_seqs}"
        )
        check(
            "plan.positions",
            0 <= new.num_computed_tokens < len(tokens),
            f"a new row has {len(tokens)} tokens and {new.num_computed_tokens} computed: nothing to sample from",
        )
        check("plan.positions", 1 <= new.num_prompt_tokens <= len(tokens), "num_prompt_tokens is beyond the tokens")
        self._check_request(new, tokens)
        table = unpack_u32(new.block_ids)
        check("plan.blocks", len(table) == len(set(table)), f"row {index} gets a block twice: {table}")
        row = Row(new, tokens, new.num_computed_tokens, table, new.choice_index, new.sampling.seed)
        self.rows[index] = row
        for position in range(row.num_computed):
            self._check_read(index, row, position, "a block taken from the prefix cache")
        self.runs.append(
            Run(
                row.seed,
                row.choice,
                tokens.copy(),
                new.num_prompt_tokens,
                new.num_computed_tokens,
                new.vocabulary,
            )
        )

    def _check_request(self, new: NewRow, tokens: list[int]) -> None:
        asked = self.asked.get(new.sampling.seed)
        if asked is None:
            return
        check = self.report.check
        num_prompt_tokens = len(asked.prompt_token_ids)
        check(
            "plan.request",
            new.num_prompt_tokens == num_prompt_tokens
            and tokens[:num_prompt_tokens] == asked.prompt_token_ids
            and msgspec.structs.replace(new.sampling, max_tokens=asked.sampling.max_tokens) == asked.sampling,
            "a new row's prompt or sampling parameters are not those asked for",
        )
        check(
            "plan.hash-root",
            new.hash_root == salted_root(asked.cache_salt),
            f"hash_root is not that of cache salt {asked.cache_salt!r}",
        )
        right = [] if asked.sampling.ignore_eos else asked.eos_token_ids
        check(
            "plan.eos",
            new.eos_token_ids == right,
            f"a row has eos_token_ids {new.eos_token_ids}, right is {right}",
        )

    def _check_work(self, plan: StepPlan, index: int, row: Row, end: int) -> None:
        check, step = self.report.check, plan.step_id
        check(
            "plan.positions",
            end <= len(row.tokens),
            f"step {step} computes {end} tokens of row {index}, which knows {len(row.tokens)}",
        )
        check("plan.positions", end <= self.model.max_model_len, f"row {index} passes max_model_len")
        room = len(row.table) * self.model.block_size
        check("plan.blocks", end <= room, f"step {step} computes {end} tokens of row {index}, its blocks hold {room}")

    def _compute(self, index: int, row: Row, end: int) -> None:
        size = self.model.block_size
        for position in range(row.num_computed, end):
            block_id = row.table[position // size]
            sharers = [
                other
                for other, held in self.rows.items()
                if other != index and block_id in held.table[: -(-held.num_computed // size)]
            ]
            self.report.check(
                "plan.blocks", not sharers, f"row {index} writes to block {block_id}, which row {sharers[:1]} reads"
            )
            if position % size == 0 or position == row.num_computed:
                self.hashes.pop(block_id, None)
            self.kv[block_id, position % size] = row.chain(position)
        for position in range(end):
            self._check_read(index, row, position, "its own table")
        for run in reversed(self.runs):
            if (run.seed, run.choice) == (row.seed, row.choice):
                run.num_computed += end - row.num_computed
                break
        row.num_computed = end

    def _check_read(self, index: int, row: Row, position: int, where: str) -> None:
        size = self.model.block_size
        block_id = row.table[position // size] if position // size < len(row.table) else -1
        self.report.check(
            "plan.blocks",
            self.kv.get((block_id, position % size)) == row.chain(position),
            f"row {index} reads position {position} in block {block_id} ({where}): it holds another sequence's",
        )

    def _sample(self, row: Row) -> int:
        output_index = len(row.tokens) - row.new.num_prompt_tokens
        forced = self.forced.get(row.seed, {}).get(output_index)
        if forced is not None:
            return forced
        return next_token(row.chain(len(row.tokens) - 1), row.seed, row.choice, self.model.vocab_size)

    def _score_prompt(self, result: StepResult, index: int, row: Row, first: int, end: int) -> None:
        due = row.new.prompt_logprobs_start
        if due < 0 or first >= row.new.num_prompt_tokens:
            return
        start = max(first + 1, due)
        entries: list[TokenLogprobs | None] = [
            TokenLogprobs(row.tokens[i], -float(row.tokens[i]), 1)
            for i in range(start, min(end + 1, row.new.num_prompt_tokens))
        ]
        if first == 0 and due == 0:
            start, entries = 0, [None, *entries]
        if entries:
            result.prompt_logprobs.append(RowPromptLogprobs(index, start, entries))

    def _hash_full_blocks(self, row: Row) -> None:
        size, parent = self.model.block_size, row.new.hash_root
        for logical in range(row.num_computed // size):
            parent = block_hash(parent, pack_token_ids(row.tokens[logical * size : (logical + 1) * size]))
            self.hashes[row.table[logical]] = parent

    def _touched(self, plan: StepPlan) -> set[int]:
        touched = set(unpack_u32(plan.block_ids))
        for new in plan.new_rows:
            touched |= set(unpack_u32(new.block_ids)[new.num_computed_tokens // self.model.block_size :])
        for index in [*unpack_bits(plan.decode_rows), *unpack_u16(plan.prefill_rows)]:
            if index in self.rows:
                touched |= set(self.rows[index].table[self.rows[index].num_computed // self.model.block_size :])
        return touched

    def _forget_block(self, block_id: int) -> None:
        self.hashes.pop(block_id, None)
        for slot in range(self.model.block_size):
            self.kv.pop((block_id, slot), None)
