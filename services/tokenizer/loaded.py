"""What the rest of the service knows of a model's tokenizer."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD_BOUNDARY = "▁"
# A normalizer that composes characters makes text shorter, by less than this factor.
_COMPOSING = {"NFC": 4, "NFKC": 4}


class TokenizerError(ValueError):
    """The model's tokenizer cannot be loaded or used; the message says why."""


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer and its facts.

    `token_bytes[id]` are the bytes that the token stands for in running text (b"" for a hole).
    `special_ids` are left out of text on skip_special_tokens. `strip_leading_space`: the encoder puts
    a space before a text, so decoding a whole text takes it away. `max_bytes_per_token`: no text of
    more than n times this has n tokens or fewer; None when there is no such bound. `special_tokens`
    are a chat template's variables (bos_token, ...).
    """

    tokenizer: Tokenizer
    token_bytes: list[bytes]
    bos_token_id: int | None
    eos_token_ids: list[int]
    add_bos: bool
    special_ids: frozenset[int]
    strip_leading_space: bool
    max_bytes_per_token: int | None
    chat_template: str | None
    special_tokens: dict[str, str]
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of `text`; special tokens written in it count as such. Releases the GIL while it works."""
        # The fast form leaves out offsets, which nobody here reads.
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        # A text that brings its own BOS gets no second one.
        if add_special_tokens and self.add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def bytes_of(self, token_id: int) -> bytes:
        return self.token_bytes[token_id] if 0 <= token_id < len(self.token_bytes) else b""


def describe(
    tokenizer: Tokenizer,
    *,
    bos_token_id: int | None,
    eos_token_ids: Sequence[int],
    add_bos: bool,
    chat_template: str | None,
    special_tokens: dict[str, str],
    fingerprint: str,
) -> LoadedTokenizer:
    """Works out the rest of a LoadedTokenizer. Raises TokenizerError when its text cannot be streamed exactly."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    token_bytes, strip_leading_space = _token_bytes(tokenizer)
    return LoadedTokenizer(
        tokenizer=tokenizer,
        token_bytes=token_bytes,
        bos_token_id=bos_token_id,
        eos_token_ids=sorted(set(eos_token_ids)),
        add_bos=add_bos,
        special_ids=frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special),
        strip_leading_space=strip_leading_space,
        max_bytes_per_token=_max_bytes_per_token(tokenizer, token_bytes),
        chat_template=chat_template,
        special_tokens=special_tokens,
        fingerprint=fingerprint,
    )


# --- tokens as bytes ------------------------------------------------------------------------------


def _token_bytes(tokenizer: Tokenizer) -> tuple[list[bytes], bool]:
    steps = _steps(tokenizer.decoder, "decoders")
    kinds = {step["type"] for step in steps}
    added = tokenizer.get_added_tokens_decoder()
    pieces = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(pieces.values(), default=-1) + 1)

    if "ByteLevel" in kinds:
        for piece, token_id in pieces.items():
            table[token_id] = piece.encode() if token_id in added else _byte_level_bytes(piece)
        return table, False

    replaces_boundary = any(step["type"] == "Replace" and step["content"] == " " for step in steps)
    metaspace = next((step for step in steps if step["type"] == "Metaspace"), None)
    if not (replaces_boundary or metaspace or "ByteFallback" in kinds):
        raise TokenizerError(f"its decoder ({', '.join(sorted(kinds)) or 'none'}) is not one that can be streamed")
    byte_fallback = "ByteFallback" in kinds
    boundary = metaspace["replacement"] if metaspace else WORD_BOUNDARY
    for piece, token_id in pieces.items():
        byte = _BYTE_TOKEN.fullmatch(piece) if byte_fallback else None
        table[token_id] = bytes([int(byte[1], 16)]) if byte else piece.replace(boundary, " ").encode()
    strips = any(step["type"] == "Strip" and step["start"] > 0 for step in steps)
    return table, strips or (metaspace is not None and metaspace.get("prepend_scheme", "always") != "never")


def _steps(component: Any, list_name: str) -> list[dict[str, Any]]:
    """The parts of a tokenizers component, sequences laid flat."""
    if component is None:
        return []
    steps = [json.loads(component.__getstate__())]
    while any(step["type"] == "Sequence" for step in steps):
        steps = [inner for s in steps for inner in (s[list_name] if s["type"] == "Sequence" else [s])]
    return steps


@functools.cache
def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _byte_level_bytes(piece: str) -> bytes:
    alphabet = byte_level_alphabet()
    try:
        return bytes([alphabet[char] for char in piece])
    except KeyError:  # a piece outside the alphabet stands for itself
        return piece.encode()


def _max_bytes_per_token(tokenizer: Tokenizer, token_bytes: list[bytes]) -> int | None:
    factor = 1
    for step in _steps(tokenizer.normalizer, "normalizers"):
        if step["type"] in _COMPOSING:
            factor *= _COMPOSING[step["type"]]
        elif step["type"] not in ("Prepend", "Replace"):
            return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    # Any number of unknown characters may become one token, unless every byte has its own.
    has_all_bytes = all(tokenizer.token_to_id(piece) is not None for piece in byte_level_alphabet())
    if getattr(tokenizer.model, "unk_token", None) and not getattr(tokenizer.model, "byte_fallback", False):
        return factor * max(map(len, token_bytes), default=1) if has_all_bytes else None
    return factor * max(map(len, token_bytes), default=1)
