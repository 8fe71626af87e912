"""From settings to tokens on Triton's kernels: all but a GPU's own memory, streams and graphs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.engine import Line
from support.tiny_config import LLAMA, random_parameters

from quartet.services.executor.models.config import ModelError
from quartet.services.executor.settings import ExecutorSettings
from quartet.services.executor.startup import load_runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_file(random_parameters(LLAMA, torch.float32), folder / "model.safetensors")
    config = {
        "architectures": [LLAMA.architecture],
        "vocab_size": LLAMA.vocab_size,
        "hidden_size": LLAMA.hidden_size,
        "intermediate_size": LLAMA.intermediate_size,
        "num_hidden_layers": LLAMA.num_layers,
        "num_attention_heads": LLAMA.num_heads,
        "num_key_value_heads": LLAMA.num_kv_heads,
        "head_dim": LLAMA.head_size,
        "rms_norm_eps": LLAMA.rms_norm_eps,
        "rope_theta": LLAMA.rope.theta,
        "max_position_embeddings": LLAMA.max_position_embeddings,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settings(folder: Path, **changes: object) -> ExecutorSettings:
    common = {
        "model": str(folder),
        "device": "cpu",
        "max_model_len": 32,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
        "num_blocks": 6,
        "num_threads": 1,
    }
    return ExecutorSettings(**(common | changes))


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_an_executor_of_triton_answers_as_the_plain_one(folder: Path, kv_dtype: str) -> None:
    answers = []
    for changes in ({"attention_backend": "triton", "kv_dtype": kv_dtype}, {"attention_backend": "torch_paged"}):
        runner, info = load_runner(settings(folder, dtype="float32", **changes))
        assert (info.dtype, info.device, info.num_blocks, info.max_num_batched_tokens) == ("float32", "cpu", 6, 8)
        line = Line(runner, runner._batch)
        line.add([5, 9, 30, 77, 12, 3, 8, 61, 99, 100, 4], 4 if kv_dtype == "auto" else 1)
        line.run()
        answers.append(line.outputs)
    assert answers[0] == answers[1]


def test_a_shape_that_is_not_supported_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"attention_backend triton is not possible: .* block size"):
        load_runner(settings(folder, attention_backend="triton", block_size=8, num_blocks=12))
