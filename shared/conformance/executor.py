"""Drives an executor: the kit binds the address of a scheduler, which it dials.

Nothing is known of its model: which token comes is forced with logit_bias, or compared with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quartet.shared.block_hash import HASH_BYTES, block_hash, hash_root, pack_token_ids
from quartet.shared.conformance import link_checks, watching
from quartet.shared.conformance.columns import pack_bits, pack_u16, pack_u32, unpack_u32
from quartet.shared.conformance.report import Report
from quartet.shared.conformance.structured import EXECUTOR_RULES, structured_rows
from quartet.shared.conformance.wire import Bound, Loop
from quartet.shared.messages import (
    FAILED_TOKEN_ID,
    Granted,
    ModelInfo,
    NewRow,
    PlanRefused,
    Role,
    RowPromptLogprobs,
    StepPlan,
    StepResult,
    Takeover,
    TokenLogprobs,
)
from quartet.shared.sampling_params import SamplingParams

RULES = link_checks.DIALLER_RULES | {
    "hello.model": "its Hello says what it serves, with limits that make sense",
    "takeover.granted": "Takeover is answered with Granted, each epoch higher than all before, restarts included",
    "takeover.clears": "after Granted no row is in use and the next step is 0",
    "result.step": "each plan that is accepted is answered with a StepResult of its epoch and step, in order",
    "result.tokens": "a token for each row that samples, and none for one with known tokens left to compute",
    "result.order": "tokens come in batch order: decode rows rising, then prefill rows as the plan has them",
    "result.logprobs": "log-probabilities come for the rows that asked, in batch order, the top ones falling",
    "result.prompt-logprobs": "prompt log-probabilities come for every position from the one due on, chunk by chunk",
    "result.failed-row": "a row that cannot be sampled fails alone (where a bias that is no number is not refused)",
    "sampling.bias": "logit_bias moves the token",
    "sampling.min-tokens": "no end-of-sequence or stop token is sampled before min_tokens",
    "sampling.seed": "the same seed, choice and output index draw the same token: alone, in company, after a restart",
    "sampling.choice": "choices and seeds differ in what they draw",
    "kv.chunks": "a prompt computed in chunks, or hit in its blocks, leads to the same token (float32 only)",
    "plan.gap": "a plan with a gap in step_id, or of an epoch that was never granted, is refused",
    "plan.old-epoch": "a plan of an earlier epoch is never run",
    "plan.contradiction": "a plan that contradicts itself or the rows is refused",
    "plan.nothing-applied": "of a refused plan nothing is applied, and only a Takeover leads on",
    "hashes.whole": "whole blocks are offered under their chained hash, and only whole ones",
    "hashes.rewritten": "a block that is being written anew is not offered under its old name",
    "hashes.root": "a row's hash_root begins its chain",
    **EXECUTOR_RULES,
    **watching.EXECUTOR_RULES,
}

FORCED = 100.0


@dataclass
class ExecutorKit:
    """A scheduler, which is this kit. `restart` starts the executor anew; None where that is not possible."""

    report: Report
    scheduler_link: str
    timeout: float = 30.0
    gone: Callable[[], str] | None = None
    restart: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.loop = Loop(self.report, self.timeout, self.gone)
        self.link = Bound(self.loop, self.scheduler_link, Role.SCHEDULER, "conformance-scheduler")
        self.link.expected_role = Role.EXECUTOR
        self.epoch = 0
        self.step_id = 0
        self.offered: dict[int, bytes] = {}

    def start(self) -> ModelInfo:
        """Opens the session and takes over."""
        self.link.wait_open()
        model = self.link.model_told
        self.report.check("hello.model", model is not None, "its Hello has no model")
        assert model is not None
        self.model = model
        self.takeover()
        return model

    def close(self) -> None:
        self.loop.close()

    # --- plans ------------------------------------------------------------------------------------

    def takeover(self) -> list[int]:
        """The ids of the blocks that are offered; results of plans sent before do not come any more."""
        self.link.inbox.clear()
        self.link.send(Takeover(self.link.incarnation))
        granted = self.link.take("takeover.granted", Granted, "Granted for a Takeover")
        check = self.report.check
        check("takeover.granted", granted.epoch > self.epoch, f"epoch {granted.epoch} after epoch {self.epoch}")
        hashes = granted.block_hashes
        check(
            "hashes.whole",
            len(hashes) == HASH_BYTES * (len(granted.block_ids) // 4) and len(granted.block_ids) % 4 == 0,
            f"columns of {len(granted.block_ids)} and {len(hashes)} bytes do not match",
        )
        ids = unpack_u32(granted.block_ids)
        check(
            "hashes.whole",
            len(set(ids)) == len(ids) and all(1 <= i <= self.model.num_blocks for i in ids),
            "a block is offered twice, or is none",
        )
        self.offered = {b: hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i, b in enumerate(ids)}
        self.epoch, self.step_id = granted.epoch, 0
        return ids

    def row(
        self,
        req_index: int,
        tokens: Sequence[int],
        blocks: Sequence[int],
        *,
        num_prompt: int | None = None,
        num_computed: int = 0,
        choice: int = 0,
        eos: Sequence[int] = (),
        root: bytes | None = None,
        prompt_logprobs_start: int = -1,
        **sampling: Any,
    ) -> NewRow:
        """Greedy unless sampling says otherwise."""
        return NewRow(
            req_index,
            pack_u32(tokens),
            len(tokens) if num_prompt is None else num_prompt,
            num_computed,
            pack_u32(blocks),
            SamplingParams(**({"temperature": 0.0} | sampling)),
            list(eos),
            choice,
            root or hash_root(),
            prompt_logprobs_start,
        )

    def plan(
        self,
        *,
        new: Sequence[NewRow] = (),
        removed: Sequence[int] = (),
        blocks: Sequence[tuple[int, int]] = (),
        decode: Sequence[int] = (),
        prefill: Sequence[tuple[int, int]] = (),
        step_id: int | None = None,
        epoch: int | None = None,
    ) -> StepPlan:
        """The next plan; `blocks` and `prefill` are (row, block or count)."""
        if step_id is None:
            step_id, self.step_id = self.step_id, self.step_id + 1
        return StepPlan(
            self.epoch if epoch is None else epoch,
            step_id,
            pack_u16(removed),
            list(new),
            pack_u16([row for row, _ in blocks]),
            pack_u32([block for _, block in blocks]),
            pack_bits(decode),
            pack_u16([row for row, _ in prefill]),
            pack_u32([count for _, count in prefill]),
        )

    def send(self, **changes: Any) -> StepPlan:
        plan = self.plan(**changes)
        self.link.send(plan)
        return plan

    def result(self, plan: StepPlan, num_tokens: int | None = None) -> StepResult:
        """The plan's result, which is the next to come."""
        self.loop.expect(
            "result.step",
            lambda: any(not isinstance(message, Granted) for message in self.link.inbox),
            f"an answer to step {plan.step_id}",
        )
        answer = self.link.inbox.pop(0)
        check = self.report.check
        check("result.step", isinstance(answer, StepResult), f"step {plan.step_id} was answered with {answer}")
        assert isinstance(answer, StepResult)
        check(
            "result.step",
            (answer.epoch, answer.step_id) == (plan.epoch, plan.step_id),
            f"the result of step {answer.step_id} came where step {plan.step_id} was due",
        )
        check("result.tokens", len(answer.token_ids) % 4 == 0, "token_ids is cut short")
        tokens = unpack_u32(answer.token_ids)
        if num_tokens is not None:
            check("result.tokens", len(tokens) == num_tokens, f"{len(tokens)} tokens for {num_tokens} sampling rows")
        check(
            "result.tokens",
            all(token < self.model.vocab_size or token == FAILED_TOKEN_ID for token in tokens),
            f"a token beyond the vocabulary of {self.model.vocab_size}",
        )
        return answer

    def run(self, num_tokens: int | None = None, **changes: Any) -> list[int]:
        return unpack_u32(self.result(self.send(**changes), num_tokens).token_ids)

    def refused(self, rule: str, plan: StepPlan, what: str) -> None:
        self.link.send(plan)
        self.loop.expect(rule, lambda: self.link.inbox, f"an answer to {what}")
        answer = self.link.inbox.pop(0)
        self.report.check(rule, isinstance(answer, PlanRefused), f"{what} was answered with {type(answer).__name__}")
        assert isinstance(answer, PlanRefused)
        self.report.check(
            rule,
            (answer.epoch, answer.step_id) == (plan.epoch, plan.step_id) and answer.reason != "",
            f"the refusal of {what} names another plan, or no reason",
        )

    def blocks(self, first: int, num_tokens: int) -> list[int]:
        """As many blocks from `first` on as hold that many tokens."""
        return list(range(first, first - (-num_tokens // self.model.block_size)))

    def generate(self, row: NewRow, count: int) -> list[int]:
        """Runs one row alone, from prefill on; it has blocks for all."""
        index, num_tokens = row.req_index, len(row.token_ids) // 4
        tokens = self.run(1, new=[row], prefill=[(index, num_tokens - row.num_computed_tokens)])
        for _ in range(count - 1):
            tokens += self.run(1, decode=[index])
        return tokens

    @property
    def exact(self) -> bool:
        """Whether two ways to compute one thing may be held to lead to one token."""
        return self.model.dtype == "float32"

    def tokens(self, count: int, salt: int = 0) -> list[int]:
        return [(7 * i + 31 * salt) % (self.model.vocab_size - 20) + 10 for i in range(count)]


# --- links ----------------------------------------------------------------------------------------


def scheduler_link(kit: ExecutorKit) -> None:
    """Sessions with schedulers."""
    kit.start()
    link_checks.dialler(kit.loop, kit.link, lambda: Takeover(1), lambda: len(kit.link.of(Granted)))


def heartbeats(kit: ExecutorKit) -> None:
    """Idle beats, progress with work, and what Hello says."""
    model = kit.start()
    numbers = (
        model.vocab_size,
        model.max_model_len,
        model.num_blocks,
        model.block_size,
        model.max_num_seqs,
        model.max_num_batched_tokens,
    )
    kit.report.check("hello.model", min(numbers) > 0 and model.name, f"the model is {model}")
    link_checks.beats(kit.loop, kit.link)
    before = link_checks.progress(kit.link)
    kit.generate(kit.row(0, kit.tokens(5), kit.blocks(1, 12)), 4)
    link_checks.moves(kit.loop, kit.link, before)


# --- steps ----------------------------------------------------------------------------------------


def takeovers(kit: ExecutorKit) -> None:
    """Again and again."""
    kit.start()
    for _ in range(3):
        kit.run(1, new=[kit.row(0, kit.tokens(5), kit.blocks(1, 5))], prefill=[(0, 5)])
        kit.takeover()
    plan = kit.send(decode=[0])
    kit.loop.expect("takeover.clears", lambda: kit.link.inbox, "an answer to a plan")
    kit.report.check(
        "takeover.clears",
        isinstance(kit.link.inbox.pop(0), PlanRefused) and plan.step_id == 0,
        "a row was in use after Granted",
    )
    kit.takeover()
    kit.run(0)


def order(kit: ExecutorKit) -> None:
    """Three rows whose tokens are known, in every place of the batch."""
    kit.start()
    new = [kit.row(i, kit.tokens(5, i), kit.blocks(1 + i, 1), logit_bias={20 + i: FORCED}) for i in range(3)]
    tokens = kit.run(3, new=new, prefill=[(2, 5), (0, 5), (1, 5)])
    kit.report.check("sampling.bias", sorted(tokens) == [20, 21, 22], f"forced were 20, 21 and 22, sampled {tokens}")
    kit.report.check("result.order", tokens == [22, 20, 21], f"prefills of rows 2, 0, 1 gave the tokens of {tokens}")
    # Two plans in flight: the second decodes what the first has sampled.
    plans = [kit.send(decode=[0, 1, 2]) for _ in range(2)]
    for plan in plans:
        tokens = unpack_u32(kit.result(plan, 3).token_ids)
        kit.report.check("result.order", tokens == [20, 21, 22], f"decodes of rows 0, 1, 2 gave the tokens of {tokens}")
    late = kit.row(3, kit.tokens(6, 3), kit.blocks(4, 1), logit_bias={23: FORCED})
    tokens = kit.run(1, new=[late], decode=[2], prefill=[(3, 4)])
    kit.report.check("result.order", tokens == [22], f"a decode of row 2 beside half a prefill gave {tokens}")
    tokens = kit.run(3, decode=[0, 1], prefill=[(3, 2)])
    kit.report.check("result.order", tokens == [20, 21, 23], f"decodes of 0 and 1 and the prefill of 3 gave {tokens}")
    again = kit.row(1, kit.tokens(3, 4), kit.blocks(2, 1), logit_bias={24: FORCED})
    kit.run(0, removed=[1])
    tokens = kit.run(2, new=[again], removed=[0], decode=[3], prefill=[(1, 3)])
    kit.report.check(
        "result.order", tokens == [23, 24], f"the decode of 3 and the prefill of a new row 1 gave {tokens}"
    )


def chunks(kit: ExecutorKit) -> None:
    """One prompt, whole and in pieces, and over blocks that are there already."""
    model = kit.start()
    size = model.block_size
    length = min(2 * size + 3, model.max_num_batched_tokens)
    prompt, table = kit.tokens(length), kit.blocks(1, length + 4)
    whole = kit.generate(kit.row(0, prompt, table), 4)
    other = [block + len(table) for block in table]
    row = kit.row(1, prompt, other)
    kit.run(0, new=[row], prefill=[(1, 1)])
    done = 1
    while length - done > 5:
        kit.run(0, prefill=[(1, 5)])
        done += 5
    pieces = kit.run(1, prefill=[(1, length - done)])
    for _ in range(3):
        pieces += kit.run(1, decode=[1])
    if not kit.exact:
        return
    kit.report.check("kv.chunks", pieces == whole, f"in chunks {pieces} came, at once {whole}")
    full = length // size
    kit.takeover()
    third = [*table[:full], *(block + 2 * len(table) for block in table[full:])]
    hit = kit.generate(kit.row(0, prompt, third, num_computed=(length - 1) // size * size), 4)
    kit.report.check("kv.chunks", hit == whole, f"over blocks that were offered {hit} came, computed {whole}")


def seeds(kit: ExecutorKit) -> None:
    """What is drawn depends on (seed, choice, output index) alone."""
    model = kit.start()
    count = 8
    table = kit.blocks(1, 6 + count)

    def draw(seed: int = 1234, choice: int = 0) -> list[int]:
        kit.takeover()
        row = kit.row(0, kit.tokens(6), table, temperature=1.0, seed=seed, choice=choice)
        return kit.generate(row, count)

    first = draw()
    kit.report.check("sampling.seed", draw() == first, "the same row drew other tokens after a takeover")
    others = [draw(seed=1234, choice=1), draw(seed=1234, choice=2), draw(seed=99)]
    kit.report.check("sampling.choice", all(other != first for other in others), "another seed or choice drew the same")
    if kit.exact and model.max_num_seqs > 2:
        kit.takeover()
        rows = [
            kit.row(i, kit.tokens(6, i), kit.blocks(1 + i * len(table), 6 + count), temperature=1.0, seed=1234 + i)
            for i in range(3)
        ]
        tokens = [kit.run(3, new=rows, prefill=[(2, 6), (1, 6), (0, 6)])[2]]
        tokens += [kit.run(3, decode=[0, 1, 2])[0] for _ in range(count - 1)]
        kit.report.check("sampling.seed", tokens == first, "the same row drew other tokens beside others")
    if kit.restart is not None:
        kit.link.close()
        kit.restart()
        kit.link.bind()
        kit.link.wait_open()
        ids = kit.takeover()
        kit.report.check("hashes.whole", not ids, "a process that has just started offers blocks")
        kit.report.check("sampling.seed", draw() == first, "the same row drew other tokens after a restart")


def min_tokens(kit: ExecutorKit) -> None:
    """Forced ends that come too early."""
    kit.start()
    rows = [
        kit.row(0, kit.tokens(5), kit.blocks(1, 1), eos=[30], logit_bias={30: FORCED}, min_tokens=2),
        kit.row(1, kit.tokens(5), kit.blocks(2, 1), stop_token_ids=[31], logit_bias={31: FORCED}, min_tokens=2),
    ]
    first = kit.run(2, new=rows, prefill=[(0, 5), (1, 5)])
    kit.report.check(
        "sampling.min-tokens", first[0] != 30 and first[1] != 31, "an end was sampled as the first of min_tokens 2"
    )
    kit.run(2, decode=[0, 1])
    third = kit.run(2, decode=[0, 1])
    kit.report.check(
        "sampling.min-tokens", third == [30, 31], f"forced were 30 and 31 after min_tokens, sampled {third}"
    )


def logprobs(kit: ExecutorKit) -> None:
    """Of outputs, and of prompts in chunks."""
    kit.start()
    rows = [
        kit.row(0, kit.tokens(5), kit.blocks(1, 1)),
        kit.row(1, kit.tokens(5), kit.blocks(2, 1), logprobs=3),
        kit.row(2, kit.tokens(9), kit.blocks(3, 9), prompt_logprobs=1, prompt_logprobs_start=0),
    ]
    plan = kit.send(new=rows, prefill=[(0, 5), (1, 5), (2, 4)])
    result = kit.result(plan, 2)
    tokens, entries = unpack_u32(result.token_ids), result.logprobs
    check = kit.report.check
    check("result.logprobs", entries is not None and len(entries) == 2, f"logprobs is {entries} for two rows")
    assert entries is not None
    check("result.logprobs", entries[0] is None, "a row that did not ask has log-probabilities")
    entry = entries[1]
    check("result.logprobs", isinstance(entry, TokenLogprobs), "a row that asked has no log-probabilities")
    assert isinstance(entry, TokenLogprobs)
    values = [logprob for _, logprob in entry.top]
    check(
        "result.logprobs",
        len(values) == 3 and values == sorted(values, reverse=True) and max(values) <= 1e-6,
        f"the top log-probabilities are {values}",
    )
    check(
        "result.logprobs",
        (entry.token_id, entry.rank) == (tokens[1], 1) and abs(entry.logprob - values[0]) < 1e-4,
        f"a greedy token has rank {entry.rank} and log-probability {entry.logprob}",
    )
    told = _prompt_entries(result.prompt_logprobs, [])
    told = _prompt_entries(kit.result(kit.send(prefill=[(2, 5)]), 1).prompt_logprobs, told)
    right = [None, *kit.tokens(9)[1:]]
    check(
        "result.prompt-logprobs",
        [entry and entry.token_id for entry in told] == right,
        f"entries of a prompt of 9 tokens came for {len(told)} positions, or others",
    )


def _prompt_entries(
    items: Sequence[RowPromptLogprobs], known: list[TokenLogprobs | None]
) -> list[TokenLogprobs | None]:
    for item in items:
        known = known[: item.start] + list(item.entries)
    return known


def failed_row(kit: ExecutorKit) -> None:
    """A bias that is no number: where it makes a row fail, it fails alone."""
    kit.start()
    rows = [
        kit.row(0, kit.tokens(5), kit.blocks(1, 1), logit_bias={40: FORCED}),
        kit.row(1, kit.tokens(5), kit.blocks(2, 1), logit_bias={41: float("nan")}),
    ]
    plan = kit.send(new=rows, prefill=[(0, 5), (1, 5)])
    kit.loop.expect("result.step", lambda: kit.link.inbox, f"an answer to step {plan.step_id}")
    if isinstance(kit.link.inbox[0], PlanRefused):
        return
    result = kit.result(plan, 2)
    tokens = unpack_u32(result.token_ids)
    kit.report.check("result.failed-row", tokens[0] == 40, f"the row beside it sampled {tokens[0]}, forced was 40")
    if tokens[1] == FAILED_TOKEN_ID:
        named = [req_index for req_index, _ in result.errors]
        kit.report.check("result.failed-row", named == [1], f"errors names the rows {named}, right is [1]")
        tokens = kit.run(1, removed=[1], decode=[0])
        kit.report.check("result.failed-row", tokens == [40], "the row beside it did not go on")


# --- refusals -------------------------------------------------------------------------------------


def gaps(kit: ExecutorKit) -> None:
    """Steps and epochs out of order."""
    kit.start()
    row = kit.row(0, kit.tokens(5), kit.blocks(1, 20), logit_bias={20: FORCED})
    for step_id in (1, 7):
        kit.refused("plan.gap", kit.plan(new=[row], prefill=[(0, 5)], step_id=step_id), f"step {step_id} for step 0")
        kit.takeover()
    kit.run(1, new=[row], prefill=[(0, 5)])
    kit.refused("plan.gap", kit.plan(decode=[0], step_id=0), "step 0 again")
    _still_refuses(kit, kit.plan(decode=[0], step_id=1))
    kit.refused("plan.gap", kit.plan(new=[row], prefill=[(0, 5)], epoch=kit.epoch + 1), "an epoch never granted")
    old = kit.epoch
    kit.takeover()
    kit.link.send(kit.plan(new=[row], prefill=[(0, 5)], step_id=0, epoch=old))
    tokens = kit.run(1, new=[row], prefill=[(0, 5)], step_id=0)
    kit.report.check("plan.old-epoch", tokens == [20], f"after a plan of the old epoch {tokens} came")


def _still_refuses(kit: ExecutorKit, plan: StepPlan) -> None:
    """After a refusal a plan that would have been right is not run; then takes over."""
    kit.link.send(plan)
    kit.link.send(Takeover(kit.link.incarnation))
    kit.loop.expect("takeover.granted", lambda: kit.link.of(Granted), "Granted after a refusal")
    ran = kit.link.of(StepResult)
    kit.report.check("plan.nothing-applied", not ran, "a plan was run between a refusal and the Takeover")
    kit.takeover()


def contradictions(kit: ExecutorKit) -> None:
    """Plans that cannot be."""
    model = kit.start()
    size = model.block_size
    row = kit.row(0, kit.tokens(5), kit.blocks(1, 1))
    far = model.num_blocks + 1
    too_many = model.max_num_batched_tokens + 1
    long_table = kit.blocks(1, min(too_many, model.max_model_len))
    cases: list[tuple[str, dict[str, Any]]] = [
        ("a decode of a row that is not in use", {"decode": [0]}),
        ("a prefill of a row that is not in use", {"prefill": [(0, 1)]}),
        ("the removal of a row that is not in use", {"removed": [0]}),
        ("a block for a row that is not in use", {"blocks": [(0, 1)]}),
        ("a row beyond max_num_seqs", {"new": [kit.row(model.max_num_seqs, kit.tokens(5), kit.blocks(1, 1))]}),
        ("one row given away twice", {"new": [row, row]}),
        ("block 0", {"new": [kit.row(0, kit.tokens(5), [0])], "prefill": [(0, 5)]}),
        ("a block beyond num_blocks", {"new": [kit.row(0, kit.tokens(5), [far])], "prefill": [(0, 5)]}),
        ("more tokens than are known", {"new": [row], "prefill": [(0, 6)]}),
        ("no token of a row", {"new": [row], "prefill": [(0, 0)]}),
        ("a decode of a row with a whole prompt to compute", {"new": [row], "decode": [0]}),
        (
            "tokens without a block",
            {"new": [kit.row(0, kit.tokens(size + 1), [1])], "prefill": [(0, size + 1)]},
        ),
        ("a token beyond the vocabulary", {"new": [kit.row(0, [5, model.vocab_size], [1])], "prefill": [(0, 2)]}),
        ("a row with nothing to compute", {"new": [kit.row(0, kit.tokens(5), [1], num_computed=5)]}),
        ("a row without tokens", {"new": [kit.row(0, [], [1])]}),
    ]
    if model.max_model_len >= too_many and len(long_table) <= model.num_blocks:
        new = kit.row(0, kit.tokens(too_many), long_table)
        cases.append(("more tokens than max_num_batched_tokens", {"new": [new], "prefill": [(0, too_many)]}))
    for what, changes in cases:
        kit.refused("plan.contradiction", kit.plan(**changes), what)
        kit.takeover()
    for columns in ({"prefill_counts": b"\5\0"}, {"prefill_counts": b""}, {"removed": b"\1"}):
        plan = msgspec.structs.replace(kit.plan(new=[row], prefill=[(0, 5)]), **columns)
        kit.refused("plan.contradiction", plan, f"a malformed column {columns}")
        kit.takeover()


def nothing_applied(kit: ExecutorKit) -> None:
    """A plan whose last part is wrong, on blocks that hold something."""
    model = kit.start()
    size = model.block_size
    prompt, table = kit.tokens(size + 2, 5), kit.blocks(1, size + 8)
    first = kit.run(1, new=[kit.row(0, prompt, table)], prefill=[(0, size + 2)])
    kit.takeover()
    name = block_hash(hash_root(), pack_token_ids(prompt[:size]))
    kit.report.check("hashes.whole", kit.offered.get(table[0]) == name, "a whole block is not offered under its hash")
    writer = kit.row(1, kit.tokens(size, 6), table[:1])
    kit.refused(
        "plan.contradiction", kit.plan(new=[writer], prefill=[(1, size)], decode=[3]), "a decode of a row not in use"
    )
    _still_refuses(kit, kit.plan(new=[writer], prefill=[(1, size)], step_id=0))
    kit.report.check(
        "plan.nothing-applied", kit.offered.get(table[0]) == name, "a refused plan took a block's hash away"
    )
    if kit.exact:
        again = kit.run(1, new=[kit.row(0, prompt, table, num_computed=size)], prefill=[(0, 2)])
        kit.report.check("plan.nothing-applied", again == first, "a refused plan has written to a block")


# --- hashes ---------------------------------------------------------------------------------------


def hashes(kit: ExecutorKit) -> None:
    """What is offered, step by step."""
    model = kit.start()
    size = model.block_size
    root = hash_root([("cache_salt", "conformance")])
    table = kit.blocks(1, 3 * size)
    prompt = kit.tokens(size + size // 2, 9)
    check = kit.report.check

    def right(tokens: Sequence[int]) -> dict[int, bytes]:
        parent, chain = root, {}
        for logical in range(len(tokens) // size):
            parent = block_hash(parent, pack_token_ids(tokens[logical * size : (logical + 1) * size]))
            chain[table[logical]] = parent
        return chain

    def offered() -> dict[int, bytes]:
        kit.takeover()
        return {block: name for block, name in kit.offered.items() if block in table}

    # Blocks of earlier rows are written first, so that nothing is left of them.
    for block in table:
        kit.run(None, new=[kit.row(0, kit.tokens(1), [block])], prefill=[(0, 1)])
        kit.takeover()
        check("hashes.rewritten", block not in kit.offered, f"block {block} is offered while it holds one token")

    kit.run(0, new=[kit.row(0, prompt, table, root=root)], prefill=[(0, size - 1)])
    now = offered()
    check("hashes.whole", not now, f"blocks {sorted(now)} are offered where {size - 1} tokens have been computed")
    kit.run(1, new=[kit.row(0, prompt, table, root=root)], prefill=[(0, len(prompt))])
    now = offered()
    check("hashes.whole", set(now) == {table[0]}, f"blocks {sorted(now)} are offered of which only {table[0]} is whole")
    check("hashes.root", now == right(prompt), "a block is offered under another hash than its root and tokens give")
    sampled = kit.generate(kit.row(0, prompt, table, root=root), 2 * size - len(prompt) + 1)
    known = [*prompt, *sampled]
    now = offered()
    check(
        "hashes.whole",
        now == right(known[: 2 * size]),
        f"blocks {sorted(now)} are offered where {table[:2]} are whole, or under other hashes",
    )
    kit.run(None, new=[kit.row(0, kit.tokens(2), [table[0]])], prefill=[(0, 1)])
    now = offered()
    check("hashes.rewritten", table[0] not in now, "a block is offered under its old name while it is written anew")
    check("hashes.whole", set(now) == {table[1]}, f"blocks {sorted(now)} are offered, right is {table[1]} alone")


SCENARIOS: dict[str, Callable[[ExecutorKit], None]] = {
    function.__name__: function
    for function in (
        scheduler_link,
        heartbeats,
        takeovers,
        order,
        chunks,
        seeds,
        min_tokens,
        logprobs,
        failed_row,
        structured_rows,
        watching.timed_steps,
        gaps,
        contradictions,
        nothing_applied,
        hashes,
    )
}
