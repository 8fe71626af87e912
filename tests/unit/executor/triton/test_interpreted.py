"""Runs each file of interpreted/ in a process of its own, under Triton's interpreter, one on each core."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[4]

pytest.importorskip("triton", reason="the GPU kernels need triton")


Runs = dict[str, Future[subprocess.CompletedProcess[str]]]
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
# Exit status of pytest when a file has no test of the kind asked for.
NO_TESTS = 5


def run(file: str, marked: str, basetemp: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marked, f"--basetemp={basetemp}"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(FOLDER / file)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Of the files whose tests were chosen."""
    folder = tmp_path_factory.mktemp("interpreted")
    chosen = [name for name in FILES if any(f"test_quickly[{name}]" == item.name for item in request.session.items)]
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    yield {name: pool.submit(run, name, "not slow and not gpu", folder / name, 580) for name in chosen}
    pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES)
def test_quickly(file: str, runs: Runs) -> None:
    result = runs[file].result()
    assert result.returncode == 0, f"{result.stdout[-8000:]}\n{result.stderr[-2000:]}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES)
def test_the_rest(file: str, tmp_path: Path) -> None:
    result = run(file, "slow and not gpu", tmp_path, 1180)
    assert result.returncode in (0, NO_TESTS), f"{result.stdout[-8000:]}\n{result.stderr[-2000:]}"
