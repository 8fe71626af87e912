import pytest

from quartet.services.executor.models.config import ModelError
from quartet.services.executor.native.library import Isa
from quartet.services.executor.settings import ExecutorSettings
from quartet.services.executor.startup import pick_isa
from quartet.shared.config import SettingsError, parse_settings


def test_flags_and_defaults() -> None:
    settings = parse_settings(ExecutorSettings, "executor", ["--num-blocks", "64", "--run-dir", "/tmp/q"], {})
    assert (settings.num_blocks, settings.block_size, settings.max_num_batched_tokens) == (64, 16, 0)
    assert settings.scheduler_address == "ipc:///tmp/q/scheduler-executor.sock"
    assert ExecutorSettings(scheduler_link="tcp://h:1").scheduler_address == "tcp://h:1"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "cuda", "--quantization", "int8"], "none on device cuda"),
        (["--device", "cuda", "--attention-backend", "native"], "triton or torch_paged"),
        (["--attention-backend", "torch_paged", "--kv-dtype", "fp8"], "kv_dtype fp8 needs attention_backend triton"),
        (["--gpu-memory-fraction", "1.5"], "gpu-memory-fraction"),
        (["--device", "tpu"], "auto, cpu, cuda"),
        (["--dtype", "int3"], "float32"),
        (["--num-blocks", "4", "--kv-cache-bytes", "4096"], "give one of them"),
        (["--kv-memory-fraction", "0"], "kv-memory-fraction"),
        (["--quantization", "int8", "--dtype", "float32"], "quantization int8 computes in bfloat16"),
        (["--quantization", "int5"], "int8, int4"),
        (["--isa", "sse"], "auto, avx512, amx"),
    ],
)
def test_wrong_settings_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_settings(ExecutorSettings, "executor", argv, {})


def test_isa_narrows_what_the_cpu_has() -> None:
    narrow = Isa.AVX512_BF16 | Isa.VNNI
    assert pick_isa("auto", narrow | Isa.AMX) == narrow | Isa.AMX
    assert pick_isa("avx512", narrow | Isa.AMX) == pick_isa("avx512", narrow) == narrow
    assert pick_isa("amx", narrow | Isa.AMX) == narrow | Isa.AMX
    with pytest.raises(ModelError, match=r"isa amx: this CPU has avx512_bf16\+vnni"):
        pick_isa("amx", narrow)
