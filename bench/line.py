"""The whole line of four real processes for a measurement: its precisions, its start, what it uses."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROLES = ("gateway", "tokenizer", "scheduler", "executor")
# SmolLM2-135M: what one token multiplies with; the head is the tied embedding.
LAYER_PARAMETERS = 106_168_320
HEAD_PARAMETERS = 49152 * 576


@dataclasses.dataclass(frozen=True)
class Precision:
    """Settings of the executor, and bytes that it holds a weight in."""

    dtype: str
    quantization: str
    layer_bytes: float
    head_bytes: float

    @property
    def flags(self) -> list[str]:
        return ["--executor-dtype", self.dtype, "--executor-quantization", self.quantization]

    @property
    def weight_bytes(self) -> float:
        return LAYER_PARAMETERS * self.layer_bytes + HEAD_PARAMETERS * self.head_bytes


# Scales and minima of groups of 32 count as weights.
PRECISIONS = {
    "bf16": Precision("bfloat16", "none", 2, 2),
    "int8": Precision("bfloat16", "int8", 1 + 2 / 32, 1 + 2 / 32),
    "int4": Precision("bfloat16", "int4", 0.5 + 4 / 32, 1 + 2 / 32),
    "fp32": Precision("float32", "none", 4, 4),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(precision: Precision, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes], float]]:
    """(address, the supervisor's process, seconds from its start until ready)"""
    address = f"127.0.0.1:{free_port()}"
    flags = ["--gateway-grpc-address", address, *precision.flags]
    flags += ["--executor-max-model-len", "2048", "--executor-num-blocks", "2048"]
    begin = time.perf_counter()
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "quartet.services.cli", "serve", *flags], stdout=out, stderr=out
        )
    try:
        from quartet.shared.client import Client

        with Client(address) as client:
            client.wait_ready(120)
        yield address, process, time.perf_counter() - begin
    finally:
        process.terminate()
        process.wait(60)


def children(pid: int) -> dict[str, int]:
    """The services' process ids by role."""
    found = {}
    for entry in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{entry}/cmdline").read_bytes().decode().split("\0")
        for role in ROLES:
            if f"quartet.services.{role}" in command:
                found[role] = int(entry)
    return found


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "runs": len(values),
    }
