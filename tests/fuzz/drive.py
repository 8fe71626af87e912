"""Runs one arena for a number of frames; what went wrong names the seed that shows it again."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog
from fuzz.arena_executor import ExecutorArena
from fuzz.arena_gateway import GatewayArena
from fuzz.arena_scheduler import SchedulerArena
from fuzz.arena_tokenizer import TokenizerArena
from fuzz.world import Failure

# Every socket, by who sends the rubbish: a peer with a session (and now and then a stranger without).
ARENAS: dict[str, Callable[[random.Random], Any]] = {
    "gateway from a tokenizer": GatewayArena,
    "tokenizer from a gateway": lambda rng: TokenizerArena(rng, "gateway"),
    "tokenizer from the scheduler": lambda rng: TokenizerArena(rng, "scheduler"),
    "scheduler from a tokenizer": lambda rng: SchedulerArena(rng, "tokenizer"),
    "scheduler from a second executor": lambda rng: SchedulerArena(rng, "second executor"),
    "scheduler from the executor": lambda rng: SchedulerArena(rng, "executor"),
    "executor from the scheduler": ExecutorArena,
}
# A life is short, so that a seed that fails is quick to look at.
FRAMES_PER_LIFE = 250


class Report(NamedTuple):
    frames: int
    dropped: int
    finished: int


def run(arena: str, seed: int, num_frames: int = FRAMES_PER_LIFE) -> Report:
    """One life. Raises Failure, with all that is needed to repeat it."""
    frame = -1
    with quiet():
        life = ARENAS[arena](random.Random(f"{arena} {seed}"))
        try:
            for frame in range(num_frames):
                life.attack()
                life.work(1)
                if frame % 10 == 0:
                    life.check()
            life.settle()
        except Exception as error:
            text = f"{arena}, seed {seed}, frame {frame}: {type(error).__name__}: {error}"
            raise Failure(text) from error
    if not life.dropped or not life.finished:
        raise Failure(f"{arena}, seed {seed}: {life.dropped} frames dropped, {life.finished} streams finished: no fuzz")
    return Report(num_frames, life.dropped, life.finished)


class quiet:
    """Without the services' logs, which say something of every frame, and with warnings as errors."""

    def __enter__(self) -> None:
        self._config = structlog.get_config()
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), cache_logger_on_first_use=False
        )
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("error")

    def __exit__(self, *_: object) -> None:
        self._warnings.__exit__(None, None, None)
        structlog.configure(**self._config)
