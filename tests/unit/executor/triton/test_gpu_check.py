"""What proves the executor on a GPU runs here too, at sizes that mean nothing, so that no typo waits for a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]

pytest.importorskip("triton", reason="the GPU kernels need triton")


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    """(exit status, the last line)"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.gpu", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert result.stdout, result.stderr[-4000:]
    return result.returncode, json.loads(result.stdout.splitlines()[-1])


def test_without_a_gpu_it_says_so() -> None:
    status, table = run()
    assert status == 3
    assert table["gpu"] is None and table["measured"] is False


def test_kernels_and_rates() -> None:
    status, checks = run("--toy", "--section", "kernels")
    assert status == 0
    assert all(check["passed"] for check in checks.values()), checks
    status, rates = run("--toy", "--section", "rates")
    assert status == 0
    assert {"decode_bfloat16", "decode_float8_e4m3fn", "prefill", "sampling", "fused"} < set(rates)


def test_scheduler_and_executor_over_zeromq() -> None:
    status, result = run("--toy", "--section", "serving-1b")
    assert status == 0
    assert result["num_decode_steps"] >= 3 and result["decode_tokens_per_second"] > 0
    assert 0 < result["busy_share"] <= 1


@pytest.mark.slow
def test_all_of_it() -> None:
    status, table = run("--toy")
    assert (status, table["problems"]) == (0, [])
    assert table["serving-8b"]["bound_share"] > 0
