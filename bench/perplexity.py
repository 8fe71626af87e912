"""What each precision costs in perplexity, on a fixed text, through the executor's own decoders.

    python -m bench.perplexity
    python -m bench.train_tiny tiny && python -m bench.perplexity --model tiny --bytes

Prints a line for each precision to stderr and one JSON object to stdout. `int4` is held against the same weights in
bfloat16 after they have been through 4 bits, too: that ratio is what the kernels cost, the other one what 4 bits cost.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import gguf
import torch

from quartet.services.executor.attention.torch_paged import TorchPagedAttention
from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.models.config import ModelConfig
from quartet.services.executor.native.decoder import NativeDecoder
from quartet.services.executor.native.library import detect_isa
from quartet.services.executor.startup import pick_isa
from quartet.services.executor.weights import is_q4_1, load_decoder, load_with
from quartet.services.executor.weights.loader import Parameters
from quartet.services.tokenizer.loaders import load_tokenizer
from quartet.shared.model_files import resolve_model

DATA = Path(__file__).with_name("data")
BLOCK_SIZE = 16
PRECISIONS = ("fp32", "bf16", "int8", "int4", "int4 dequantised")


class Scored(Protocol):
    """Decoder or NativeDecoder."""

    config: ModelConfig
    dtype: torch.dtype

    def forward(self, batch: ForwardBatch, kv_cache: KVCache, attention: TorchPagedAttention) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Dequantised:
    """Parameters whose layers' matrices have been through Q4_1."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    def __call__(self, name: str) -> torch.Tensor:
        weight = self._parameters(name)
        if not name.endswith("proj.weight") or weight.shape[1] % 32:
            return weight
        kind = gguf.GGMLQuantizationType.Q4_1
        blocks = gguf.quants.quantize(weight.float().numpy(), kind)
        return torch.from_numpy(gguf.quants.dequantize(blocks, kind)).to(weight.dtype)

    def q4_1(self, name: str) -> torch.Tensor | None:
        return None


@torch.inference_mode()
def score(decoder: Scored, token_ids: Sequence[int], window: int, budget: int) -> float:
    """Mean negative log-probability of all tokens but the first of each window; windows do not see each other."""
    cache = KVCache(decoder.config, -(-window // BLOCK_SIZE), BLOCK_SIZE, decoder.dtype, "cpu")
    attention = TorchPagedAttention()
    total, count = 0.0, 0
    for begin in range(0, len(token_ids), window):
        ids = torch.tensor(token_ids[begin : begin + window])
        for batch in steps(ids, budget):
            attention.prepare(batch)
            hidden = decoder.forward(batch, cache, attention)
            targets = ids[batch.positions[0] + 1 : batch.positions[-1] + 2]
            if len(targets):
                logprobs = torch.log_softmax(decoder.compute_logits(hidden[: len(targets)]), dim=-1)
                total -= float(logprobs.gather(1, targets[:, None]).double().sum())
                count += len(targets)
    return total / count


def steps(ids: torch.Tensor, budget: int) -> Iterator[ForwardBatch]:
    """The forward passes of one sequence [N], `budget` tokens in each."""
    blocks = torch.arange(1, -(-len(ids) // BLOCK_SIZE) + 1, dtype=torch.int32)[None]
    for start in range(0, len(ids), budget):
        end = min(start + budget, len(ids))
        positions = torch.arange(start, end)
        yield ForwardBatch(
            token_ids=ids[start:end].clone(),
            positions=positions,
            # Block 0 is the null block.
            slot_mapping=positions + BLOCK_SIZE,
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=blocks,
            num_decodes=int(end - start == 1),
            logits_indices=torch.arange(end - start),
            query_start_loc_list=[0, end - start],
            seq_lens_list=[end],
        )


def loaders(path: Path, num_threads: int, isa: str) -> dict[str, Callable[[], Scored]]:
    """What loads each precision that this machine and model have."""
    native = functools.partial(
        NativeDecoder, block_size=BLOCK_SIZE, num_threads=num_threads, isa=pick_isa(isa, detect_isa())
    )

    def load(quantization: Any) -> Scored:
        return load_with(functools.partial(native, quantization=quantization), path, "bfloat16")

    found: dict[str, Callable[[], Scored]] = {"fp32": lambda: load_decoder(path, "float32")}
    if not detect_isa():
        return found | {"bf16": lambda: load_decoder(path, "bfloat16")}
    found |= {"bf16": lambda: load("none"), "int8": lambda: load("int8"), "int4": lambda: load("int4")}
    if not is_q4_1(path):
        # A Q4_1 file's bf16 is the dequantised model.
        found["int4 dequantised"] = lambda: load_with(lambda c, p: native(c, Dequantised(p)), path, "bfloat16")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a GGUF file, a folder (default: %(default)s)")
    parser.add_argument("--bytes", action="store_true", help="the model's tokens are bytes; the text is then Milton's")
    parser.add_argument("--text", type=Path, help="another text")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--max-tokens", type=int, default=30_000, help="of the text (default %(default)s)")
    parser.add_argument("--window", type=int, default=1024, help="tokens that see each other (default %(default)s)")
    parser.add_argument("--budget", type=int, default=256, help="tokens in a step: 4, 32 and 256 use different kernels")
    parser.add_argument(
        "--isa", choices=["auto", "avx2", "avx512", "amx"], default="auto", help="see the executor's --isa"
    )
    arguments = parser.parse_args()

    num_threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    path = resolve_model(arguments.model).path
    text = (arguments.text or DATA / ("paradise_lost_11_12.txt" if arguments.bytes else "alice.txt")).read_text()
    ids = (
        list(text.encode())
        if arguments.bytes
        else load_tokenizer(path).tokenizer.encode(text, add_special_tokens=False).ids
    )
    ids = ids[: arguments.max_tokens]
    found: dict[str, float] = {}
    for name, load in loaders(path, num_threads, arguments.isa).items():
        if name in arguments.precisions:
            started = time.perf_counter()
            found[name] = math.exp(score(load(), ids, arguments.window, arguments.budget))
            print(
                f"{name:16} {found[name]:9.4f}  in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True
            )
    print(json.dumps(report(found, len(ids), arguments.budget), indent=2))


def report(found: dict[str, float], num_tokens: int, budget: int) -> dict[str, Any]:
    ratios = {}
    if "bf16" in found:
        ratios = {f"{name} / bf16": round(value / found["bf16"], 5) for name, value in found.items() if name != "bf16"}
    if "int4" in found and "int4 dequantised" in found:
        ratios["int4 / int4 dequantised"] = round(found["int4"] / found["int4 dequantised"], 5)
    return {
        "num_tokens": num_tokens,
        "tokens_in_a_step": budget,
        "perplexity": {name: round(value, 4) for name, value in found.items()},
        "ratios": ratios,
    }


if __name__ == "__main__":
    main()
