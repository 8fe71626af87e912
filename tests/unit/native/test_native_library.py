"""Which file of kernels is used."""

import _ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from quartet.services.executor.native import library

# Any shared library that is no build of ours has none of its functions, as an old build has not the newest.
STALE = Path(_ctypes.__file__)


def load(monkeypatch: pytest.MonkeyPatch, *paths: Path):
    monkeypatch.setattr(library, "_candidates", lambda: iter(paths))
    with capture_logs() as lines:
        return library.load_library.__wrapped__(), lines


def test_a_build_that_lacks_a_function_is_not_used_and_said_to_be_old(monkeypatch):
    loaded, lines = load(monkeypatch, STALE)
    assert loaded is None
    (line,) = lines
    assert line["log_level"] == "warning" and "setup.py build_ext" in line["event"]
    assert line["library"] == str(STALE) and "quartet_" in line["error"]


def test_what_cannot_be_loaded_is_passed_over_in_silence(monkeypatch, tmp_path):
    broken = tmp_path / "_kernels.so"
    broken.write_bytes(b"no library")
    assert load(monkeypatch, broken, tmp_path / "missing.so") == (None, [])


@pytest.mark.skipif(library.load_library() is None, reason="no compiled kernels here")
def test_a_good_build_behind_an_old_one_is_used(monkeypatch):
    good = next(library._candidates())
    loaded, lines = load(monkeypatch, STALE, good)
    assert loaded is not None and loaded._name == str(good)
    assert len(lines) == 1


@pytest.mark.skipif(library.load_library() is None, reason="no compiled kernels here")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump here")
def test_no_function_uses_more_than_the_cpu_that_it_is_for_has():
    """By their namespaces: what is in none runs on any x86-64 CPU."""
    command = ["objdump", "-d", "--no-show-raw-insn", str(next(library._candidates()))]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    newer = re.compile(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])\b|%tmm")
    kinds, wrong = set(), []
    for function in re.split(r"\n(?=[0-9a-f]{16} <)", listing)[1:]:
        name = function[18 : function.index(">")]
        kind = next((kind for kind in ("6avx512", "4avx2") if kind in name), "any")
        kinds.add(kind)
        if kind != "6avx512" and newer.search(function):
            wrong.append(name)
        if kind == "any" and re.search(r"%ymm|\tv[a-z]+\s+.*%xmm", function):
            wrong.append(name)
    assert kinds == {"6avx512", "4avx2", "any"} and not wrong
