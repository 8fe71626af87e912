"""Drives a scheduler: the kit dials it as tokenizers and as the executor."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from quartet.shared.conformance import link_checks, watching
from quartet.shared.conformance.columns import pack_u32
from quartet.shared.conformance.fake_executor import MODEL, FakeExecutor
from quartet.shared.conformance.fake_tokenizer import EOS, Asked, FakeTokenizer, continuation
from quartet.shared.conformance.report import Report
from quartet.shared.conformance.structured import SCHEDULER_RULES, structured_requests
from quartet.shared.conformance.wire import Dialled, Loop
from quartet.shared.messages import (
    Abort,
    ChoicePast,
    ErrorCode,
    Finish,
    FinishReason,
    GetLoads,
    Loads,
    ModelInfo,
    Release,
    Role,
    StepResult,
    Takeover,
)
from quartet.shared.sampling_params import SamplingParams

RULES = link_checks.BINDER_RULES | {
    "plan.takeover": "an executor is asked for Takeover, and plans come only after Granted, with its epoch",
    "plan.step-ids": "step ids of an epoch are 0, 1, 2, ... without a gap",
    "plan.in-flight": "at most two plans are in flight",
    "plan.columns": "a plan's columns are whole, match their partners, and name blocks that there are",
    "plan.rows": "only a free row is given away, and only rows in use are computed, extended or removed, each once",
    "plan.row-reuse": "a row is given away again only after the last plan that names it has returned",
    "plan.null-block": "block 0 is never handed out",
    "plan.blocks": "rows share only blocks that hold the same whole prefix, and never write to a shared one",
    "plan.budget": "a step computes at most max_num_batched_tokens tokens",
    "plan.positions": "a decode has one token to compute, a prefill no more than are known, a new row at least one",
    "plan.request": "a new row carries the prompt and the sampling parameters that were asked for",
    "plan.hash-root": "hash_root names the cache salt, so that no two salts share blocks",
    "plan.eos": "eos_token_ids travel with a row, and are empty with ignore_eos",
    "output.tokens": "outputs are the tokens sampled for the request, in order",
    "output.contiguous": "outputs never leave a gap",
    "output.unchanged": "a token that was told never changes",
    "output.owner": "outputs go to the session that asked last, under its attempt",
    "output.complete": "every request that can run ends",
    "output.finish": "a choice ends at max_tokens, a full context, an end-of-sequence or a stop token, and says which",
    "output.logprobs": "log-probabilities come with the tokens they belong to",
    "output.prompt-logprobs": "prompt log-probabilities come for every position, without a gap",
    "output.cached": "num_cached_tokens is the number of prompt tokens that were not computed",
    "request.attempts": "a lower attempt is ignored, whatever it asks",
    "request.shorter-past": "a known request added with a shorter past is sent again from there, without computing",
    "request.other-past": "a past that is no prefix of what is known wins: the request is computed from it",
    "request.ended-past": "a past that already meets a finish condition is answered without a step",
    "request.duplicate": "a request added twice runs once, and a finished one is told again until Release",
    "request.finish": "Finish cuts a choice, frees it and retains what is left; twice is as once",
    "request.release": "Release and Abort forget a request and free its blocks; twice, or unknown, is harmless",
    "recovery.offers": "what a returning executor offers is hit: at most block_size + 2 tokens are computed again",
    "recovery.death": "after an executor's death requests go on with all outputs they had, told once",
    "recovery.failure": "StepFailed or PlanRefused leads to a new Takeover, and nothing is lost",
    "recovery.old-epoch": "a result of an earlier epoch changes nothing",
    "recovery.failed-row": "a row that failed fails its request alone, with INTERNAL",
    "recovery.tokenizer": "another tokenizer takes a request over with a higher attempt",
    "refuse.field": "what can never run is refused at once with INVALID_ARGUMENT and the field's name",
    "loads.answered": "GetLoads is answered with its call id, after all that was sent before it",
    "loads.idle": "when all is done nothing is running, waiting or retained, and every block is free",
    **SCHEDULER_RULES,
    **watching.SCHEDULER_RULES,
}


@dataclass
class SchedulerKit:
    """Fresh neighbours for each scenario."""

    report: Report
    tokenizer_link: str
    executor_link: str
    timeout: float = 10.0
    gone: Callable[[], str] | None = None

    def __post_init__(self) -> None:
        self.loop = Loop(self.report, self.timeout, self.gone)
        self.tokenizers: list[FakeTokenizer] = []
        self.random = random.Random(7)

    def start(self, model: ModelInfo = MODEL, running: bool = True) -> tuple[FakeTokenizer, FakeExecutor]:
        self.executor = FakeExecutor(self.loop, self.executor_link, model)
        self.executor.running = running
        self.executor.open()
        return self.tokenizer(), self.executor

    def tokenizer(self) -> FakeTokenizer:
        tokenizer = FakeTokenizer(
            self.loop, self.tokenizer_link, self.executor, f"conformance-tokenizer-{len(self.tokenizers)}"
        )
        self.tokenizers.append(tokenizer)
        tokenizer.link.open()
        return tokenizer

    def close(self) -> None:
        """Leaves nothing behind in the scheduler, as far as it still listens."""
        for tokenizer in self.tokenizers:
            if tokenizer.link.is_open:
                for asked in tokenizer.asked.values():
                    tokenizer.abort(asked)
        if any(tokenizer.asked for tokenizer in self.tokenizers):
            self.loop.idle.clear()
            self.loop.run_for(0.1)
        self.loop.close()

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(10, 1000) for _ in range(length)]

    def until_outputs(self, asked: Asked, count: int) -> None:
        """Steps by hand until the request has that many outputs."""
        executor = self.executor

        def turn() -> bool:
            enough = len(asked.outputs[0]) >= count
            if not enough and executor.queue:
                executor.step()
            return enough

        self.loop.expect("output.complete", turn, f"output {count} of a request alone")

    def idle(self, tokenizer: FakeTokenizer, rule: str = "loads.idle") -> None:
        for asked in tokenizer.asked.values():
            tokenizer.release(asked)
        tokenizer.settle()
        loads = tokenizer.get_loads()
        left = (loads.num_running, loads.num_waiting, loads.num_preempted, loads.num_requests_retained)
        self.report.check(
            rule, left == (0, 0, 0, 0), "running, waiting, preempted and retained are {}, {}, {}, {}".format(*left)
        )
        self.report.check(
            rule,
            loads.num_free_blocks == loads.num_blocks == self.executor.model.num_blocks,
            f"{loads.num_free_blocks} of {self.executor.model.num_blocks} blocks are free",
        )


# --- links ----------------------------------------------------------------------------------------


def tokenizer_link(kit: SchedulerKit) -> None:
    """Sessions with tokenizers."""
    calls = iter(range(1, 1000))

    def works(peer: Dialled) -> None:
        call_id = next(calls)
        peer.inbox.clear()
        peer.send(GetLoads(call_id))
        loads = peer.take("loads.answered", Loads)
        kit.report.check("loads.answered", loads.call_id == call_id, f"call {call_id} was answered as {loads.call_id}")

    link_checks.binder(
        kit.loop,
        lambda role: Dialled(kit.loop, kit.tokenizer_link, role, "conformance-tokenizer"),
        Role.TOKENIZER,
        Role.GATEWAY,
        works,
        GetLoads(0),
        Loads,
    )


def executor_link(kit: SchedulerKit) -> None:
    """Sessions with executors."""

    def works(peer: Dialled) -> None:
        """A Takeover has come in this session, and it is still alive."""
        kit.loop.expect("plan.takeover", lambda: peer.of(Takeover), "no Takeover came to an executor")
        greetings = peer.num_greetings
        peer.send(peer.own_hello())
        kit.loop.expect("link.repeated-hello", lambda: peer.num_greetings > greetings, "no answer to a repeated Hello")

    link_checks.binder(
        kit.loop,
        lambda role: Dialled(kit.loop, kit.executor_link, role, "conformance-executor", MODEL),
        Role.EXECUTOR,
        Role.TOKENIZER,
        works,
        StepResult(1, 0, b""),
        Takeover,
    )


def heartbeats(kit: SchedulerKit) -> None:
    """Idle beats, and progress with work."""
    tokenizer, executor = kit.start()
    link_checks.beats(kit.loop, tokenizer.link, executor.link)
    before = link_checks.progress(tokenizer.link)
    tokenizer.wait(tokenizer.ask(kit.prompt(5)))
    link_checks.moves(kit.loop, tokenizer.link, before)


# --- plans ----------------------------------------------------------------------------------------


def takeover_first(kit: SchedulerKit) -> None:
    """Requests wait for the executor, and the executor for its Takeover."""
    kit.executor = executor = FakeExecutor(kit.loop, kit.executor_link)
    tokenizer = kit.tokenizer()
    asked = [tokenizer.ask(kit.prompt(n)) for n in (3, 9)]
    executor.granting = False
    executor.link.open()
    kit.loop.expect("plan.takeover", lambda: executor.takeovers, "no Takeover came to an executor")
    kit.loop.run_for(0.2)
    executor.grant()
    tokenizer.wait(*asked)
    kit.idle(tokenizer)


def in_flight(kit: SchedulerKit) -> None:
    """An executor that takes its time is not flooded."""
    tokenizer, executor = kit.start(running=False)
    asked = [tokenizer.ask(kit.prompt(n), max_tokens=20) for n in (3, 9, 30, 40)]
    for _ in range(6):
        kit.loop.expect("output.complete", lambda: executor.queue, "a plan for waiting requests")
        tokenizer.settle()
        executor.step()
    executor.running = True
    tokenizer.wait(*asked)
    kit.idle(tokenizer)


def busy(kit: SchedulerKit) -> None:
    """Many requests over few rows and blocks, with common beginnings, siblings and aborts."""
    tokenizer, executor = kit.start()
    common = kit.prompt(24)
    asked: list[Asked] = []
    aborted: list[Asked] = []
    for i in range(40):
        prompt = common[: kit.random.choice((0, 8, 24))] + kit.prompt(kit.random.randint(1, 60))
        one = tokenizer.ask(prompt, n=kit.random.choice((1, 1, 1, 3)), max_tokens=kit.random.randint(1, 40))
        (aborted if i % 8 == 7 else asked).append(one)
        if i % 5 == 4:
            kit.loop.run_for(0.01)
    for one in aborted:
        tokenizer.abort(one)
    tokenizer.wait(*asked)
    kit.report.check("plan.budget", executor.largest_plan > 0, "no plan came")
    kit.idle(tokenizer)


def full(kit: SchedulerKit) -> None:
    """A pool for about two requests: the others wait or are preempted, and none is lost."""
    model = msgspec.structs.replace(MODEL, num_blocks=20)
    tokenizer, _ = kit.start(model)
    asked = [tokenizer.ask(kit.prompt(20), max_tokens=40) for _ in range(6)]
    tokenizer.wait(*asked)
    kit.idle(tokenizer)


def rows(kit: SchedulerKit) -> None:
    """Two rows for many short requests: each is given away as soon as may be, and no sooner."""
    model = msgspec.structs.replace(MODEL, max_num_seqs=2)
    tokenizer, executor = kit.start(model, running=False)
    asked = [tokenizer.ask(kit.prompt(4), max_tokens=3) for _ in range(12)]

    def turn() -> bool:
        # The second plan is awaited a moment, so that it is judged while the first is in flight.
        if executor.queue:
            kit.loop.until(lambda: len(executor.queue) > 1, 0.02)
            executor.step()
        return all(a.done for a in asked)

    kit.loop.expect("output.complete", turn, "the end of 12 requests over two rows")
    tokenizer.wait(*asked)
    kit.idle(tokenizer)


# --- outputs --------------------------------------------------------------------------------------


def ends(kit: SchedulerKit) -> None:
    """Every way to end."""
    tokenizer, _ = kit.start()
    asked = [
        tokenizer.ask(kit.prompt(5), max_tokens=1),
        tokenizer.ask(kit.prompt(5), max_tokens=20, ignore_eos=False, forced={3: EOS}),
        tokenizer.ask(kit.prompt(5), max_tokens=20, ignore_eos=True, forced={3: EOS}),
        tokenizer.ask(kit.prompt(5), max_tokens=20, stop_token_ids=[7], forced={2: 7}),
        tokenizer.ask(kit.prompt(5), max_tokens=20, stop_token_ids=[7], min_tokens=6, forced={2: 7, 8: 7}),
        tokenizer.ask(kit.prompt(246), max_tokens=10),
        tokenizer.ask(kit.prompt(250), max_tokens=None),
    ]
    tokenizer.wait(*asked)
    kit.idle(tokenizer)


def logprobs(kit: SchedulerKit) -> None:
    """Log-probabilities of outputs and of the prompt."""
    tokenizer, _ = kit.start()
    one = tokenizer.ask(kit.prompt(10), logprobs=0)
    plain = tokenizer.ask(kit.prompt(10))
    scored = tokenizer.ask(kit.prompt(70), prompt_logprobs=0)
    tokenizer.wait(one, plain, scored)
    entries = [entry and entry.token_id for entry in scored.prompt_logprobs]
    kit.report.check(
        "output.prompt-logprobs",
        entries == [None, *scored.message.prompt_token_ids[1:]],
        f"{len(entries)} entries came for a prompt of {len(scored.message.prompt_token_ids)} tokens",
    )
    kit.idle(tokenizer)


def prefixes(kit: SchedulerKit) -> None:
    """The same prompt again, and under other salts."""
    tokenizer, _ = kit.start()
    prompt = kit.prompt(20)
    for salt in ("", "", "a", "b", "a"):
        tokenizer.wait(tokenizer.ask(prompt, salt=salt))
    kit.idle(tokenizer)


# --- requests that are known ----------------------------------------------------------------------


def attempts(kit: SchedulerKit) -> None:
    """What an earlier attempt still asks is ignored."""
    tokenizer, executor = kit.start(running=False)
    asked = tokenizer.ask(kit.prompt(6), max_tokens=10, attempt=5)
    kit.until_outputs(asked, 3)
    runs = len(executor.runs)
    old = msgspec.structs.replace(asked.message, attempt=4, prompt_token_ids=kit.prompt(9))
    for message in (old, Abort(asked.request_id, 4), Finish(asked.request_id, 4, 0, 1), Release(asked.request_id, 4)):
        tokenizer.link.send(message)
    tokenizer.settle()
    executor.running = True
    tokenizer.wait(asked, rule="request.attempts")
    kit.report.check("request.attempts", len(executor.runs) == runs, "a lower attempt made the request run again")
    kit.idle(tokenizer)


def shorter_past(kit: SchedulerKit) -> None:
    """A tokenizer that lost some outputs is sent them again."""
    tokenizer, executor = kit.start(running=False)
    asked = tokenizer.ask(kit.prompt(6), max_tokens=12)
    kit.until_outputs(asked, 6)
    known = list(asked.outputs[0])
    steps = executor.num_plans
    tokenizer.add_again(asked, {0: known[:3]})
    kit.loop.expect(
        "request.shorter-past",
        lambda: len(asked.outputs[0]) >= len(known),
        "the outputs known beyond the past, sent without a step",
    )
    kit.report.check(
        "request.shorter-past", asked.received[0].start == 3, f"outputs came from {asked.received[0].start} on, not 3"
    )
    kit.report.check("request.shorter-past", executor.num_plans <= steps + 2, "it was computed again")
    executor.running = True
    tokenizer.wait(asked, rule="request.shorter-past")
    runs = sum(run.seed == asked.seed for run in executor.runs)
    kit.report.check("request.shorter-past", runs == 1, f"it entered the batch {runs} times")
    kit.idle(tokenizer)


def other_past(kit: SchedulerKit) -> None:
    """Longer pasts, and others than what is known here."""
    tokenizer, executor = kit.start(running=False)
    message_past = kit.prompt(5)
    unknown = tokenizer.ask(kit.prompt(6), max_tokens=12, pasts={0: message_past})
    longer = tokenizer.ask(kit.prompt(7), max_tokens=12)
    other = tokenizer.ask(kit.prompt(8), max_tokens=12)
    kit.until_outputs(longer, 2)
    kit.until_outputs(other, 2)
    known, _ = continuation(longer.message, 0, {}, [], executor.model)
    tokenizer.add_again(longer, {0: known[:8]})
    tokenizer.add_again(other, {0: kit.prompt(4)})
    tokenizer.settle()
    executor.running = True
    tokenizer.wait(unknown, longer, other, rule="request.other-past")
    for asked in (unknown, longer, other):
        past = asked.message.choices[0].output_token_ids
        first = asked.received[0].start
        kit.report.check(
            "request.other-past", first == len(past), f"outputs came from {first} on after a past of {len(past)}"
        )
        run = [run for run in executor.runs if run.seed == asked.seed][-1]
        right = asked.message.prompt_token_ids + past
        kit.report.check(
            "request.other-past",
            run.token_ids[: len(right)] == right and run.num_prompt_tokens == len(asked.message.prompt_token_ids),
            f"a row of {len(run.token_ids)} tokens came for a prompt and past of {len(right)}: the past is lost",
        )
    kit.idle(tokenizer)


def ended_past(kit: SchedulerKit) -> None:
    """Nothing is left to generate."""
    tokenizer, executor = kit.start()
    past = kit.prompt(4)
    asked = [
        tokenizer.ask(kit.prompt(6), max_tokens=4, pasts={0: past}),
        tokenizer.ask(kit.prompt(6), max_tokens=9, ignore_eos=False, pasts={0: [*past, EOS]}),
        tokenizer.ask(kit.prompt(6), max_tokens=9, stop_token_ids=[7], pasts={0: [*past, 7]}),
    ]
    tokenizer.wait(*asked, rule="request.ended-past")
    kit.report.check("request.ended-past", not executor.num_plans, f"{executor.num_plans} plans were made for it")
    kit.idle(tokenizer)


def duplicates(kit: SchedulerKit) -> None:
    """The same NewRequest more than once."""
    tokenizer, executor = kit.start()
    asked = tokenizer.ask(kit.prompt(6), max_tokens=12)
    for _ in range(3):
        tokenizer.link.send(asked.message)
    tokenizer.wait(asked)
    runs = sum(run.seed == asked.seed for run in executor.runs)
    kit.report.check("request.duplicate", runs == 1, f"it entered the batch {runs} times")
    tokenizer.settle()
    steps = executor.num_plans
    ids = list(asked.outputs[0])
    tokenizer.add_again(asked, {0: []})
    tokenizer.wait(asked, rule="request.duplicate")
    kit.report.check("request.duplicate", asked.outputs[0] == ids, "a finished request was told otherwise")
    kit.report.check("request.duplicate", executor.num_plans == steps, "a finished request was computed again")
    kit.idle(tokenizer)


def finish(kit: SchedulerKit) -> None:
    """A stop string ended a choice."""
    tokenizer, executor = kit.start(running=False)
    asked = tokenizer.ask(kit.prompt(6), max_tokens=40)
    kit.until_outputs(asked, 6)
    ids = asked.outputs[0][:4]
    tokenizer.finish(asked, 4)
    tokenizer.finish(asked, 4)
    tokenizer.link.send(Finish(1, 1, 0, 4))
    tokenizer.link.send(Finish(asked.request_id, asked.message.attempt, 9, 4))
    tokenizer.settle()
    executor.running = True
    kit.loop.expect("request.finish", lambda: not executor.queue, "the executor's queue to empty")
    tokenizer.settle()
    steps = executor.num_plans
    loads = tokenizer.get_loads()
    kit.report.check("request.finish", loads.num_running == 0, "it still runs after Finish")
    kit.report.check(
        "request.finish", loads.num_free_blocks == executor.model.num_blocks, "its blocks are not free after Finish"
    )
    kit.report.check("request.finish", loads.num_requests_retained == 1, "it is not retained until Release")
    asked.message.attempt += 1
    asked.outputs = {0: []}
    asked.finished.clear()
    tokenizer.add(asked)
    kit.loop.expect("request.finish", lambda: asked.finished, "no answer to a request that Finish has ended")
    kit.report.check(
        "request.finish",
        asked.outputs[0] == ids and asked.finished[0][0] is FinishReason.STOP,
        f"it has {len(asked.outputs[0])} tokens and {asked.finished[0][0].name} after Finish at 4",
    )
    kit.report.check("request.finish", executor.num_plans == steps, "it was computed again after Finish")
    kit.idle(tokenizer)


def release_and_abort(kit: SchedulerKit) -> None:
    """Forgetting, twice and of the unknown; aborts before, during and after."""
    tokenizer, executor = kit.start(running=False)
    done = tokenizer.ask(kit.prompt(6), max_tokens=1)
    kit.until_outputs(done, 1)
    for _ in range(2):
        tokenizer.release(done)
        tokenizer.link.send(Release(1, 1))
        tokenizer.link.send(Abort(1, 1))
    decoding = tokenizer.ask(kit.prompt(6), max_tokens=50)
    kit.until_outputs(decoding, 2)
    prefilling = tokenizer.ask(kit.prompt(150), max_tokens=50)
    tokenizer.settle()
    queued = [tokenizer.ask(kit.prompt(6)) for _ in range(12)]
    at_once = tokenizer.ask(kit.prompt(6))
    tokenizer.abort(at_once)
    for asked in (decoding, prefilling, *queued):
        tokenizer.abort(asked)
        tokenizer.abort(asked)
    tokenizer.settle()
    executor.running = True
    kit.loop.expect("request.release", lambda: not executor.queue, "the executor's queue to empty")
    kit.idle(tokenizer, "request.release")
    later = tokenizer.ask(kit.prompt(6))
    tokenizer.wait(later)
    kit.idle(tokenizer)


# --- recovery -------------------------------------------------------------------------------------


def _streams(kit: SchedulerKit, count: int) -> tuple[FakeTokenizer, FakeExecutor, list[Asked]]:
    """Three streams that are `count` outputs in or more."""
    tokenizer, executor = kit.start(running=False)
    asked = [tokenizer.ask(kit.prompt(n), max_tokens=60) for n in (9, 13, 22)]
    for one in asked:
        kit.until_outputs(one, count)
    return tokenizer, executor, asked


def _resumed(kit: SchedulerKit, rule: str, tokenizer: FakeTokenizer, asked: list[Asked], runs: int) -> None:
    """They go on with their outputs, and end right."""
    known = {one.seed: one.message.prompt_token_ids + one.outputs[0] for one in asked}
    for one in asked:
        one.received.clear()
    counts = {one.seed: len(one.outputs[0]) for one in asked}
    kit.executor.running = True
    tokenizer.wait(*asked, rule=rule)
    for one in asked:
        later = [run for run in kit.executor.runs[runs:] if run.seed == one.seed]
        kit.report.check(rule, later, "a request did not come back into the batch")
        kit.report.check(
            rule,
            later[0].token_ids == known[one.seed],
            f"a request came back with {len(later[0].token_ids)} tokens and had {len(known[one.seed])}",
        )
        kit.report.check(rule, one.received[0].start >= counts[one.seed], "tokens that had been told were told again")


def offers(kit: SchedulerKit) -> None:
    """An executor comes back with its KV memory."""
    tokenizer, executor, asked = _streams(kit, 20)
    runs = len(executor.runs)
    executor.die(keep_blocks=True)
    _resumed(kit, "recovery.death", tokenizer, asked, runs)
    allowed = executor.model.block_size + 2
    for one in asked:
        run = next(run for run in executor.runs[runs:] if run.seed == one.seed)
        again = len(run.token_ids) - run.num_skipped
        kit.report.check(
            "recovery.offers",
            again <= allowed,
            f"{again} of {len(run.token_ids)} tokens are computed again, and all were offered; {allowed} may be",
        )
    kit.idle(tokenizer)


def death(kit: SchedulerKit) -> None:
    """An executor comes back with nothing, twice."""
    tokenizer, executor, asked = _streams(kit, 10)
    executor.die(keep_blocks=False)
    for one in asked:
        kit.until_outputs(one, len(one.outputs[0]) + 1)
    runs = len(executor.runs)
    executor.die(keep_blocks=False)
    _resumed(kit, "recovery.death", tokenizer, asked, runs)
    kit.idle(tokenizer)


def failure(kit: SchedulerKit) -> None:
    """A step fails, a plan is refused."""
    tokenizer, executor, asked = _streams(kit, 5)
    for provoke in (executor.fail_step, executor.refuse_plan):
        kit.loop.expect("output.complete", lambda: executor.queue, "a plan for running requests")
        runs = len(executor.runs)
        provoke()
        kit.loop.expect("recovery.failure", lambda: executor.granted, "a new Takeover")
        if provoke == executor.fail_step:
            for one in asked:
                kit.until_outputs(one, len(one.outputs[0]) + 1)
    _resumed(kit, "recovery.failure", tokenizer, asked, runs)
    kit.idle(tokenizer)


def old_epoch(kit: SchedulerKit) -> None:
    """Results from before the last Takeover."""
    tokenizer, executor, asked = _streams(kit, 5)
    executor.die(keep_blocks=True)
    for one in asked:
        kit.until_outputs(one, len(one.outputs[0]) + 1)
    takeovers = executor.takeovers
    for step_id in (0, executor.next_step_id - 1, executor.next_step_id):
        executor.link.send(StepResult(executor.epoch - 1, step_id, pack_u32([77, 77, 77])))
    tokenizer.settle()
    kit.report.check("recovery.old-epoch", executor.takeovers == takeovers, "it led to a Takeover")
    executor.running = True
    tokenizer.wait(*asked, rule="recovery.old-epoch")
    kit.idle(tokenizer)


def failed_row(kit: SchedulerKit) -> None:
    """One row's token cannot be sampled."""
    tokenizer, executor = kit.start()
    bad, good = tokenizer.ask(kit.prompt(6)), tokenizer.ask(kit.prompt(6))
    executor.fail_seeds.add(bad.seed)
    kit.loop.expect("recovery.failed-row", lambda: bad.done, "the end of a request whose row failed")
    kit.report.check(
        "recovery.failed-row",
        bad.failed is not None and bad.failed.code is ErrorCode.INTERNAL,
        "it did not fail with INTERNAL",
    )
    tokenizer.wait(good)
    kit.idle(tokenizer)


