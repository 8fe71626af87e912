"""Parts of a line in one process: links over captured frames, a real executor over a made-up model."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from quartet.services.executor.engine import TorchEngine
from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.input_batch import InputBatch
from quartet.services.executor.loop import ExecutorLoop
from quartet.services.executor.model_runner import ModelRunner
from quartet.shared.link import BinderLink, DialerLink, Identity, Link
from quartet.shared.messages import Heartbeat, ModelInfo, Role, encode

VOCAB = 97
MODEL = ModelInfo("fake", "f", VOCAB, 256, 64, 4, 8, 32, "float32", "cpu")


class Failure(AssertionError):
    """What a fuzzed service must not do."""


class FakeWire:
    """In place of a socket: what a link sends is queued as (route, session, payload)."""

    def __init__(self, link: Link) -> None:
        self.sent: deque[tuple[bytes, bytes, bytes]] = deque()
        self.gone: set[bytes] = set()
        self.link = link
        link._wire = self

    def send(self, route: bytes, session: bytes, payload: bytes) -> bool:
        if route in self.gone:
            return False
        self.sent.append((route, session, payload))
        return True

    def wake(self) -> None: ...

    def reconnect(self) -> None: ...


class Loop:
    """In place of an event loop: what is to be called soon; timers are never due."""

    class Timer:
        def cancel(self) -> None: ...

    def __init__(self) -> None:
        self._soon: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        self._soon.append((function, arguments))

    def call_later(self, delay: float, function: Callable[..., None], *arguments: Any) -> Timer:
        return self.Timer()

    def run(self) -> bool:
        """Whether anything was called."""
        ran = bool(self._soon)
        while self._soon:
            function, arguments = self._soon.popleft()
            function(*arguments)
        return ran


def dial_in(link: BinderLink, route: bytes, session: bytes, identity: Identity) -> None:
    """A dialer's greeting, as the binder sees it."""
    link.on_frame(route, session, encode(identity.hello()))
    link.on_frame(route, session, encode(Heartbeat(0, 0, True)))


def answer_dial(link: DialerLink, identity: Identity) -> bytes:
    """The session in which a binder has answered this dialer's greeting."""
    link.on_connected()
    session = link._session
    link.on_frame(session, encode(identity.hello()))
    link.on_frame(session, encode(Heartbeat(0, 0, True)))
    return session


def identity(role: Role, name: str, model: ModelInfo | None = MODEL, fingerprint: str = "") -> Identity:
    return Identity(role, name, model=model, tokenizer_fingerprint=fingerprint)


# --- the executor ---------------------------------------------------------------------------------


def next_token(token_id: int, position: int) -> int:
    """Never 0, which the tests take for the end of a sequence."""
    return 1 + (token_id * 31 + position * 7 + 1) % (VOCAB - 1)


def continuation(prompt: list[int], count: int) -> list[int]:
    """What the executor says after a prompt."""
    known = list(prompt)
    for _ in range(count):
        known.append(next_token(known[-1], len(known) - 1))
    return known[len(prompt) :]


class FakeModel:
    """Hidden states are logits: large at the next token, 0 elsewhere."""

    def forward(self, batch: ForwardBatch, kv_cache: Any, attention: Any) -> torch.Tensor:
        follow = [next_token(t, p) for t, p in zip(batch.token_ids.tolist(), batch.positions.tolist(), strict=True)]
        hidden = torch.zeros(len(follow), VOCAB)
        hidden[torch.arange(len(follow)), torch.tensor(follow, dtype=torch.int64)] = 50.0
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()


class FakeAttention:
    def prepare(self, batch: ForwardBatch) -> None: ...


def make_executor() -> ExecutorLoop:
    torch.set_num_threads(1)
    batch = InputBatch(
        max_num_seqs=MODEL.max_num_seqs,
        max_model_len=MODEL.max_model_len,
        max_num_batched_tokens=MODEL.max_num_batched_tokens,
        num_blocks=MODEL.num_blocks,
        block_size=MODEL.block_size,
        vocab_size=VOCAB,
    )
    nothing: Any = None
    attention: Any = FakeAttention()
    return ExecutorLoop(ModelRunner(TorchEngine(FakeModel(), nothing, attention, batch, torch.device("cpu")), batch), 1)


def check_number(value: float) -> None:
    if not math.isfinite(value):
        raise Failure(f"a client would be told {value}")
