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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROLES = ("gateway", "tokenizer", "scheduler", "executor")
# SmolLM2-135M: what one token multiplies with; the head is the tied embedding.
LAYER_PARAMETERS = 106_168_320
HEAD_PARAMETERS = 49152 * 576
READY_SECONDS = 120


@dataclasses.dataclass(frozen=True)
class Precision:
    """Settings of the executor, bytes that it holds a weight in, and what such a weight may be multiplied as."""

    dtype: str
    quantization: str
    layer_bytes: float
    head_bytes: float
    multiplied_as: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        return ["--executor-dtype", self.dtype, "--executor-quantization", self.quantization]

    @property
    def weight_bytes(self) -> float:
        return LAYER_PARAMETERS * self.layer_bytes + HEAD_PARAMETERS * self.head_bytes


# Scales and minima of groups, of 64 in 8 bits and of 32 in 4, count as weights.
PRECISIONS = {
    "bf16": Precision("bfloat16", "none", 2, 2, ("fp32", "bf16")),
    "int8": Precision("bfloat16", "int8", 1 + 2 / 64, 1 + 2 / 64, ("fp32", "bf16", "int8")),
    "int4": Precision("bfloat16", "int4", 0.5 + 4 / 32, 1 + 2 / 64, ("fp32", "bf16", "int8")),
    "fp32": Precision("float32", "none", 4, 4, ("fp32",)),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Serving(NamedTuple):
    """`process` is the supervisor's; `ready_seconds` passed from its start until it answered."""

    address: str
    process: subprocess.Popen[bytes]
    ready_seconds: float


@contextlib.contextmanager
def serving(
    precision: Precision, log: Path, *, max_model_len: int = 2048, num_blocks: int = 2048, flags: Sequence[str] = ()
) -> Iterator[Serving]:
    """Logs are JSON lines in `log`."""
    address = f"127.0.0.1:{free_port()}"
    size = ["--executor-max-model-len", str(max_model_len), "--executor-num-blocks", str(num_blocks)]
    addresses = ["--gateway-grpc-address", address, "--gateway-http-address="]
    flags = [*addresses, "--log-format", "json", *precision.flags, *size, *flags]
    begin = time.perf_counter()
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "quartet.services.cli", "serve", *flags], stdout=out, stderr=out
        )
    try:
        wait_ready(address, {"quartet serve": process})
        yield Serving(address, process, round(time.perf_counter() - begin, 3))
    finally:
        process.terminate()
        process.wait(60)


def wait_ready(address: str, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Until the line at `address` serves; RuntimeError where one of its processes, by name, ends before."""
    from quartet.shared.client import Client

    with Client(address) as client:
        for _ in range(READY_SECONDS):
            for name, process in processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended with {process.returncode}; its log says why")
            with contextlib.suppress(TimeoutError):
                return client.wait_ready(1)
    raise TimeoutError(f"the line is not ready after {READY_SECONDS} s; its log says why")


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


def proportional_bytes(pid: int) -> int:
    """Resident memory, with pages that several processes map divided among them."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")))


def settle(executor: int, seconds: float = 30.0) -> None:
    """Until the executor has taken the memory that it takes ahead of its use; for at most so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        before = cpu_seconds(executor)
        time.sleep(0.5)
        if cpu_seconds(executor) - before < 0.02:
            return


def idle_cpu(pids: dict[str, int], seconds: float) -> dict[str, float]:
    """Percent of a core that each process uses while this one waits."""
    before = {role: cpu_seconds(pid) for role, pid in pids.items()}
    time.sleep(seconds)
    used = {role: 100 * (cpu_seconds(pid) - before[role]) / seconds for role, pid in pids.items()}
    return {role: round(percent, 2) for role, percent in used.items()} | {"together": round(sum(used.values()), 2)}


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "runs": len(values),
    }
