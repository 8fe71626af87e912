"""What bench.peers knows of any server: how to get it, and how to load it once it runs."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.client_load import Load
from bench.line import cpu_seconds, resident_bytes


class Running(Protocol):
    """A server that is up. `pid` is the process whose descendants are its processes too."""

    pid: int
    ready_seconds: float

    def run(self, load: Load) -> dict[str, Any]:
        """As bench.client_load.run_load."""


class Peer(Protocol):
    """`variants` are the forms of the model that it runs, with the precision of Quartet that each compares to."""

    name: str
    variants: dict[str, str]
    how: str

    def prepare(self, variants: Sequence[str]) -> str:
        """Installs it and makes the model's files, where that has not been done; its version.

        Raises UnavailableError where it cannot.
        """

    def serve(self, variant: str, log: Path) -> contextlib.AbstractContextManager[Running]:
        """Runs it until the context ends. Output goes to `log`."""


def family(pid: int) -> list[int]:
    """The process and all its descendants that live."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def resident_megabytes(pid: int) -> float:
    """Of all its processes together; pages that they share count for each."""
    total = 0
    for member in family(pid):
        with contextlib.suppress(OSError):
            total += resident_bytes(member)
    return round(total / 2**20, 1)


def family_cpu_seconds(pid: int) -> float:
    total = 0.0
    for member in family(pid):
        with contextlib.suppress(OSError):
            total += cpu_seconds(member)
    return total


@contextlib.contextmanager
def process(
    command: Sequence[str | Path], log: Path, environment: dict[str, str], **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Ends it and its descendants when the context ends."""
    with log.open("ab") as out:
        options = {"stdout": out, "stderr": out, **options}
        started = subprocess.Popen([str(part) for part in command], env=environment, **options)
    try:
        yield started
    finally:
        members = family(started.pid)
        started.terminate()
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        _wait_gone(members, 20)


def _wait_gone(pids: Sequence[int], seconds: float) -> None:
    """Its descendants end by themselves; another server must not start beside one that still computes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)
