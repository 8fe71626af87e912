"""Sequences over a shuffled, poisoned paged cache, and tiny random models saved by transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.services.executor.attention.torch_paged import TorchPagedAttention
from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.models.decoder import Decoder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@dataclass
class Row:
    """`num_new` tokens after `num_computed` ones, in `blocks`."""

    num_computed: int
    num_new: int
    blocks: list[int]
    token_ids: list[int] = field(default_factory=list)
    is_decode: bool = False


def build_batch(rows: Sequence[Row], block_size: int) -> ForwardBatch:
    """`rows` in batch order, decodes first; every token is projected."""
    lens = [row.num_computed + row.num_new for row in rows]
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + row.num_new)
    width = max(len(row.blocks) for row in rows)
    tables = torch.tensor([row.blocks + [0] * (width - len(row.blocks)) for row in rows], dtype=torch.int32)
    positions = [range(row.num_computed, row.num_computed + row.num_new) for row in rows]
    slots = [
        row.blocks[position // block_size] * block_size + position % block_size
        for row, span in zip(rows, positions, strict=True)
        for position in span
    ]
    return ForwardBatch(
        token_ids=torch.tensor([token for row in rows for token in row.token_ids], dtype=torch.int64),
        positions=torch.tensor([position for span in positions for position in span], dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=tables,
        num_decodes=sum(row.is_decode for row in rows),
        logits_indices=torch.arange(starts[-1]),
        query_start_loc_list=starts,
        seq_lens_list=lens,
    )


class PagedSequences:
    """Runs token sequences through a decoder in any pieces, over blocks handed out at random from a
    cache that is NaN throughout until written."""

    def __init__(self, decoder: Decoder, num_blocks: int = 96, block_size: int = 16, seed: int = 0) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.cache = KVCache(decoder.config, num_blocks, block_size, decoder.dtype, decoder.device)
        for pool in self.cache.keys + self.cache.values:
            pool.fill_(float("nan"))
        self.attention = TorchPagedAttention()
        self.free = list(range(1, num_blocks + 1))
        random.Random(seed).shuffle(self.free)
        self.blocks: dict[int, list[int]] = {}
        self.num_computed: dict[int, int] = {}

    def step(self, pieces: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Each sequence's next tokens -> their logits [n, vocab_size]. One token after others is a decode."""
        rows: list[tuple[int, Row]] = []
        for key, token_ids in pieces.items():
            computed = self.num_computed.setdefault(key, 0)
            blocks = self.blocks.setdefault(key, [])
            while len(blocks) * self.block_size < computed + len(token_ids):
                blocks.append(self.free.pop())
            is_decode = computed > 0 and len(token_ids) == 1
            rows.append((key, Row(computed, len(token_ids), blocks, token_ids, is_decode)))
            self.num_computed[key] = computed + len(token_ids)
        rows.sort(key=lambda item: not item[1].is_decode)
        batch = build_batch([row for _, row in rows], self.block_size)
        self.attention.prepare(batch)
        hidden = self.decoder.forward(batch, self.cache, self.attention)
        logits = self.decoder.compute_logits(hidden[batch.logits_indices])
        return dict(zip((key for key, _ in rows), logits.split([row.num_new for _, row in rows]), strict=True))


@pytest.fixture
def paged_sequences() -> type[PagedSequences]:
    return PagedSequences


@pytest.fixture
def make_batch() -> Callable[[Sequence[Row], int], ForwardBatch]:
    return build_batch


@pytest.fixture
def make_row() -> type[Row]:
    return Row


def tiny_config(architecture: str, **changes: Any) -> Any:
    import transformers

    family = architecture.removesuffix("ForCausalLM")
    values: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "architectures": [architecture],
        "dtype": "float32",
    }
    if family == "Qwen3":
        values["head_dim"] = 20
    if family == "Mistral":
        values["sliding_window"] = 19
    return getattr(transformers, f"{family}Config")(**values | changes)


def random_model(architecture: str, seed: int = 0, **changes: Any) -> Any:
    """All parameters random, biases and norms too, so that a lost one shows."""
    import transformers

    config = tiny_config(architecture, **changes)
    config._attn_implementation = "eager"
    with torch.inference_mode(False):
        model = getattr(transformers, architecture)(config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(0, 0.15, generator=generator)
                if "norm" in name:
                    parameter.add_(1)
    return model


@pytest.fixture
def make_model() -> Callable[..., Any]:
    return random_model


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """(architecture, **config changes) -> (the transformers model, the folder it was saved to)."""

    def save(architecture: str, **changes: Any) -> tuple[Any, Path]:
        model = random_model(architecture, **changes)
        folder = tmp_path / architecture
        model.save_pretrained(folder)
        return model, folder

    return save
