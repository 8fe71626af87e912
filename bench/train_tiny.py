"""Trains a small byte-level Llama in float32, some minutes on a CPU, and saves it as a model folder.

    python -m bench.train_tiny FOLDER

The default model's checkpoint is itself a dequantised Q4_1, which flatters 4 bits; this one's weights have never been
near a grid. Needs transformers (`pip install 'quartet[dev]'`). To talk to it:
`quartet serve --model FOLDER --tokenizer-tokenizer byte`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
import transformers

DATA = Path(__file__).with_name("data")
# 256 begins and 257 ends a text.
VOCAB_SIZE = 258
CONTEXT = 256
BATCH = 8
PEAK_RATE = 2e-3
WARM_UP = 0.05


def new_model() -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=256,
            eos_token_id=257,
            dtype="float32",
        )
    )


def learning_rate(done: float) -> float:
    """`done` of the steps, 0 to 1: up at first, then down along a cosine."""
    return PEAK_RATE * (done / WARM_UP if done < WARM_UP else 0.5 + 0.5 * math.cos(math.pi * done))


def train(model: transformers.LlamaForCausalLM, text: bytes, num_steps: int) -> None:
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    model.train()
    started = time.monotonic()
    for step in range(num_steps):
        begins = torch.randint(len(ids) - CONTEXT, (BATCH,)).tolist()
        batch = torch.stack([ids[begin : begin + CONTEXT] for begin in begins])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.param_groups[0]["lr"] = learning_rate(step / num_steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 20 == 0:
            passed = time.monotonic() - started
            print(f"step {step + 1}  loss {loss.item():.3f}  {passed:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300, help=f"of {BATCH} x {CONTEXT} bytes (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = new_model()
    train(model, (DATA / "paradise_lost_1_10.txt").read_bytes(), arguments.steps)
    model.save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
