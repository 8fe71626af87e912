"""The oracle: Hugging Face transformers on the same weights, in fp32, greedy, token for token."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

# A difference is excused only where the reference itself is this close to undecided.
TIE = 1e-3


@cache
def smollm2(path: Path) -> Any:
    """transformers' model of the shipped GGUF, dequantised to fp32."""
    from transformers import AutoModelForCausalLM, GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()


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
