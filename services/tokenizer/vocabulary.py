"""The vocabulary as it is told to those right of here, who read no tokenizer's files."""

from __future__ import annotations

from collections.abc import Iterator

from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.shared.messages import Vocabulary

PART_BYTES = 4 << 20


def vocabulary_parts(loaded: LoadedTokenizer) -> Iterator[Vocabulary]:
    """In order, each well within a frame."""
    start = size = 0
    for end, token in enumerate(loaded.token_bytes, 1):
        size += len(token) + 8
        if size >= PART_BYTES or end == loaded.vocab_size:
            special = [i for i in sorted(loaded.special_ids) if start <= i < end]
            yield Vocabulary(loaded.fingerprint, loaded.vocab_size, start, loaded.token_bytes[start:end], special)
            start, size = end, 0
