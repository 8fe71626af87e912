"""Quartet itself, behind the interface of a peer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.client_load import Load, run_load
from bench.line import PRECISIONS, serving


@dataclasses.dataclass
class RunningQuartet:
    pid: int
    ready_seconds: float
    address: str

    def run(self, load: Load) -> dict[str, Any]:
        return asyncio.run(run_load(dataclasses.replace(load, address=self.address)))


@contextlib.contextmanager
def serve(precision: str, log: Path) -> Iterator[RunningQuartet]:
    """All four services, through gRPC."""
    with serving(PRECISIONS[precision], log) as (address, process, ready_seconds):
        yield RunningQuartet(process.pid, ready_seconds, address)
