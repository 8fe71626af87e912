"""The oracle: Hugging Face transformers on the same weights, in fp32, greedy, token for token."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from quartet.services.executor.weights.gguf_header import GGUFHeader

_GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# A difference is excused only where the reference itself is this close to undecided.
TIE = 1e-3


@cache
def smollm2(path: Path) -> Any:
    """transformers' model of the shipped GGUF, dequantised to fp32 by the gguf library.

    transformers loads the file itself too, but takes a quarter of a minute for it. That our reader sees the
    bytes that the gguf library sees is tested where it is read.
    """
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    header = GGUFHeader(path)
    heads = {
        f"{part}_proj": header.metadata[f"llama.attention.head_count{kv}"] for part, kv in (("q", ""), ("k", "_kv"))
    }
    config = LlamaConfig(
        vocab_size=header.tensors["token_embd.weight"].shape[0],
        hidden_size=header.metadata["llama.embedding_length"],
        intermediate_size=header.metadata["llama.feed_forward_length"],
        num_hidden_layers=header.metadata["llama.block_count"],
        num_attention_heads=heads["q_proj"],
        num_key_value_heads=heads["k_proj"],
        max_position_embeddings=header.metadata["llama.context_length"],
        rms_norm_eps=header.metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": header.metadata["llama.rope.freq_base"]},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    tensors = dict(header.tensors)
    for name, parameter in model.named_parameters():
        source = tensors.pop(_gguf_name(name))
        array = gguf.quants.dequantize(source.data, gguf.GGMLQuantizationType(source.type.number))
        for part, num_heads in heads.items():
            if part in name:
                # llama.cpp rotates neighbours, transformers halves.
                array = array.reshape(num_heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        with torch.no_grad():
            parameter.copy_(torch.tensor(array))
    assert not tensors
    return model


def _gguf_name(name: str) -> str:
    stem, _, kind = name.removeprefix("model.").rpartition(".")
    if stem.startswith("layers."):
        _, layer, stem = stem.split(".", 2)
        return f"blk.{layer}.{_GGUF_NAMES[stem]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


@torch.inference_mode()
def logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab] float32."""
    return model(torch.tensor([token_ids])).logits[0].float()


def assert_greedy(model: Any, prompt: list[int], output: list[int]) -> None:
    """`output` is what greedy decoding of `model` gives after `prompt`, judged teacher-forced: each
    token is the reference's argmax, or its runner-up where the two are within TIE."""
    assert output, "nothing was generated"
    rows = logits(model, prompt + output)[len(prompt) - 1 : -1]
    best = rows.max(dim=-1)
    for i, token_id in enumerate(output):
        if token_id == best.indices[i]:
            continue
        top = rows[i].topk(2)
        gap = float(top.values[0] - top.values[1])
        assert token_id == int(top.indices[1]) and gap <= TIE, (
            f"output {i} is {token_id}, the reference says {int(best.indices[i])} (gap {gap:.2e})"
        )


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The reference's own continuation, without stopping at an end of sequence."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
