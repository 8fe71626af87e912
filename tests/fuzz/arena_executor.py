"""The executor's link: one scheduler that sends rubbish, and then one that wants work done."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from fuzz.mutate import Mutator
from fuzz.world import MODEL, Failure, FakeWire, answer_dial, continuation, identity, make_executor

from quartet.services.executor.service import ExecutorService
from quartet.shared.block_hash import HASH_BYTES, hash_root
from quartet.shared.messages import (
    FAILED_TOKEN_ID,
    GetLoads,
    Granted,
    Heartbeat,
    Hello,
    Message,
    NewRow,
    PlanRefused,
    Role,
    StepFailed,
    StepPlan,
    StepResult,
    Takeover,
    decode,
    encode,
)
from quartet.shared.sampling_params import SamplingParams


def column(values: list[int], size: int = 4) -> bytes:
    return b"".join(value.to_bytes(size, "little") for value in values)


class ExecutorArena:
    def __init__(self, rng: random.Random, evil: str = "scheduler") -> None:
        self.rng = rng
        self.mutator = Mutator(rng)
        self.loop = make_executor()
        self.service = ExecutorService(self.loop, "ipc:///nowhere", identity(Role.EXECUTOR, "e"), None)
        self.link = self.service._link.link
        self.wire = FakeWire(self.link)
        self.session = b""
        self.epoch = 1
        self.step_id = 0
        self.rows: set[int] = set()
        self.finished = 0
        self.excused = 0
        self.answers: deque[Message] = deque(maxlen=1000)
        self._greet()

    @property
    def dropped(self) -> int:
        return self.link.frames_dropped + self.loop.num_plans_dropped

    def attack(self) -> None:
        if self.link.peer is None or self.link._session != self.session:
            self._greet()
        session = self.mutator.session(self.session, [])
        self.link.on_frame(session, self.mutator.frame(self._valid(), self._valid))
        self._pump()
        answers, self.answers = self.answers, deque(maxlen=1000)
        for message in answers:
            if isinstance(message, Granted):
                self.epoch, self.step_id = message.epoch, 0
                self.rows.clear()
            elif isinstance(message, StepResult):
                self.step_id = message.step_id + 1
                if len(message.token_ids) % 4:
                    raise Failure("token_ids are cut short")
            elif isinstance(message, (PlanRefused, StepFailed)) and self.rng.random() < 0.5:
                self._send(Takeover(1))
            if isinstance(message, StepFailed):
                raise Failure(f"a plan was begun that cannot be run: {message.message}")
        self.answers.clear()

    def work(self, num_plans: int = 1) -> None:
        """Now and then a scheduler that takes over is to get what its plans say."""
        if self.rng.random() < 0.05:
            self._good_run()

    def check(self) -> None:
        block_ids, hashes = self.loop._runner.offers()
        ids = [int.from_bytes(block_ids[i : i + 4], "little") for i in range(0, len(block_ids), 4)]
        if len(hashes) != HASH_BYTES * len(ids) or not all(1 <= i <= MODEL.num_blocks for i in ids):
            raise Failure("the executor offers blocks that are none")

    def settle(self) -> None:
        for _ in range(3):
            self._good_run()
        self.check()

    def _greet(self) -> None:
        self.session = answer_dial(self.link, identity(Role.SCHEDULER, "s"))

    def _good_run(self) -> None:
        self._greet()  # a new session: what the other one left in the queue is not its business
        self.answers.clear()
        self._send(Takeover(2))
        granted = self.answers.pop()
        if not isinstance(granted, Granted):
            raise Failure(f"no grant but {granted}")
        rng = self.rng
        prompt = [rng.randrange(1, 97) for _ in range(rng.randint(1, 20))]
        row = rng.randrange(MODEL.max_num_seqs)
        blocks = rng.sample(range(1, MODEL.num_blocks + 1), 10)
        new = self._row(row, prompt, blocks)
        plan = StepPlan(granted.epoch, 0, b"", [new], b"", b"", b"", column([row], 2), column([len(prompt)]))
        bits = bytearray(row // 8 + 1)
        bits[row // 8] |= 1 << row % 8
        outputs: list[int] = []
        for step_id in range(5):
            self._send(plan)
            result = self.answers.pop()
            if not isinstance(result, StepResult) or result.step_id != step_id or result.errors:
                raise Failure(f"no result of step {step_id} but {result}")
            outputs.append(int.from_bytes(result.token_ids, "little"))
            plan = StepPlan(granted.epoch, step_id + 1, b"", [], b"", b"", bytes(bits), b"", b"")
        if outputs != continuation(prompt, 5) or FAILED_TOKEN_ID in outputs:
            raise Failure(f"{outputs} where {continuation(prompt, 5)} was due")
        self.finished += 1
        self.epoch, self.step_id = granted.epoch, 5
        self.rows = {row}
        self.answers.clear()

    def _row(self, row: int, prompt: list[int], blocks: list[int], **sampling: Any) -> NewRow:
        params = SamplingParams(**{"temperature": 0.0, **sampling})
        return NewRow(row, column(prompt), len(prompt), 0, column(blocks), params, [0], 0, hash_root())

    def _send(self, message: Message) -> None:
        self.link.on_frame(self.session, encode(message))
        self._pump()

    def _pump(self) -> None:
        """What the service's main thread does."""
        inbox = self.service._inbox
        while inbox:
            peer, message = inbox.popleft()
            if peer.alive:
                answer = self.loop.handle(message)
                if answer is not None:
                    peer.send(answer)
            self.service._num_handled += 1
        while self.wire.sent:
            message = decode(self.wire.sent.popleft()[2])
            if not isinstance(message, (Hello, Heartbeat)):
                self.answers.append(message)

    def _valid(self) -> Message:
        rng = self.rng
        kind = rng.random()
        if kind < 0.08:
            return Takeover(rng.randrange(100))
        if kind < 0.1:
            return rng.choice((GetLoads(1), Heartbeat(1, 0, True)))
        free = [row for row in range(MODEL.max_num_seqs) if row not in self.rows]
        removed, new, prefill = [], [], []
        if self.rows and (not free or rng.random() < 0.2):
            removed = [self.rows.pop()]
        if free:
            row = rng.choice(free)
            prompt = [rng.randrange(1, 97) for _ in range(rng.randint(1, 12))]
            new.append(
                self._row(
                    row,
                    prompt,
                    rng.sample(range(1, MODEL.num_blocks + 1), 6),
                    temperature=rng.choice((0.0, 1.0)),
                    top_k=rng.choice((0, 3)),
                    top_p=rng.choice((1.0, 0.5)),
                    min_p=rng.choice((0.0, 0.1)),
                    presence_penalty=rng.choice((0.0, 1.0)),
                    repetition_penalty=rng.choice((1.0, 1.5)),
                    logit_bias=rng.choice(({}, {3: -5.0})),
                    min_tokens=rng.choice((0, 2)),
                    seed=rng.choice((0, 2**62)),
                    logprobs=rng.choice((None, 2)),
                    prompt_logprobs=rng.choice((None, 1)),
                )
            )
            prefill.append((row, len(prompt)))
            self.rows.add(row)
        return StepPlan(
            self.epoch,
            self.step_id,
            column(removed, 2),
            new,
            b"",
            b"",
            b"",
            column([row for row, _ in prefill], 2),
            column([count for _, count in prefill]),
        )
