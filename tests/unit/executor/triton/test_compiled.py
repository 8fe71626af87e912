"""Compiles the kernels for GPUs that are not here, in processes of their own: the interpreter's setting
would break it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[4]
TOOL = ROOT / "tools" / "compile_gpu_kernels.py"

pytest.importorskip("triton", reason="the GPU kernels need triton")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(TOOL.stem, TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[TOOL.stem] = module
    spec.loader.exec_module(module)
    return module


def compile_kernels(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments], env=environment, capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.timeout(600)
def test_a_few_of_each_kernel_compile_without_spills() -> None:
    result = compile_kernels("--quick", timeout=580)
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert result.returncode == 0, "\n".join(failed) or result.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_kernels_compile_without_spills() -> None:
    result = compile_kernels(timeout=3500)
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert result.returncode == 0, "\n".join(failed) or result.stderr[-4000:]


def test_spills_and_too_much_shared_memory_are_found(tool: ModuleType) -> None:
    report = " Function kernel:\n  REG:{} STACK:{} SHARED:1024 LOCAL:{} CONSTANT[0]:612 TEXTURE:0\n"
    clean = tool.parse_usage(report.format(128, 0, 0), 200 << 10)
    assert clean == tool.Usage(registers=128, stack=0, shared=200 << 10)
    assert list(tool.problems(clean, 90)) == []
    assert list(tool.problems(clean, 80)) == ["takes 204800 bytes of shared memory, of 166912"]
    assert list(tool.problems(tool.parse_usage(report.format(255, 8, 0), 0), 90)) == ["spills 8 bytes"]
    assert list(tool.problems(tool.parse_usage(report.format(255, 0, 16), 0), 90)) == ["spills 16 bytes"]
    with pytest.raises(ValueError, match="no resource usage"):
        tool.parse_usage("cuobjdump fatal", 0)


def test_a_tool_that_compiled_nothing_fails() -> None:
    assert compile_kernels("--match", "^no such kernel$", timeout=120).returncode == 1
