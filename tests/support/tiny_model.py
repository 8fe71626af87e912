"""A Llama with random weights that is made in a second and run with the byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def make_tiny_llama(folder: Path, max_model_len: int = 4096) -> Any:
    """Saves the model into `folder`, as transformers does, and returns it in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_model_len,
        # Wide enough that the logits of two tokens are hardly ever equal within rounding.
        initializer_range=0.2,
        bos_token_id=256,
        eos_token_id=257,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model
