"""Runs each file of interpreted/ in a process of its own, under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[4]

pytest.importorskip("triton", reason="the GPU kernels need triton")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_under_the_interpreter(file: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={tmp_path}", str(FOLDER / file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert result.returncode == 0, f"{result.stdout[-8000:]}\n{result.stderr[-2000:]}"
