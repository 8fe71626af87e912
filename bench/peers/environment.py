"""Where a peer lives: a folder in the cache with a Python environment of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from quartet.shared.model_files import cache_dir


class UnavailableError(Exception):
    """The peer cannot be had on this machine; the message says why."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """`requirements` are pip's; `without` are what they bring along that does not fit the torch installed (it
    breaks imports). `python` names the interpreter where only one version will do."""

    name: str
    requirements: tuple[str, ...]
    without: tuple[str, ...] = ()
    python: str = ""

    @property
    def folder(self) -> Path:
        return cache_dir() / "peers" / self.name

    @property
    def bin(self) -> Path:
        return self.folder / "env" / "bin"

    def install(self) -> None:
        """Does nothing when it has been done. pip's own settings (PIP_EXTRA_INDEX_URL, ...) apply."""
        done = self.folder / "installed.json"
        wanted = [self.python, *self.requirements]
        if done.is_file() and json.loads(done.read_text()) == wanted:
            return
        interpreter = shutil.which(self.python) if self.python else sys.executable
        if interpreter is None:
            raise UnavailableError(f"it needs {self.python}, which is not on the path")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run([interpreter, "-m", "venv", "--clear", str(self.bin.parent)])
        self.run([str(self.bin / "python"), "-m", "pip", "install", "--no-cache-dir", *self.requirements])
        if self.without:
            self.run([self.bin / "python", "-m", "pip", "uninstall", "-y", *self.without])
        done.write_text(json.dumps(wanted))

    def run(self, command: Sequence[str | Path], **environment: str) -> str:
        """Runs a step of the installation; its output. All of it also goes to install.log."""
        said = subprocess.run(
            [str(part) for part in command],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with (self.folder / "install.log").open("a") as log:
            log.write(f"$ {' '.join(map(str, command))}\n{said.stdout}\n")
        if said.returncode:
            lines = said.stdout.strip().splitlines() or [""]
            reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
            raise UnavailableError(
                f"{Path(command[0]).name} failed: {reason[:300]} (see {self.folder / 'install.log'})"
            )
        return said.stdout

    def version(self, package: str) -> str:
        code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
        return self.run([self.bin / "python", "-I", "-c", code, package]).strip()
