"""A short run of `make chaos`: kills, freezes and cuts on every link, every token checked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ["--seconds", "15", "--streams", "8", "--cases", "6", "--max-tokens", "32", "--pause", "0.2", "1.0"]


def run(*flags: str, seed: int) -> dict:
    command = [sys.executable, "-m", "bench.chaos", "--threads", "1", "--seed", str(seed), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    report = json.loads(done.stdout)
    assert report["streams"] >= 8 and report["faults"] >= 2
    assert {"lost", "gaps", "duplicates", "changed", "stall", "recomputed"} <= report.keys()
    return report


def test_a_short_run_loses_nothing() -> None:
    run(*SHORT, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_longer_run_loses_nothing(seed: int) -> None:
    run("--seconds", "60", "--streams", "24", seed=seed)


@pytest.mark.slow
def test_a_dead_scheduler_costs_no_more_than_a_block_and_two_tokens_of_each_stream() -> None:
    report = run("--seconds", "60", "--faults", "kill", "--single", "--streams", "24", seed=11)
    assert report["recomputed"]["count"] > 0 and report["recomputed"]["max"] <= 16 + 2
