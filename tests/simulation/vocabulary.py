"""A tiny vocabulary: letters, pieces of words, the bytes of characters that need several, and special tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quartet.services.tokenizer.loaded import LoadedTokenizer

EOS, POISON = 2, 3
SPECIAL = {0: b"<pad>", 1: b"<s>", EOS: b"</s>", POISON: b"<poison>"}
_PIECES = [
    *(bytes([byte]) for byte in b"abcdefgh "),
    *(b"ab", b"bc", b"cab", b"de f", b"aa", b"hg"),
    *(bytes([byte]) for byte in "é龜😀".encode()),
    "é".encode(),
    "😀".encode()[:2],
    "😀".encode()[2:],
    b"a" + "龜".encode()[:1],
]
TOKEN_BYTES = [*SPECIAL.values(), *_PIECES]
VOCAB_SIZE = len(TOKEN_BYTES)
LETTERS = "abcdefgh "


def encode(text: str) -> list[int]:
    """One token a letter."""
    return [4 + LETTERS.index(char) for char in text]


class _Tokenizer:
    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        return [SimpleNamespace(ids=encode(text)) for text in texts]


LOADED = LoadedTokenizer(
    tokenizer=_Tokenizer(),  # type: ignore[arg-type]
    token_bytes=TOKEN_BYTES,
    bos_token_id=None,
    eos_token_ids=[EOS],
    add_bos=False,
    special_ids=frozenset(SPECIAL),
    strip_leading_space=False,
    max_bytes_per_token=4,
    chat_template=None,
    special_tokens={},
    fingerprint="tiny",
)


def text_of(token_ids: list[int], silent: frozenset[int], stops: list[str], min_tokens: int) -> tuple[str, int, str]:
    """The whole text of an output, the number of tokens up to a stop string's end, and that string ("" for none).

    The plain way, over all that is known at each token: the simulation's own account of what is right.
    """
    data = b""
    before = ""
    for count, token_id in enumerate(token_ids, 1):
        if token_id in silent or token_id in SPECIAL:
            continue
        data += TOKEN_BYTES[token_id]
        text = _whole(data)
        if (found := _first_stop(text, len(before), stops)) and count > min_tokens:
            return text[: found[0]], count, text[found[0] : found[0] + found[1]]
        before = text
    text = data.decode("utf-8", "replace")
    found = _first_stop(text, len(before), stops)
    if found and len(token_ids) > min_tokens:
        return text[: found[0]], len(token_ids), text[found[0] : found[0] + found[1]]
    return text, len(token_ids), ""


def _whole(data: bytes) -> str:
    """Without the bytes of a character that may go on."""
    import codecs

    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def _first_stop(text: str, known: int, stops: list[str]) -> tuple[int, int] | None:
    """(start, length) of the earliest, then shortest, stop string that ends past `known`."""
    found = []
    for stop in stops:
        start = text.find(stop, max(0, known - len(stop) + 1))
        if start >= 0:
            found.append((start, len(stop)))
    return min(found, default=None)
