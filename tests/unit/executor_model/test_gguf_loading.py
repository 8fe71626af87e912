"""GGUF files, written by the gguf library from transformers models, and the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quartet.services.executor.models.config import ModelError
from quartet.services.executor.models.rope import FrequencyFactors, LinearScaling, YarnScaling, inverse_frequencies
from quartet.services.executor.weights import load_config, load_decoder
from quartet.services.executor.weights.gguf_header import GGUFHeader
from quartet.shared.model_files import cache_dir

SMOLLM2 = cache_dir() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ARCH = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
PROMPT = list(range(3, 40))


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleave(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """As the converter to GGUF does for llama."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write_gguf(
    path: Path,
    model: Any,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    without: str = "",
) -> None:
    config = model.config
    arch = ARCH[type(model).__name__]
    writer = gguf.GGUFWriter(path, arch)
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if arch == "qwen3":
        values |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    for key, value in (values | (metadata or {})).items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        else:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {index}" for index in range(config.vocab_size)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * config.vocab_size)
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if arch == "llama" and ".q_proj." in name:
            array = interleave(array, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            array = interleave(array, config.num_key_value_heads)
        kind = quantization if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        if gguf_name(name) != without:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    ],
)
def test_a_gguf_file_computes_what_its_source_does(
    architecture: str, changes: dict[str, Any], make_model: Any, paged_sequences: Any, tmp_path: Path
) -> None:
    model = make_model(architecture, **changes)
    path = tmp_path / "model.gguf"
    write_gguf(path, model)
    decoder = load_decoder(path, "float32")
    assert decoder.config.tie_word_embeddings == model.config.tie_word_embeddings
    logits = paged_sequences(decoder).step({0: PROMPT})[0]
    torch.testing.assert_close(logits, model(torch.tensor([PROMPT])).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_tensors(quantization: str, make_model: Any, tmp_path: Path) -> None:
    model = make_model("LlamaForCausalLM", hidden_size=64, intermediate_size=96)
    kind = gguf.GGMLQuantizationType[quantization]
    path = tmp_path / "model.gguf"
    write_gguf(path, model, kind)
    decoder = load_decoder(path, "float32")
    array = model.model.embed_tokens.weight.detach().numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
    np.testing.assert_array_equal(decoder.embed_tokens.numpy(), expected)
    assert load_decoder(path).dtype is torch.bfloat16


@pytest.fixture(scope="module")
def smollm2_reader() -> gguf.GGUFReader:
    if not SMOLLM2.exists():
        pytest.skip("the default model is not in the cache")
    return gguf.GGUFReader(SMOLLM2)


def test_the_header_is_read_as_the_gguf_library_reads_it(smollm2_reader: gguf.GGUFReader) -> None:
    header, reader = GGUFHeader(SMOLLM2), smollm2_reader
    for key, value in header.metadata.items():
        assert value == reader.fields[key].contents(), key
    stepped_over = set(reader.fields) - set(header.metadata)
    assert all(key.startswith(("GGUF.", "tokenizer.", "general.languages")) for key in stepped_over)
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        mine = header.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.type.number == tensor.tensor_type
        assert mine.data.tobytes() == tensor.data.tobytes()


def test_rope_scaling(make_model: Any, paged_sequences: Any, tmp_path: Path) -> None:
    model = make_model("LlamaForCausalLM")
    path = tmp_path / "model.gguf"
    write_gguf(path, model, metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})
    assert load_config(path).rope.scaling == LinearScaling(2.0)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    write_gguf(path, model, metadata=yarn)
    scaling = load_config(path).rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == pytest.approx(1.1386294)
    write_gguf(path, model, metadata={"rope.scaling.type": "longrope"})
    with pytest.raises(ModelError, match="longrope"):
        load_config(path)

    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = make_model("LlamaForCausalLM", rope_parameters=rope | {"original_max_position_embeddings": 64})
    plain = inverse_frequencies(load_config_of(model, tmp_path).rope, 12)
    factors = (plain / scaled.model.rotary_emb.inv_freq).numpy()
    write_gguf(path, scaled, extra={"rope_freqs.weight": factors})
    assert isinstance(load_config(path).rope.scaling, FrequencyFactors)
    logits = paged_sequences(load_decoder(path, "float32")).step({0: PROMPT})[0]
    torch.testing.assert_close(logits, scaled(torch.tensor([PROMPT])).logits[0], atol=1e-4, rtol=0)


