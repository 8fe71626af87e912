"""Peers without a server: a driver in the peer's environment runs them in its process, told what by lines of JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.client_load import Load, workload
from bench.peers.environment import Environment, UnavailableError
from bench.peers.peer import process
from quartet.services.cli.bench.metrics import summary
from quartet.services.cli.bench.record import Record

DRIVERS = Path(__file__).parent / "drivers"


class InProcess:
    """As many requests as a load has streams are given to it at once, and the next ones when these have ended."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.pid = popen.pid
        self.ready_seconds = 0.0
        self._popen, self._log = popen, log
        self.version = ""

    def wait_ready(self, started: float) -> None:
        self.version = self._answer()["version"]
        self.ready_seconds = time.perf_counter() - started

    def run(self, load: Load) -> dict[str, Any]:
        warmups, prompts = workload(load)
        for prompt in warmups:
            self.generate([prompt], 4)
        results: list[Record] = []
        duration = 0.0
        for first in range(0, len(prompts), load.concurrency):
            answer = self.generate(prompts[first : first + load.concurrency], load.output_tokens)
            duration += answer["ended"] - answer["started"]
            for times, counts in zip(answer["times"], answer["counts"], strict=True):
                result = Record(answer["started"], times, sum(counts), ended=answer["ended"])
                if result.output_tokens != load.output_tokens:
                    result.fail("length", f"{result.output_tokens} tokens instead of {load.output_tokens}")
                results.append(result)
        return {"load": dataclasses.asdict(load), **summary(results, duration)}

    def generate(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """One batch, until it has ended; see drivers/protocol.py for the answer."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps({"prompts": prompts, "output_tokens": output_tokens}).encode() + b"\n")
        self._popen.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            lines = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise UnavailableError(f"it ended: {lines[-1][:300]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def in_process(environment: Environment, driver: str, arguments: Sequence[str], log: Path) -> Iterator[InProcess]:
    started = time.perf_counter()
    command: list[str | Path] = [environment.bin / "python", "-I", DRIVERS / driver, *arguments]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with process(command, log, variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen:
        running = InProcess(popen, log)
        running.wait_ready(started)
        yield running
