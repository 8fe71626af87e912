"""A small file that says how a service is, for health checks from outside its process."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from quartet.shared.link import Status

STALE_AFTER = 3.0


class StatusFile:
    """Rewritten with every heartbeat; a frozen or dead process leaves it stale."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")

    def write(self, status: Status) -> None:
        self._temporary.write_text(json.dumps({"pid": os.getpid(), "at": time.time(), **status._asdict()}))
        self._temporary.replace(self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def status_path(run_dir: str | Path, role: str) -> Path:
    """Where the service of that role keeps its status file."""
    return Path(run_dir) / f"{role}.status"


def check(path: str | Path, now: float | None = None) -> str | None:
    """None when the service is ready; else what is wrong, for people."""
    try:
        status = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        return f"no status in {path}: {error}"
    age = (time.time() if now is None else now) - status["at"]
    if age > STALE_AFTER:
        return f"silent for {age:.1f} s"
    if not status["ready"]:
        return "not ready"
    return None
