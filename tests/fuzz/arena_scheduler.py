"""The scheduler's two binders: a good tokenizer and a good executor at work, and one that sends rubbish."""

from __future__ import annotations

import random
import tempfile
from typing import Any

from fuzz.mutate import INTS, Mutator
from fuzz.world import MODEL, Failure, FakeWire, Loop, continuation, dial_in, identity, make_executor

from quartet.services.scheduler.invariants import check_invariants
from quartet.services.scheduler.service import SchedulerService
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.shared.messages import (
    Abort,
    ChoicePast,
    Failed,
    Finish,
    GetLoads,
    Granted,
    Heartbeat,
    Message,
    ModelChanged,
    NewRequest,
    Outputs,
    PlanRefused,
    Release,
    Role,
    RowPromptLogprobs,
    StepFailed,
    StepPlan,
    StepResult,
    TokenLogprobs,
    decode,
    encode,
)
from quartet.shared.sampling_params import SamplingParams

NUM_GOOD = 4
GOOD, EVIL, STRANGER = b"good", b"evil", b"stranger"


class SchedulerArena:
    """`evil` is who sends mutated frames: a tokenizer, a second executor, or the executor itself."""

    def __init__(self, rng: random.Random, evil: str) -> None:
        self.rng = rng
        self.mutator = Mutator(rng)
        self.evil = evil
        self.service = SchedulerService(SchedulerSettings(run_dir=tempfile.gettempdir()))
        self.loop: Any = Loop()
        self.service._loop = self.loop
        self.tokenizers = FakeWire(self.service.tokenizer_link.link)
        self.executors = FakeWire(self.service.executor_link.link)
        self.executor = make_executor()
        self.to_executor: list[Message] = []
        self.requests: dict[int, tuple[list[int], list[int], int]] = {}
        self.evil_ids: list[int] = []
        self.finished = 0
        self.excused = 0
        self._connect()

    @property
    def dropped(self) -> int:
        return self.service.tokenizer_link.frames_dropped + self.service.executor_link.frames_dropped

    def attack(self) -> None:
        """One frame."""
        session, route = self.mutator.session(EVIL * 2, [GOOD * 2]), EVIL
        if self.rng.random() < 0.1:
            route = STRANGER
        if self.evil == "tokenizer":
            link = self.service.tokenizer_link.link
            payload = self.mutator.frame(self._valid_of_tokenizer(), self._any)
        else:
            link = self.service.executor_link.link
            if self.evil == "executor" and route is EVIL:
                route = GOOD
                session = self.mutator.session(GOOD * 2, [EVIL * 2])
            payload = self.mutator.frame(self._valid_of_executor(), self._any)
        link.on_frame(route, session, payload)

    def work(self, num_plans: int = 2) -> None:
        """The good ones go on a little."""
        self._greet_again()
        while len(self.requests) < NUM_GOOD:
            self._ask()
        for _ in range(num_plans):
            self._pump_once()

    def check(self) -> None:
        check_invariants(self.service.core)

    def settle(self) -> None:
        """The attack is over: everything good has to end right, and nothing may be left."""
        self._greet_again(force=True)
        tokenizers = self.service.tokenizer_link.link
        if EVIL in tokenizers.peers:
            for request_id, group in list(self.service.core.ledger.groups.items()):
                if group.owner.key is not tokenizers.peers[GOOD]:
                    tokenizers.on_frame(EVIL, EVIL * 2, encode(Abort(request_id, group.attempt)))
        for _ in range(2000):
            if not self._pump_once() and not self.requests:
                break
        if self.requests:
            raise Failure(f"{len(self.requests)} streams stand still: {self.service.core.state.in_flight}")
        self.check()
        for group in list(self.service.core.ledger.groups.values()):
            self.service.core.abort(Abort(group.request_id, group.attempt))
        state = self.service.core.state
        if state.num_unfinished or state.kv.num_free_blocks != state.kv.pool.num_blocks:
            raise Failure(f"{state.num_unfinished} requests and {state.kv.pool.num_blocks} blocks are left over")

    # --- the good ones ----------------------------------------------------------------------------

    def _connect(self) -> None:
        executors, tokenizers = self.service.executor_link.link, self.service.tokenizer_link.link
        dial_in(executors, GOOD, GOOD * 2, identity(Role.EXECUTOR, "e"))
        dial_in(tokenizers, GOOD, GOOD * 2, identity(Role.TOKENIZER, "t"))
        if self.evil == "tokenizer":
            dial_in(tokenizers, EVIL, EVIL * 2, identity(Role.TOKENIZER, "evil"))
        elif self.evil == "second executor":
            dial_in(executors, EVIL, EVIL * 2, identity(Role.EXECUTOR, "evil"))

    def _greet_again(self, force: bool = False) -> None:
        """Whoever has lost its session opens it again, as a link does; the good executor says what it is."""
        executors, tokenizers = self.service.executor_link.link, self.service.tokenizer_link.link
        if GOOD not in executors.peers or executors.peers[GOOD].session != GOOD * 2:
            dial_in(executors, GOOD, GOOD * 2, identity(Role.EXECUTOR, "e"))
        elif force or self.evil == "executor":
            peer = executors.peers[GOOD]
            if peer.model != MODEL:
                executors.on_frame(GOOD, GOOD * 2, encode(ModelChanged(MODEL)))
            if (peer.ready, peer.draining, peer.stalled, peer.outstanding) != (True, False, False, 0):
                executors.on_frame(GOOD, GOOD * 2, encode(Heartbeat(0, 0, True)))
        if GOOD not in tokenizers.peers:
            raise Failure("the good tokenizer has lost its session")
        if self.evil == "tokenizer" and (EVIL not in tokenizers.peers or tokenizers.peers[EVIL].session != EVIL * 2):
            dial_in(tokenizers, EVIL, EVIL * 2, identity(Role.TOKENIZER, "evil"))
        if self.evil == "second executor" and (
            EVIL not in executors.peers or executors.peers[EVIL].session != EVIL * 2
        ):
            dial_in(executors, EVIL, EVIL * 2, identity(Role.EXECUTOR, "evil"))

    def _ask(self) -> None:
        request_id = self.rng.getrandbits(64)
        prompt = [self.rng.randrange(1, 97) for _ in range(self.rng.randint(1, 40))]
        count = self.rng.randint(1, 12)
        self.requests[request_id] = (continuation(prompt, count), [], count)
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        request = NewRequest(request_id, 1, prompt, sampling, [], [ChoicePast(0)])
        self.service.tokenizer_link.link.on_frame(GOOD, GOOD * 2, encode(request))

    def _pump_once(self) -> bool:
        moved = self.loop.run()
        while self.tokenizers.sent:
            moved = True
            route, session, payload = self.tokenizers.sent.popleft()
            if route == GOOD and session == GOOD * 2:
                self._told(decode(payload))
        while self.executors.sent:
            moved = True
            route, session, payload = self.executors.sent.popleft()
            if route == GOOD and session == GOOD * 2:
                message = decode(payload)
                if isinstance(message, (StepPlan,)) or type(message).__name__ == "Takeover":
                    self.to_executor.append(message)
        if self.to_executor:
            moved = True
            answer = self.executor.handle(self.to_executor.pop(0))
            if answer is not None:
                if isinstance(answer, StepFailed) or (isinstance(answer, PlanRefused) and self.evil != "executor"):
                    raise Failure(f"the executor was sent a plan that it cannot run: {answer}")
                self.service.executor_link.link.on_frame(GOOD, GOOD * 2, encode(answer))
        return moved

    def _told(self, message: Message) -> None:
        match message:
            case Outputs():
                for item in message.items:
                    if item.request_id not in self.requests:
                        continue
                    expected, outputs, count = self.requests[item.request_id]
                    if item.start != len(outputs):
                        raise Failure(f"output {item.start} follows {len(outputs)}")
                    outputs += item.token_ids
                    # The executor's word is law: what it says of a token in a valid result stands.
                    if self.evil != "executor" and outputs != expected[: len(outputs)]:
                        raise Failure(f"{outputs} where {expected} was due")
                    if item.finish_reason is not None:
                        if len(outputs) != count:
                            raise Failure(f"{len(outputs)} of {count} tokens")
                        self.finished += 1
                        del self.requests[item.request_id]
                        release = encode(Release(item.request_id, item.attempt))
                        self.service.tokenizer_link.link.on_frame(GOOD, GOOD * 2, release)
            case Failed():
                if message.request_id in self.requests:
                    if self.evil != "executor":
                        raise Failure(f"a good stream failed: {message}")
                    self.excused += 1
                    del self.requests[message.request_id]

    # --- the other one ----------------------------------------------------------------------------

    def _valid_of_tokenizer(self) -> Message:
        rng = self.rng
        if len(self.evil_ids) < 3 or rng.random() < 0.2:
            self.evil_ids.append(rng.getrandbits(64))
        if len(self.evil_ids) > 8:
            return Abort(self.evil_ids.pop(0), 2**63 - 1)
        request_id = rng.choice(self.evil_ids)
        attempt = rng.choice((1, 1, 1, 2, 3))
        kind = rng.random()
        if kind < 0.7:
            sampling = SamplingParams(
                temperature=rng.choice((0.0, 1.0)),
                top_p=rng.choice((1.0, 0.9)),
                top_k=rng.choice((0, 5)),
                repetition_penalty=rng.choice((1.0, 1.2)),
                logit_bias=rng.choice(({}, {5: 1.0})),
                min_tokens=rng.choice((0, 1)),
                max_tokens=rng.choice((1, 4, 20)),
                stop_token_ids=rng.choice(([], [7])),
                seed=rng.choice((0, 5)),
                logprobs=rng.choice((None, 0, 3)),
                prompt_logprobs=rng.choice((None, None, 2)),
            )
            prompt = [rng.randrange(1, 97) for _ in range(rng.randint(1, 30))]
            pasts = [
                ChoicePast(i, [rng.randrange(1, 97)] * rng.choice((0, 0, 3))) for i in range(rng.choice((1, 1, 3)))
            ]
            salt = rng.choice(("", "salt"))
            return NewRequest(
                request_id, attempt, prompt, sampling, [0], pasts, 0, salt, "tenant", rng.choice((0, 0, 2))
            )
        return rng.choice(
            (
                Finish(request_id, attempt, 0, rng.randint(0, 4)),
                Release(request_id, attempt),
                Abort(request_id, attempt),
                GetLoads(1),
                Heartbeat(1, 0, True),
            )
        )

    def _valid_of_executor(self) -> Message:
        rng, state = self.rng, self.service.core.state
        epoch = state.epoch if state.epoch is not None else 1
        plan = state.in_flight[0] if state.in_flight else None
        step_id = plan.step_id if plan is not None else 0
        num_rows = len(plan.sampling()) if plan is not None else 1
        kind = rng.random()
        if kind < 0.6:
            ids = b"".join(rng.randrange(1, 97).to_bytes(4, "little") for _ in range(num_rows))
            entry = TokenLogprobs(5, -0.5, 1, [(5, -0.5)])
            return StepResult(
                epoch,
                step_id,
                ids,
                rng.choice((None, [entry] * num_rows)),
                rng.choice(([], [RowPromptLogprobs(0, 0, [None, entry])])),
                rng.choice(([], [(0, "bad row")])),
            )
        return rng.choice(
            (
                Granted(epoch, b"\1\0\0\0\2\0\0\0", bytes(range(64))),
                PlanRefused(epoch, step_id, "why"),
                StepFailed(epoch, step_id, "why"),
                Heartbeat(rng.choice(INTS[:10]), 0, True),
                ModelChanged(MODEL),
            )
        )

    def _any(self) -> Message:
        return self.rng.choice((self._valid_of_tokenizer, self._valid_of_executor))()