def load_config_of(model: Any, folder: Path) -> Any:
    write_gguf(folder / "plain.gguf", model)
    return load_config(folder / "plain.gguf")


def test_refusals(make_model: Any, tmp_path: Path) -> None:
    model = make_model("Qwen2ForCausalLM")
    path = tmp_path / "model.gguf"

    def refused(message: str) -> None:
        with pytest.raises(ModelError, match=message):
            load_decoder(path)

    write_gguf(path, model, without="blk.2.ffn_up.weight")
    refused(r"tensor blk.2.ffn_up.weight is missing")
    write_gguf(path, model, extra={"blk.0.ffn_gate_inp.weight": np.zeros((4, 4), np.float32)})
    refused(r"tensor blk.0.ffn_gate_inp.weight has no place")
    write_gguf(path, model, metadata={"feed_forward_length": 81})
    refused(r"tensor blk.0.ffn_\w+.weight has shape")
    write_gguf(path, model, metadata={"expert_count": 8})
    refused("expert_count 8")
    write_gguf(path, model, metadata={"attention.head_count_kv": [2, 2, 1]})
    refused("differs from layer to layer")
    write_gguf(path, model, metadata={"rope.dimension_count": 6})
    refused(r"rope.dimension_count 6 differs")

    write_gguf(path, model)
    whole = path.read_bytes()
    for size in (0, 3, 20, 100, 2000, len(whole) - 100):
        path.write_bytes(whole[:size])
        refused("not a readable GGUF file|not a GGUF file|the file ends within tensor")
    path.write_bytes(whole.replace(b"qwen2", b"qwenx"))
    refused("general.architecture 'qwenx'")
    # The same tensor twice.
    path.write_bytes(whole.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"))
    refused(r"tensor blk.1.ffn_up.weight is in the file twice")
    path.rename(tmp_path / "model.bin")
    with pytest.raises(ModelError, match=r"neither a .gguf file nor a model folder"):
        load_decoder(tmp_path / "model.bin")


def reference_smollm2(reader: gguf.GGUFReader) -> Any:
    """transformers' Llama, filled from the gguf library's own reading of the file."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )
    with torch.inference_mode(False):
        model = transformers.LlamaForCausalLM(config).eval()
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, parameter in model.named_parameters():
        source = tensors.pop(gguf_name(name))
        array = gguf.quants.dequantize(source.data, source.tensor_type)
        for part, heads in (("q_proj", 9), ("k_proj", 3)):
            if part in name:
                array = array.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(array.shape)
        with torch.no_grad():
            parameter.copy_(torch.tensor(array))
    assert not tensors
    return model


def test_the_default_model_is_transformers_token_for_token(
    paged_sequences: Any, smollm2_reader: gguf.GGUFReader
) -> None:
    model = reference_smollm2(smollm2_reader)
    decoder = load_decoder(SMOLLM2, "float32")
    # "The capital of France is", and 33 arbitrary ids.
    prompts = {0: [504, 3575, 282, 4649, 314], 1: [(37 * index) % 49152 for index in range(100, 133)]}
    paged = paged_sequences(decoder)
    logits = paged.step(prompts)
    sequences = {key: list(token_ids) for key, token_ids in prompts.items()}
    for _ in range(16):
        tokens = {key: int(rows[-1].argmax()) for key, rows in logits.items()}
        for key, token in tokens.items():
            sequences[key].append(token)
        logits = paged.step({key: [token] for key, token in tokens.items()})
    for key, token_ids in sequences.items():
        reference = model(torch.tensor([token_ids])).logits[0]
        start = len(prompts[key])
        assert token_ids[start:] == reference[start - 1 : -1].argmax(-1).tolist()
        torch.testing.assert_close(logits[key][-1], reference[-1], atol=1e-3, rtol=0)
