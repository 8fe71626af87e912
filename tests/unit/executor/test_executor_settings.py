import dataclasses

import pytest
from support.tiny_config import LLAMA

from quartet.services.executor import startup
from quartet.services.executor.models.config import ModelError
from quartet.services.executor.native.library import Isa
from quartet.services.executor.settings import ExecutorSettings
from quartet.services.executor.startup import pick_dtype, pick_isa
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
        (["--isa", "sse"], "auto, avx2, avx512, amx"),
    ],
)
def test_wrong_settings_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_settings(ExecutorSettings, "executor", argv, {})


def test_isa_narrows_what_the_cpu_has() -> None:
    narrow, old = Isa.AVX512_BF16 | Isa.VNNI, Isa.AVX2 | Isa.AVX_VNNI
    everything = narrow | old | Isa.AMX
    assert pick_isa("auto", everything) == pick_isa("amx", everything) == narrow | Isa.AMX
    assert (
        pick_isa("avx512", everything) == pick_isa("avx512", narrow | old) == pick_isa("auto", narrow | old) == narrow
    )
    assert pick_isa("avx2", everything) == pick_isa("avx2", old) == pick_isa("auto", old) == old
    assert pick_isa("auto", Isa.AVX2) == Isa.AVX2
    with pytest.raises(ModelError, match=r"isa amx: this CPU has avx512_bf16\+vnni"):
        pick_isa("amx", narrow)
    with pytest.raises(ModelError, match=r"isa avx512: this CPU has avx2\+avx_vnni"):
        pick_isa("avx512", old)
    with pytest.raises(ModelError, match="isa avx2: this CPU has none"):
        pick_isa("avx2", Isa(0))


@pytest.mark.parametrize(
    ("native", "head_size", "saved", "dtype"),
    [
        (False, 64, "bfloat16", "bfloat16"),
        (False, 40, "bfloat16", "float32"),
        (False, 64, "float32", "float32"),
        (True, 40, "float16", "bfloat16"),
    ],
)
def test_bfloat16_is_taken_where_it_is_fast(
    monkeypatch: pytest.MonkeyPatch, native: bool, head_size: int, saved: str, dtype: str
) -> None:
    monkeypatch.setattr(startup, "has_native_bfloat16", lambda: native)
    monkeypatch.setattr(startup, "why_not", lambda config, block_size: None if config.head_size == 64 else "head_size")
    config = dataclasses.replace(LLAMA, head_size=head_size, dtype=saved)
    assert pick_dtype(ExecutorSettings(), config) == dtype
    plain = ExecutorSettings(attention_backend="torch_paged")
    assert pick_dtype(plain, config) == ("bfloat16" if native else "float32")
