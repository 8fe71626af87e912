"""The compiled decoder against transformers in float32: no further from it than the plain one in bfloat16."""

from __future__ import annotations

import functools
import time
import weakref
from typing import Any

import gguf
import pytest
import torch
from support.kernels import KINDS

from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.native.decoder import LoadParameters, NativeDecoder, Quantization, why_not
from quartet.services.executor.native.library import Isa
from quartet.services.executor.weights import load_decoder, load_with

ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
# head_size 32; neither the hidden size nor the inner one fills whole groups of 64.
SHAPE = {"hidden_size": 100, "intermediate_size": 90, "head_dim": 32, "num_hidden_layers": 2}


def native(folder: Any, isa: Isa, num_threads: int = 2, block_size: int = 16) -> NativeDecoder:
    build = functools.partial(NativeDecoder, block_size=block_size, num_threads=num_threads, isa=isa)
    return load_with(build, folder, "bfloat16")


def run(paged_sequences: Any, decoder: Any, texts: dict[int, list[int]], block_size: int = 16) -> torch.Tensor:
    """Prefills in two chunks, then decodes the last eight tokens one by one, all together; logits in text order."""
    paged = paged_sequences(decoder, block_size=block_size)
    logits: dict[int, list[torch.Tensor]] = {key: [] for key in texts}

    def step(pieces: dict[int, list[int]]) -> None:
        for key, part in paged.step({k: p for k, p in pieces.items() if p}).items():
            logits[key].append(part.clone())

    cuts = {key: max(1, len(text) // 3) for key, text in texts.items()}
    step({key: text[: cuts[key]] for key, text in texts.items()})
    ends = {key: max(cuts[key], len(text) - 8) for key, text in texts.items()}
    step({key: text[cuts[key] : ends[key]] for key, text in texts.items()})
    for i in range(8):
        step({key: text[ends[key] + i : ends[key] + i + 1] for key, text in texts.items()})
    return torch.cat([torch.cat(logits[key]) for key in texts])


def texts_of(lengths: list[int]) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(4)
    return {key: torch.randint(96, (length,), generator=generator).tolist() for key, length in enumerate(lengths)}


@pytest.mark.parametrize("isa", KINDS, ids=lambda kind: kind.describe())
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_as_close_as_the_plain_decoder(paged_sequences: Any, save_model: Any, architecture: str, isa: Isa) -> None:
    model, folder = save_model(architecture, **SHAPE)
    texts = texts_of([1, 2, 15, 16, 17, 33, 150])
    with torch.inference_mode():
        exact = torch.cat([model(torch.tensor([text])).logits[0] for text in texts.values()])
    plain = run(paged_sequences, load_decoder(folder, "bfloat16"), texts)
    found = run(paged_sequences, native(folder, isa), texts)
    assert found.isfinite().all()
    errors = [float((logits - exact).square().mean().sqrt()) for logits in (plain, found)]
    assert errors[1] < 1.1 * errors[0], errors
    worst = [float((logits - exact).abs().max()) for logits in (plain, found)]
    assert worst[1] < 1.5 * worst[0], worst


@pytest.mark.parametrize("isa", KINDS, ids=lambda kind: kind.describe())
@pytest.mark.parametrize("heads", [(4, 4), (6, 1), (20, 1)])
def test_heads_and_wider_blocks(paged_sequences: Any, save_model: Any, isa: Isa, heads: tuple[int, int]) -> None:
    shape = SHAPE | {"hidden_size": 120, "head_dim": 64}
    shape |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    model, folder = save_model("LlamaForCausalLM", tie_word_embeddings=True, **shape)
    texts = texts_of([3, 31, 40])
    with torch.inference_mode():
        exact = torch.cat([model(torch.tensor([text])).logits[0] for text in texts.values()])
    plain = run(paged_sequences, load_decoder(folder, "bfloat16"), texts)
    found = run(paged_sequences, native(folder, isa, block_size=32), texts, block_size=32)
    errors = [float((logits - exact).square().mean().sqrt()) for logits in (plain, found)]
    assert errors[1] < 1.1 * errors[0], errors


@pytest.mark.skipif(not KINDS, reason="no compiled kernels here")
def test_threads_do_not_change_results(paged_sequences: Any, save_model: Any) -> None:
    _, folder = save_model("LlamaForCausalLM", **SHAPE)
    texts = texts_of([5, 60, 100])
    one, many = (run(paged_sequences, native(folder, KINDS[-1], n), texts) for n in (1, 5))
    assert torch.equal(one, many)


@pytest.mark.skipif(not KINDS, reason="no compiled kernels here")
def test_time_is_counted_by_phase(paged_sequences: Any, save_model: Any) -> None:
    _, folder = save_model("LlamaForCausalLM", **SHAPE)
    decoder = native(folder, KINDS[-1])
    assert set(decoder.times().values()) == {0.0}
    start = time.perf_counter()
    run(paged_sequences, decoder, texts_of([5, 60]))
    elapsed = time.perf_counter() - start
    spent = decoder.times()
    assert min(spent.values()) > 0
    assert sum(spent.values()) < elapsed
    paged = paged_sequences(decoder)
    paged.step({0: [1, 2, 3]})
    assert all(now > spent[phase] for phase, now in decoder.times().items())


@pytest.mark.skipif(not KINDS, reason="no compiled kernels here")
@pytest.mark.parametrize("tied", [True, False])
def test_a_parameter_is_let_go_before_the_next_matrix_is_loaded(save_model: Any, tied: bool) -> None:
    """The embedding is a fifth of a small model: held to the end, all of it would be in memory twice."""
    _, folder = save_model("LlamaForCausalLM", tie_word_embeddings=tied, **SHAPE)
    held: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def parent(name: str) -> list[str]:
        return name.split(".")[:-2]

    class Watched:
        def __init__(self, load: LoadParameters) -> None:
            self._load = load

        def __call__(self, name: str) -> torch.Tensor:
            alive = [other for other, parameter in held if parameter() is not None]
            # Matrices that one product serves are loaded together.
            assert all(".layers." in other and parent(other) == parent(name) for other in alive), (name, alive)
            parameter = self._load(name)
            held.append((name, weakref.ref(parameter)))
            return parameter

        def q4_1(self, name: str) -> torch.Tensor | None:
            return self._load.q4_1(name)

    def build(config: ModelConfig, load: LoadParameters) -> NativeDecoder:
        return NativeDecoder(config, Watched(load), block_size=16, num_threads=1)

    load_with(build, folder, "bfloat16")
    assert len(held) > 2


@pytest.mark.skipif(not KINDS, reason="no compiled kernels here")
def test_what_the_kernels_do_not_fit_is_told(save_model: Any) -> None:
    _, folder = save_model("LlamaForCausalLM", hidden_size=48)
    config = load_decoder(folder, "bfloat16").config
    assert "head_size 12" in (why_not(config, 16) or "")
    with pytest.raises(ValueError, match="head_size 12"):
        native(folder, KINDS[0])
    _, fitting = save_model("LlamaForCausalLM", **SHAPE)
    assert "block_size 8" in (why_not(load_decoder(fitting, "bfloat16").config, 8) or "")


@pytest.mark.parametrize("isa", KINDS, ids=lambda kind: kind.describe())
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights(
    paged_sequences: Any, make_model: Any, tmp_path: Any, isa: Isa, quantization: Quantization
) -> None:
    # The inner size is no whole number of groups: down_proj falls back to 8 bits.
    shape = SHAPE | {"hidden_size": 128, "attention_bias": True, "mlp_bias": True}
    model = make_model("LlamaForCausalLM", **shape)
    if quantization == "int4":
        # What 4 bits cost is the model's affair; weights that they hold must come through.
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and weight.shape[1] % 32 == 0 and "layers" in name:
                blocks = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_1)
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_1)))
    model.save_pretrained(tmp_path)
    texts = texts_of([1, 17, 33, 90])
    exact = torch.cat([model(torch.tensor([text])).logits[0] for text in texts.values()])
    build = functools.partial(NativeDecoder, block_size=16, num_threads=2, isa=isa, quantization=quantization)
    found = run(paged_sequences, load_with(build, tmp_path, "float32"), texts)
    plain = run(paged_sequences, load_decoder(tmp_path, "bfloat16"), texts)
    errors = [float((logits - exact).square().mean().sqrt()) for logits in (plain, found)]
    assert errors[1] < 3 * errors[0], errors
