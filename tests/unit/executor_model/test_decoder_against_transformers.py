"""The decoder over the paged cache computes what transformers computes, for every architecture."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from quartet.services.executor.weights import load_config, load_decoder

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied-no-gqa": ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-one-kv-head": ("LlamaForCausalLM", {"num_key_value_heads": 1, "head_dim": 16}),
    "mistral": ("MistralForCausalLM", {}),
    "mistral-no-window": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-window-16": ("MistralForCausalLM", {"sliding_window": 16}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-window": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-bias-tied": ("Qwen3ForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
    "linear": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5e3}}),
    "llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3 | {"rope_theta": 1e5}}),
    "yarn": ("Qwen2ForCausalLM", {"rope_parameters": YARN | {"rope_theta": 1e4}}),
    "yarn-mscale": (
        "Qwen3ForCausalLM",
        {"rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False}},
    ),
    "yarn-attention-factor": (
        "LlamaForCausalLM",
        {"rope_parameters": YARN | {"rope_theta": 1e4, "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2}},
    ),
}


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0].float()


@pytest.mark.parametrize("name", MODELS)
def test_mixed_batches_of_chunks_and_decodes(name: str, save_model: Any, paged_sequences: Any) -> None:
    architecture, changes = MODELS[name]
    model, folder = save_model(architecture, **changes)
    paged = paged_sequences(load_decoder(folder, "float32"))

    rng = random.Random(name)
    lengths = [1, 15, 16, 17, 32, 33, 90]
    sequences = {key: [rng.randrange(96) for _ in range(length)] for key, length in enumerate(lengths)}
    got: dict[int, list[torch.Tensor]] = {key: [] for key in sequences}
    done = dict.fromkeys(sequences, 0)
    while any(done[key] < len(sequences[key]) for key in sequences):
        pieces = {}
        for key in rng.sample(list(sequences), k=rng.randint(1, len(sequences))):
            # Half the pieces are single tokens, so that decodes and chunks share batches.
            count = min(rng.choice([1, 1, 1, 5, 16, 23]), len(sequences[key]) - done[key])
            if count:
                pieces[key] = sequences[key][done[key] : done[key] + count]
                done[key] += count
        if pieces:
            for key, logits in paged.step(pieces).items():
                got[key].append(logits)

    for key, token_ids in sequences.items():
        torch.testing.assert_close(torch.cat(got[key]), reference_logits(model, token_ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_tokens(name: str, save_model: Any, paged_sequences: Any) -> None:
    architecture, changes = MODELS[name]
    model, folder = save_model(architecture, **changes)
    paged = paged_sequences(load_decoder(folder, "float32"))
    rng = random.Random(7)
    sequences = {key: [rng.randrange(96) for _ in range(length)] for key, length in enumerate([3, 16, 41])}
    logits = paged.step(sequences)
    for _ in range(24):
        tokens = {key: int(rows[-1].argmax()) for key, rows in logits.items()}
        for key, token in tokens.items():
            expected = int(reference_logits(model, sequences[key])[-1].argmax())
            assert token == expected, (key, len(sequences[key]))
            sequences[key] = [*sequences[key], token]
        logits = paged.step({key: [token] for key, token in tokens.items()})


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn", "qwen2-window", "llama"])
def test_the_older_spellings_mean_the_same(name: str, save_model: Any) -> None:
    architecture, changes = MODELS[name]
    _, folder = save_model(architecture, **changes)
    newer = load_config(folder)
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
    raw["torch_dtype"] = raw.pop("dtype")
    raw.pop("layer_types", None)
    raw.pop("head_dim", None)
    (folder / "config.json").write_text(json.dumps(raw))
    assert load_config(folder) == newer


def test_half_precision_is_close(save_model: Any, paged_sequences: Any) -> None:
    _, folder = save_model("LlamaForCausalLM")
    token_ids = [random.Random(1).randrange(96) for _ in range(40)]
    exact = paged_sequences(load_decoder(folder, "float32")).step({0: token_ids})[0]
    for dtype in ("bfloat16", "float16"):
        paged = paged_sequences(load_decoder(folder, dtype))
        parts = [paged.step({0: token_ids[:33]})[0]]
        parts += [paged.step({0: [token]})[0] for token in token_ids[33:]]
        logits = torch.cat(parts)
        assert logits.dtype == torch.float32
        similarity = torch.nn.functional.cosine_similarity(logits, exact, dim=-1)
        assert similarity.min() > 0.999, dtype


def test_no_logits_are_asked_for(save_model: Any) -> None:
    _, folder = save_model("LlamaForCausalLM")
    for dtype in ("float32", "bfloat16"):
        decoder = load_decoder(folder, dtype)
        assert decoder.compute_logits(torch.empty(0, 48, dtype=decoder.dtype)).shape == (0, 96)