def two_tokenizers(kit: SchedulerKit) -> None:
    """One dies, and another adds its requests."""
    first, executor = kit.start(running=False)
    second = kit.tokenizer()
    asked = first.ask(kit.prompt(6), max_tokens=30)
    own = second.ask(kit.prompt(6), max_tokens=30)
    kit.until_outputs(asked, 5)
    first.link.close()
    first.asked.clear()
    past = asked.outputs[0][:3]
    second.add_again(asked, {0: past})
    executor.running = True
    second.wait(asked, own, rule="recovery.tokenizer")
    kit.report.check("recovery.tokenizer", asked.received[0].start == 3, "outputs did not go on from the past given")
    kit.idle(second)


# --- refusals -------------------------------------------------------------------------------------


def refusals(kit: SchedulerKit) -> None:
    """Each with the field that is to blame."""
    tokenizer, executor = kit.start()
    small = SamplingParams(max_tokens=4)
    choices = [ChoicePast(0)]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("prompt", {"prompt_token_ids": []}),
        ("prompt", {"prompt_token_ids": [5, 1000]}),
        ("prompt", {"prompt_token_ids": kit.prompt(256)}),
        ("max_tokens", {"sampling": SamplingParams(max_tokens=300)}),
        ("n", {"choices": []}),
        ("past_token_ids", {"choices": [ChoicePast(0, [5, 1000])]}),
    ]
    for field, changes in cases:
        asked = tokenizer.ask([5], max_tokens=1, attempt=1)
        tokenizer.wait(asked)
        tokenizer.release(asked)
        bad = msgspec.structs.replace(
            asked.message,
            request_id=asked.request_id + (1 << 40),
            **({"sampling": small, "choices": choices} | changes),
        )
        wanted = Asked(bad, {0: []})
        tokenizer.asked[bad.request_id] = wanted
        executor.forced[bad.sampling.seed] = {}
        steps = executor.num_plans
        tokenizer.link.send(bad)
        failed = tokenizer.failure(wanted, "refuse.field", f"a refusal for {field}")
        kit.report.check(
            "refuse.field",
            (failed.code, failed.field) == (ErrorCode.INVALID_ARGUMENT, field),
            f"{failed.code.name} with field {failed.field!r}, right is INVALID_ARGUMENT and {field!r}",
        )
        kit.report.check("refuse.field", failed.message, "the refusal has no message")
        kit.report.check("refuse.field", executor.num_plans == steps, "it was computed nevertheless")
    kit.idle(tokenizer)


SCENARIOS: dict[str, Callable[[SchedulerKit], None]] = {
    function.__name__: function
    for function in (
        tokenizer_link,
        executor_link,
        heartbeats,
        takeover_first,
        in_flight,
        rows,
        busy,
        full,
        ends,
        logprobs,
        prefixes,
        attempts,
        shorter_past,
        other_past,
        ended_past,
        duplicates,
        finish,
        release_and_abort,
        offers,
        death,
        failure,
        old_epoch,
        failed_row,
        two_tokenizers,
        refusals,
        structured_requests,
        watching.watched_line,
    )
}
