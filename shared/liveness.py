"""A small file that says how a service is, for health checks from outside its process."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from quartet.shared.link import Status

STALE_AFTER = 3.0


class StatusFile:
    """Says "ready" or not; its time of modification is that of the last heartbeat, so a frozen or dead process
    leaves it stale. Written anew only when it says something else: that is far dearer than a touch."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self._said = ""
        self._inode = 0

    def write(self, status: Status) -> None:
        says = json.dumps({"pid": os.getpid(), "ready": status.ready, "draining": status.draining})
        if says == self._said and self._touch():
            return
        self._temporary.write_text(says)
        self._inode = self._temporary.stat().st_ino
        self._temporary.replace(self.path)
        self._said = says

    def _touch(self) -> bool:
        """False where the file is not this process's: another of this role leaves, or comes."""
        try:
            if os.stat(self.path).st_ino != self._inode:
                return False
            os.utime(self.path)
        except FileNotFoundError:
            return False
        return True

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def status_path(run_dir: str | Path, role: str) -> Path:
    """Where the service of that role keeps its status file."""
    return Path(run_dir) / f"{role}.status"


def check(path: str | Path, now: float | None = None) -> str | None:
    """None when the service is ready; else what is wrong, for people."""
    try:
        status = json.loads(Path(path).read_text())
        beat_at = os.stat(path).st_mtime
    except (OSError, ValueError) as error:
        return f"no status in {path}: {error}"
    age = (time.time() if now is None else now) - beat_at
    if age > STALE_AFTER:
        return f"silent for {age:.1f} s"
    if not status["ready"]:
        return "not ready"
    return None
