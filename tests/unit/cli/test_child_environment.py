"""What a supervised process finds in its environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quartet.services.cli.processes import HUGE_PAGES, Process


def environment_of_child(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "environment"
    process = Process(
        [
            sys.executable,
            "-S",
            "-c",
            "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))",
            str(path),
        ]
    )
    process._popen.wait(60)
    found: dict[str, str] = json.loads(path.read_text())
    return found


def test_a_child_keeps_its_objects_in_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HUGE_PAGES:
        monkeypatch.delenv(name, raising=False)
    assert environment_of_child(tmp_path).items() >= HUGE_PAGES.items()


def test_what_the_user_has_set_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONMALLOC", "pymalloc")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    found = environment_of_child(tmp_path)
    assert found["PYTHONMALLOC"] == "pymalloc"
    assert found["GLIBC_TUNABLES"] == HUGE_PAGES["GLIBC_TUNABLES"]
