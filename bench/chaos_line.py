"""The whole line under `quartet serve`, and what can be done to it: kill, freeze, cut, heal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from bench.cuttable import CuttableLink

ROLES = ("gateway", "tokenizer", "scheduler", "executor")
LINKS = ("gateway-tokenizer", "tokenizer-scheduler", "scheduler-executor")
COLOR = re.compile(r"\x1b\[[0-9;]*m")
FIELD = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True)
class Fault:
    """`kind` is kill, stop or cut; `seconds` is how long a stop or cut lasts."""

    kind: str
    targets: tuple[str, ...]
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.kind} {'+'.join(self.targets)}"


@dataclass
class Line:
    """`flags` go to `quartet serve`. With `tcp`, the links run over TCP through proxies that can be cut."""

    flags: list[str]
    tcp: bool
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="qc-", dir="/tmp")))
    links: dict[str, CuttableLink] = field(default_factory=dict)
    seen_pids: set[int] = field(default_factory=set)

    async def start(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        flags = ["--log-format", "console", "--log-level", "debug"]
        flags += ["--gateway-grpc-address", self.address, "--gateway-http-address="]
        if self.tcp:
            flags += await self._tcp_flags()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("QUARTET_") or k == "QUARTET_CACHE_DIR"}
        environment["XDG_RUNTIME_DIR"] = str(self.folder)
        self.log = self.folder.with_name(self.folder.name + ".log")
        with self.log.open("wb") as log:
            self.serve = subprocess.Popen(
                [sys.executable, "-m", "quartet.services.cli", "serve", *flags, *self.flags],
                stdout=log,
                stderr=log,
                env=environment,
            )

    async def _tcp_flags(self) -> list[str]:
        ports = {name: free_port() for name in LINKS}
        for name, port in ports.items():
            self.links[name] = CuttableLink(("127.0.0.1", port))
            await self.links[name].start()
        bound = {name: f"tcp://127.0.0.1:{port}" for name, port in ports.items()}
        dialled = {name: f"tcp://127.0.0.1:{link.port}" for name, link in self.links.items()}
        gateway, tokenizer, executor = LINKS
        return [
            *("--gateway-tokenizer-link", bound[gateway], "--tokenizer-gateway-links", dialled[gateway]),
            *("--scheduler-tokenizer-link", bound[tokenizer], "--tokenizer-scheduler-link", dialled[tokenizer]),
            *("--scheduler-executor-link", bound[executor], "--executor-scheduler-link", dialled[executor]),
        ]

    def pids(self) -> dict[str, int]:
        """The services' process ids by role; one that is just being started again is missing."""
        found = {}
        children = Path(f"/proc/{self.serve.pid}/task/{self.serve.pid}/children").read_text().split()
        for pid in map(int, children):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                found |= {role: pid for role in ROLES if f"quartet.services.{role}" in command}
        self.seen_pids.update(found.values())
        return found

    async def strike(self, fault: Fault) -> float:
        """Does it, and undoes what can be undone; returns when it was over (for a kill: when it came)."""
        if fault.kind == "kill":
            self._signal(fault.targets, signal.SIGKILL)
            return time.monotonic()
        if fault.kind == "stop":
            pids = self._signal(fault.targets, signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            return time.monotonic()
        for target in fault.targets:
            self.links[target].cut()
        await asyncio.sleep(fault.seconds)
        for target in fault.targets:
            self.links[target].heal()
        return time.monotonic()

    def _signal(self, roles: tuple[str, ...], number: int) -> list[int]:
        pids = self.pids()
        struck = [pids[role] for role in roles if role in pids]
        for pid in struck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return struck

    def recomputed(self) -> list[tuple[float, int]]:
        """(time.time(), tokens computed again) of each decoding stream that came to a new scheduler."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            plain = COLOR.sub("", line)
            if " resumed " in plain and "service=scheduler" in plain:
                at = datetime.fromisoformat(plain.split()[0].replace("Z", "+00:00")).timestamp()
                found.append((at, int(dict(FIELD.findall(plain))["num_recomputed_tokens"])))
        return found

    async def stop(self) -> list[str]:
        """Ends it by SIGTERM; what should not be left behind: a bad exit code, processes, sockets, files."""
        self.pids()
        self.serve.terminate()
        try:
            code: int | str = await asyncio.to_thread(self.serve.wait, 60)
        except subprocess.TimeoutExpired:
            self.serve.kill()
            code = f"{self.serve.wait()} (killed)"
        for link in self.links.values():
            await link.close()
        left = [] if code == 0 else [f"quartet serve exited with {code}"]
        left += [f"process {pid}" for pid in self.seen_pids if Path(f"/proc/{pid}").exists()]
        left += [str(path.relative_to(self.folder)) for path in self.folder.rglob("*")]
        shutil.rmtree(self.folder, ignore_errors=True)
        return left


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
