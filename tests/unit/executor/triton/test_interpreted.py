"""Runs each file of interpreted/ in a process of its own, under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[4]

pytest.importorskip("triton", reason="the GPU kernels need triton")


FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
# Exit status of pytest when a file has no test of the kind asked for.
NO_TESTS = 5


def run(file: str, marked: str, basetemp: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marked, f"--basetemp={basetemp}"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(FOLDER / file)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1180
    )
    return result.returncode, f"{result.stdout[-8000:]}\n{result.stderr[-2000:]}"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES)
def test_under_the_interpreter(file: str, tmp_path: Path) -> None:
    status, output = run(file, "not slow", tmp_path)
    assert status == 0, output


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES)
def test_the_costly_ones_under_the_interpreter(file: str, tmp_path: Path) -> None:
    status, output = run(file, "slow", tmp_path)
    assert status in (0, NO_TESTS), output
