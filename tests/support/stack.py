"""The four real processes, each of which a test can start, kill, freeze and look at."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

# Others run tests beside these, and the same seeds.
_random = random.SystemRandom()
ROLES = ("gateway", "tokenizer", "scheduler", "executor")


def free_port() -> int:
    """One below those that connections are given, of which any may be gone before a service binds it."""
    while True:
        port = _random.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Stack:
    """`settings` maps "<section>_<field>" to a value, e.g. executor_num_blocks=64."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir(mode=0o700)
        self.log_dir = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.http_address = f"127.0.0.1:{free_port()}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("QUARTET_")}
        if "QUARTET_CACHE_DIR" in os.environ:
            self.environ["QUARTET_CACHE_DIR"] = os.environ["QUARTET_CACHE_DIR"]
        self.environ |= {"QUARTET_RUN_DIR": str(self.run_dir), "QUARTET_LOG_FORMAT": "console"}
        self.environ["QUARTET_GATEWAY_GRPC_ADDRESS"] = self.address
        self.environ["QUARTET_GATEWAY_HTTP_ADDRESS"] = self.http_address
        # One thread never waits for another that a busy machine has put aside.
        self.environ["QUARTET_EXECUTOR_NUM_THREADS"] = "1"
        # Nobody scrapes them; who does gives port 0, and finds the port in the log.
        self.environ |= {f"QUARTET_{role.upper()}_METRICS_ADDRESS": "" for role in ROLES}
        for key, value in settings.items():
            self.environ[f"QUARTET_{key.upper()}"] = str(value)

    def start(self, *names: str, **settings: object) -> Stack:
        """Names are roles, or a role and a number ("tokenizer-2") for a further one."""
        environ = self.environ | {f"QUARTET_{key.upper()}": str(value) for key, value in settings.items()}
        for name in names or ROLES:
            role = re.sub(r"-\d+$", "", name)
            with self.log(name).open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", f"quartet.services.{role}"], env=environ, stdout=log, stderr=log
                )
        return self

    def log(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self.processes.pop(name).wait()

    def restart(self, name: str) -> None:
        self.kill(name)
        self.start(name)

    def wait(self, name: str, timeout: float = 20.0) -> int:
        return self.processes[name].wait(timeout)

    def stop(self) -> dict[str, int]:
        """SIGTERM in the order of the line; what each exited with. Kills what does not end."""
        codes = {}
        for name in sorted(self.processes, key=lambda n: ROLES.index(re.sub(r"-\d+$", "", n))):
            process = self.processes[name]
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                codes[name] = process.wait(15.0)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[name] = process.wait()
        self.processes.clear()
        return codes

    def tail(self, lines: int = 40) -> str:
        """The end of every log, for a failing test's message."""
        parts = []
        for path in sorted(self.log_dir.glob("*.log")):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append(f"--- {path.name}\n" + "\n".join(text))
        return "\n".join(parts)

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time of each process so far."""
        ticks = os.sysconf("SC_CLK_TCK")
        result = {}
        for name, process in self.processes.items():
            fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            result[name] = (int(fields[11]) + int(fields[12])) / ticks
        return result


def eventually(condition, timeout: float = 30.0, message: str = "") -> None:  # type: ignore[no-untyped-def]
    """Waits until `condition()` is true; fails with `message` when it is not in time."""
    deadline = time.monotonic() + timeout
    while True:
        if condition():
            return
        if time.monotonic() > deadline:
            raise AssertionError(message or f"not within {timeout} s: {condition}")
        time.sleep(0.02)
