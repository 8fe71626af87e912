import pytest

from quartet.services.executor.settings import ExecutorSettings
from quartet.shared.config import SettingsError, parse_settings


def test_flags_and_defaults() -> None:
    settings = parse_settings(ExecutorSettings, "executor", ["--num-blocks", "64", "--run-dir", "/tmp/q"], {})
    assert (settings.num_blocks, settings.block_size, settings.max_num_batched_tokens) == (64, 16, 256)
    assert settings.scheduler_address == "ipc:///tmp/q/scheduler-executor.sock"
    assert ExecutorSettings(scheduler_link="tcp://h:1").scheduler_address == "tcp://h:1"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "cuda"], "device cuda is not built yet"),
        (["--device", "tpu"], "auto, cpu, cuda"),
        (["--dtype", "int3"], "float32"),
        (["--num-blocks", "4", "--kv-cache-bytes", "4096"], "give one of them"),
        (["--kv-memory-fraction", "0"], "kv-memory-fraction"),
        (["--quantization", "int8", "--dtype", "float32"], "quantization int8 computes in bfloat16"),
        (["--quantization", "int5"], "int8, int4"),
    ],
)
def test_wrong_settings_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_settings(ExecutorSettings, "executor", argv, {})
