"""Every parameter set exactly once, or a refusal that names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quartet.services.executor.models.config import ModelError
from quartet.services.executor.weights import load_config, load_decoder

PROMPT = [5, 17, 80, 3, 44, 9]
Q_BIAS = "model.layers.1.self_attn.q_proj.bias"


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def matches(model: Any, folder: Path, paged_sequences: Any) -> bool:
    logits = paged_sequences(load_decoder(folder, "float32")).step({0: PROMPT})[0]
    return torch.allclose(logits, model(torch.tensor([PROMPT])).logits[0], atol=1e-4, rtol=0)


def test_shards_with_an_index(make_model: Any, paged_sequences: Any, tmp_path: Path) -> None:
    model = make_model("Qwen2ForCausalLM")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert matches(model, tmp_path, paged_sequences)

    # A tensor in two shards.
    extra = load_file(shards[0])
    name = next(iter(load_file(shards[1])))
    save_file(extra | {name: torch.zeros(1)}, shards[0])
    with pytest.raises(ModelError, match=f"{name} is in another file"):
        load_decoder(tmp_path)
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"names {shards[1].name}, which is not in the folder"):
        load_decoder(tmp_path)


def test_missing_unexpected_and_misshapen_tensors_are_named(save_model: Any) -> None:
    _, folder = save_model("Qwen2ForCausalLM")
    kept = load_file(folder / "model.safetensors")[Q_BIAS]
    edit_tensors(folder, lambda tensors: tensors.pop(Q_BIAS))
    with pytest.raises(ModelError, match=f"tensor {Q_BIAS} is missing"):
        load_decoder(folder)
    edit_tensors(folder, lambda tensors: tensors.update({Q_BIAS: kept[:-1].clone()}))
    with pytest.raises(ModelError, match=rf"tensor {Q_BIAS} has shape \[47\], the config calls for \[48\]"):
        load_decoder(folder)
    edit_tensors(folder, lambda tensors: tensors.update({Q_BIAS: kept, "model.layers.3.mlp.up_proj.weight": kept}))
    with pytest.raises(ModelError, match=r"tensor model.layers.3.mlp.up_proj.weight has no place"):
        load_decoder(folder)


def test_a_bias_the_config_does_not_know_is_refused(save_model: Any) -> None:
    _, folder = save_model("LlamaForCausalLM", attention_bias=True)
    edit_config(folder, attention_bias=False)
    with pytest.raises(ModelError, match=r"k_proj.bias|q_proj.bias|o_proj.bias"):
        load_decoder(folder)


def test_computed_buffers_of_old_checkpoints_are_harmless(save_model: Any, paged_sequences: Any) -> None:
    model, folder = save_model("LlamaForCausalLM")
    inverse = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda tensors: tensors.update({inverse: torch.full((6,), 9.0)}))
    assert matches(model, folder, paged_sequences)


def test_heads_tied_and_untied(save_model: Any, paged_sequences: Any) -> None:
    tied, folder = save_model("LlamaForCausalLM", tie_word_embeddings=True)
    names = set(load_file(folder / "model.safetensors"))
    assert "lm_head.weight" not in names
    assert load_decoder(folder).config.tie_word_embeddings
    assert matches(tied, folder, paged_sequences), "tied, no head"

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(folder, add_head)
    assert load_decoder(folder).config.tie_word_embeddings
    assert matches(tied, folder, paged_sequences), "tied, redundant head"
    edit_config(folder, tie_word_embeddings=False)
    assert matches(tied, folder, paged_sequences), "untied, with head"
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"tensor lm_head.weight is missing"):
        load_decoder(folder)


def test_a_head_that_differs_wins_over_a_stale_tie(save_model: Any, paged_sequences: Any) -> None:
    untied, folder = save_model("LlamaForCausalLM")
    edit_config(folder, tie_word_embeddings=True)
    assert matches(untied, folder, paged_sequences)


def test_dtypes(save_model: Any) -> None:
    _, folder = save_model("LlamaForCausalLM")
    for name in ("float32", "bfloat16", "float16"):
        assert load_decoder(folder, name).dtype is getattr(torch, name)
    assert load_decoder(folder, "auto").dtype is torch.float32
    edit_config(folder, dtype=..., torch_dtype="bfloat16")
    assert load_decoder(folder, "auto").dtype is torch.bfloat16
    edit_config(folder, torch_dtype=...)
    assert load_decoder(folder, "auto").dtype is torch.float32, "what the file's tensors are"
    for name in ("int8", "half", ""):
        with pytest.raises(ModelError, match=f"dtype '{name}' is not supported"):
            load_decoder(folder, name)
    edit_config(folder, dtype="float8_e4m3fn")
    with pytest.raises(ModelError, match="float8_e4m3fn"):
        load_decoder(folder, "auto")


def test_progress_counts_every_parameter(save_model: Any) -> None:
    _, folder = save_model("LlamaForCausalLM")
    seen: list[tuple[int, int]] = []
    load_decoder(folder, progress=lambda done, total: seen.append((done, total)))
    total = len(load_file(folder / "model.safetensors"))
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_weights_do_not_alias_the_mapped_file(save_model: Any) -> None:
    _, folder = save_model("LlamaForCausalLM")
    decoder = load_decoder(folder)
    before = decoder.embed_tokens.clone()
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    assert torch.equal(decoder.embed_tokens, before)


def test_folders_that_cannot_be_loaded(save_model: Any, tmp_path: Path) -> None:
    _, folder = save_model("LlamaForCausalLM")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load_decoder(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is a pickle, which is never loaded"):
        load_decoder(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="no safetensors file"):
        load_decoder(folder)
    with pytest.raises(ModelError, match="does not exist"):
        load_config(tmp_path / "nowhere")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        load_config(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "rope type 'foo'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a number"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor must be a number"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel'"),
        ({"architectures": None, "model_type": "gemma3"}, "architecture 'gemma3'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": ...}, "hidden_size must be a whole number"),
        ({"hidden_size": 48.0}, "hidden_size must be a whole number"),
        ({"num_key_value_heads": 3}, "not a multiple of num_kv_heads 3"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq' is not supported"),
    ],
)
def test_configs_that_are_refused(save_model: Any, changes: dict[str, Any], message: str) -> None:
    _, folder = save_model("LlamaForCausalLM")
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load_config(folder)


def test_rope_scaling_null_is_no_scaling(save_model: Any) -> None:
    _, folder = save_model("LlamaForCausalLM")
    edit_config(folder, rope_parameters=..., rope_scaling=None, rope_theta=10_000.0)
    assert load_config(folder).rope.scaling is None
    edit_config(folder, architectures=...)
    assert load_config(folder).architecture == "LlamaForCausalLM"
