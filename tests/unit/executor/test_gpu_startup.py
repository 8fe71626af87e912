"""What starts where: devices and kernels that are not there are refused with a reason."""

import dataclasses
from typing import Any

import msgspec
import pytest
import torch
from support.tiny_config import LLAMA

from quartet.services.executor import gpu_startup
from quartet.services.executor.gpu_startup import pick_device, pick_gpu_dtype, why_not_triton
from quartet.services.executor.models.config import ModelError
from quartet.services.executor.resources import NotEnoughMemory, num_kv_blocks
from quartet.services.executor.settings import ExecutorSettings
from quartet.services.executor.startup import load_runner
from quartet.shared.model_files import resolve_model

CPU = torch.device("cpu")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device(ExecutorSettings(device="auto")) == pick_device(ExecutorSettings(device="cpu")) == CPU
    monkeypatch.setattr(gpu_startup, "_is_gpu_build", lambda: False)
    with pytest.raises(ModelError, match="device cuda: this torch was built without CUDA or ROCm; use device cpu"):
        pick_device(ExecutorSettings(device="cuda"))
    monkeypatch.setattr(gpu_startup, "_is_gpu_build", lambda: True)
    with pytest.raises(ModelError, match="torch finds no usable GPU"):
        pick_device(ExecutorSettings(device="cuda"))


def test_with_a_gpu_auto_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert pick_device(ExecutorSettings(device="auto")) == torch.device("cuda", 0)
    assert pick_device(ExecutorSettings(device="cpu")) == CPU


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "triton"}, "attention_backend triton is not possible: the Triton kernels need a GPU"),
        ({"kv_dtype": "fp8"}, "kv_dtype fp8 is not possible"),
        ({"attention_backend": "native", "dtype": "float32"}, "attention_backend native is not possible: the compiled"),
    ],
)
def test_kernels_that_cannot_run_here_are_refused(settings: dict[str, Any], message: str) -> None:
    model = str(resolve_model("smollm2-135m-instruct").path)
    with pytest.raises(ModelError, match=message):
        load_runner(ExecutorSettings(model=model, max_model_len=64, num_blocks=8, **settings))


def test_shapes_that_the_kernels_do_not_take_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    properties = msgspec.defstruct("Properties", [("major", int), ("minor", int)])(9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpu, settings = torch.device("cuda", 0), ExecutorSettings()
    assert why_not_triton(settings, LLAMA, "bfloat16", gpu) is None
    reason = why_not_triton(settings, dataclasses.replace(LLAMA, head_size=40), "bfloat16", gpu)
    assert reason is not None and "head size" in reason
    reason = why_not_triton(ExecutorSettings(block_size=8), LLAMA, "bfloat16", gpu)
    assert reason is not None and "block size" in reason
    assert why_not_triton(settings, LLAMA, "bfloat16", CPU) == "the Triton kernels need a GPU"


def test_the_dtype_of_a_gpu_is_the_model_s() -> None:
    half = dataclasses.replace(LLAMA, dtype="float16")
    assert pick_gpu_dtype(ExecutorSettings(), half) == "float16"
    assert pick_gpu_dtype(ExecutorSettings(), LLAMA) == "bfloat16"
    assert pick_gpu_dtype(ExecutorSettings(dtype="float32"), half) == "float32"


def test_a_gpu_s_pool_takes_all_that_its_fraction_leaves() -> None:
    settings = ExecutorSettings()
    assert num_kv_blocks(settings, 1600, 1000, 500_000, on_gpu=True) == 500
    with pytest.raises(NotEnoughMemory, match=r"gpu_memory_fraction 0.9, which leaves -\d+ MiB, gives 0: "):
        num_kv_blocks(settings, 1600, 1000, -5_000_000, on_gpu=True)
