"""The four processes for a claim, with the scheduler's block tables watched."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.line import PRECISIONS, free_port, wait_ready

TOLD_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Line:
    address: str
    scheduler: subprocess.Popen[bytes]
    seen_file: Path

    def seen(self) -> dict[str, Any]:
        """What bench.claims.watched_scheduler has seen so far."""
        self.seen_file.unlink(missing_ok=True)
        self.scheduler.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + TOLD_SECONDS
        while not self.seen_file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the scheduler does not tell what it has seen")
            time.sleep(0.02)
        found: dict[str, Any] = json.loads(self.seen_file.read_text())
        return found


@contextlib.contextmanager
def line(num_blocks: int, max_model_len: int, log: Path, precision: str = "bf16") -> Iterator[Line]:
    """On the default model."""
    with tempfile.TemporaryDirectory(prefix="qc-") as folder:
        address, seen = f"127.0.0.1:{free_port()}", Path(folder, "seen.json")
        common = ["--run-dir", f"{folder}/run"]
        dtype = PRECISIONS[precision].dtype
        size = ["--num-blocks", str(num_blocks), "--max-model-len", str(max_model_len), "--dtype", dtype]
        commands: dict[str, Sequence[str]] = {
            "gateway": ("quartet.services.gateway", *common, "--grpc-address", address, "--http-address="),
            "tokenizer": ("quartet.services.tokenizer", *common),
            "scheduler": ("bench.claims.watched_scheduler", str(seen), *common),
            "executor": ("quartet.services.executor", *common, *size),
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QUARTET_")}
        for name in ("QUARTET_CACHE_DIR", "QUARTET_EXECUTOR_NUM_THREADS"):
            if name in os.environ:
                environment[name] = os.environ[name]
        processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            with log.open("ab") as out:
                for name, command in commands.items():
                    processes[name] = subprocess.Popen(
                        [sys.executable, "-m", *command], env=environment, stdout=out, stderr=out
                    )
            wait_ready(address, processes)
            yield Line(address, processes["scheduler"], seen)
        finally:
            # From the left: each leaves at once when nothing is asked of it any more.
            for process in processes.values():
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
