"""An executor and a tokenizer written from docs/wire.md alone, with plain sockets, plain MessagePack and none of
our code, around our scheduler."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from quartet.services.scheduler.service import SchedulerService
from quartet.services.scheduler.settings import SchedulerSettings

VOCAB, BLOCK, ROWS, BUDGET = 997, 4, 8, 16
MODEL = ["stranger", "fingerprint", VOCAB, 64, 32, BLOCK, ROWS, BUDGET, "none", "abacus"]
HELLO, REFUSED, RESET, HEARTBEAT, MODEL_CHANGED, RELEASE = 1, 2, 3, 4, 5, 11
NEW_REQUEST, OUTPUTS = 48, 50
TAKEOVER, GRANTED, STEP_PLAN, STEP_RESULT = 80, 81, 82, 83
TOKENIZER, EXECUTOR = 2, 4
LENGTH = 2


@pytest.fixture
def run_dir() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="quartet")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def scheduler(run_dir: str) -> Iterator[SchedulerSettings]:
    """Serves in a thread of its own."""
    settings = SchedulerSettings(run_dir=run_dir)
    started, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        service = SchedulerService(settings)
        await service.start()
        started.set()
        await stop.wait()
        service.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(10)
    yield settings
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


class Dialer:
    """Section 2: greets, beats, and gives what comes in its session."""

    def __init__(self, address: str, role: int, name: str, model: list[Any] | None = None) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTING_ID, name.encode() + os.urandom(8).hex().encode())
        self.socket.connect(address)
        self.session = os.urandom(8)
        self.open = self.ready = False
        self.model: list[Any] | None = None
        self.unexpected: list[Any] = []
        self._beat_at = 0.0
        # Trailing fields with defaults are left out.
        self._hello: list[Any] = [HELLO, 1, 1, role, name, 12345] + ([model] if model else [])

    def send(self, *message: Any) -> None:
        self.socket.send_multipart([self.session, msgspec.msgpack.encode(message)])

    def receive(self) -> list[Any] | None:
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + 0.8
            self.send(*(([HEARTBEAT, 0, 0, True]) if self.open else self._hello))
        if not self.socket.poll(5):
            return None
        session, payload = self.socket.recv_multipart()
        if session != self.session:
            return None
        message: list[Any] = msgspec.msgpack.decode(payload)
        if message[0] == HELLO:
            self.open, self._beat_at, self.model = True, 0.0, message[6]
        elif message[0] == HEARTBEAT:
            self.ready = message[3]
        elif message[0] == MODEL_CHANGED:
            self.model = message[1]
        elif message[0] in (REFUSED, RESET):
            raise AssertionError(message)
        else:
            return message
        return None

    def close(self) -> None:
        self.socket.close()


def column(packed: bytes, width: int) -> list[int]:
    return [int.from_bytes(packed[i : i + width], "little") for i in range(0, len(packed), width)]


def sampled(token_ids: list[int]) -> int:
    """Depends on all tokens, so a lost, doubled or misplaced one shows."""
    return int.from_bytes(hashlib.sha256(str(token_ids).encode()).digest()[:2], "little") % (VOCAB - 10) + 10


class Executor:
    """Section 7. KV memory holds the tokens themselves."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.memory: dict[int, list[int]] = {}
        self.hashes: dict[int, bytes] = {}
        self.num_computed = 0
        self.link = Dialer(address, EXECUTOR, "executor", MODEL)
        self._rows: dict[int, dict[str, Any]] = {}
        self._epoch, self._next_step = 40, 0

    def run(self) -> None:
        message = self.link.receive()
        if message is None:
            return
        if message[0] == TAKEOVER:
            self._rows, self._next_step = {}, 0
            self._epoch += 1
            block_ids = b"".join(struct.pack("<I", i) for i in self.hashes)
            self.link.send(GRANTED, self._epoch, block_ids, b"".join(self.hashes.values()))
        elif message[0] == STEP_PLAN:
            assert message[1:3] == [self._epoch, self._next_step]
            self._next_step += 1
            self._step(message)
        else:
            self.link.unexpected.append(message)

    def reconnect(self) -> None:
        self.link.close()
        self.link = Dialer(self._address, EXECUTOR, "executor", MODEL)

    def _step(self, plan: list[Any]) -> None:
        _, epoch, step_id, removed, new_rows, block_rows, block_ids, decode_rows, prefill_rows, prefill_counts = plan
        for index in column(removed, 2):
            del self._rows[index]
        for index, token_ids, _, num_computed, blocks, _, _, _, root, *_ in new_rows:
            assert index not in self._rows
            known, table = column(token_ids, 4), column(blocks, 4)
            held = [token for block in table for token in self.memory.get(block, [])]
            assert held[:num_computed] == known[:num_computed], "what is said to be in memory is there"
            self._rows[index] = {"known": known, "table": table, "computed": num_computed, "root": root}
        for index, block in zip(column(block_rows, 2), column(block_ids, 4), strict=True):
            self._rows[index]["table"].append(block)
        decodes = [i for i in range(8 * len(decode_rows)) if decode_rows[i >> 3] >> (i & 7) & 1]
        batch = [(index, 1) for index in decodes]
        batch += zip(column(prefill_rows, 2), column(prefill_counts, 4), strict=True)
        assert sum(count for _, count in batch) <= BUDGET
        token_ids = [self._compute(self._rows[index], count) for index, count in batch]
        packed = b"".join(struct.pack("<I", token) for token in token_ids if token is not None)
        self.link.send(STEP_RESULT, epoch, step_id, packed)

    def _compute(self, row: dict[str, Any], count: int) -> int | None:
        known, table = row["known"], row["table"]
        for position in range(row["computed"], row["computed"] + count):
            block, place = table[position // BLOCK], position % BLOCK
            self.hashes.pop(block, None)
            self.memory[block] = [*self.memory.get(block, [])[:place], known[position]]
            if place == BLOCK - 1:
                parent = row["root"]
                for i in range(position // BLOCK + 1):
                    ids = struct.pack(f"<{BLOCK}I", *known[i * BLOCK : (i + 1) * BLOCK])
                    parent = hashlib.sha256(parent + ids).digest()
                self.hashes[block] = parent
        row["computed"] += count
        self.num_computed += count
        if row["computed"] < len(known):
            return None
        held = [token for block in table for token in self.memory.get(block, [])]
        assert held[: len(known)] == known
        known.append(sampled(known))
        return int(known[-1])


class Tokenizer:
    """Section 6, without text."""

    def __init__(self, address: str) -> None:
        self.link = Dialer(address, TOKENIZER, "tokenizer")
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, int] = {}

    def ask(self, request_id: int, prompt: list[int], max_tokens: int) -> None:
        past = self.outputs.setdefault(request_id, [])
        sampling = [0.0, 0, 1, 0, 0, 0, 1, {}, 0, max_tokens]
        self.link.send(NEW_REQUEST, request_id, 1, prompt, sampling, [2], [[0, past]])

    def run(self) -> None:
        message = self.link.receive()
        if message is None:
            return
        if message[0] != OUTPUTS:
            self.link.unexpected.append(message)
            return
        for request_id, attempt, index, start, token_ids, _, finish_reason, *_ in message[1]:
            known = self.outputs[request_id]
            assert (attempt, index, start) == (1, 0, len(known))
            known += token_ids
            if finish_reason is not None:
                self.finished[request_id] = finish_reason
                self.link.send(RELEASE, request_id, 1)


def run(condition: Callable[[], object], *services: Executor | Tokenizer) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, [service.link.unexpected for service in services]
        for service in services:
            service.run()


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(sampled(known))
    return known[len(prompt) :]


def test_services_written_from_the_document_work_with_ours(scheduler: SchedulerSettings) -> None:
    tokenizer, executor = Tokenizer(scheduler.tokenizer_address), Executor(scheduler.executor_address)
    try:
        talk(tokenizer, executor)
    finally:
        tokenizer.link.close()
        executor.link.close()
    assert not tokenizer.link.unexpected and not executor.link.unexpected


def talk(tokenizer: Tokenizer, executor: Executor) -> None:
    run(lambda: tokenizer.link.open, tokenizer, executor)
    prompts = {2**64 - 1 - i: list(range(10 + i, 10 + i + length)) for i, length in enumerate((1, 4, 5, 30, 9))}
    for request_id, prompt in prompts.items():
        tokenizer.ask(request_id, prompt, 12)
    run(lambda: len(tokenizer.finished) == len(prompts), tokenizer, executor)
    # Fields of later versions come after those of the page that this was written from.
    assert tokenizer.link.ready and tokenizer.link.model[: len(MODEL)] == MODEL
    assert tokenizer.outputs == {request_id: expected(prompt, 12) for request_id, prompt in prompts.items()}
    assert set(tokenizer.finished.values()) == {LENGTH}

    # The executor is cut off in the middle. What it still holds is hit, the rest is computed once more.
    prompt = list(range(100, 130))
    tokenizer.ask(7, prompt, 30)
    run(lambda: len(tokenizer.outputs[7]) >= 10, tokenizer, executor)
    executor.reconnect()
    executor.num_computed = 0
    run(lambda: 7 in tokenizer.finished, tokenizer, executor)
    assert tokenizer.outputs[7] == expected(prompt, 30)
    assert executor.num_computed <= 20 + BLOCK + 2
