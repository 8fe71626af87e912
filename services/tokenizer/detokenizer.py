"""Token ids to text, a few at a time.

Tokens stand for bytes and characters may be spread over several of them in any way, so the bytes go
through an incremental UTF-8 decoder: it holds back at most the three bytes of an unfinished
character. However the ids are cut into calls, the texts joined are the same.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from quartet.services.tokenizer.loaded import LoadedTokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of running output: a leading space is kept, ids outside the vocabulary have no text. Of special tokens
    that are skipped, `kept` are not."""

    def __init__(
        self, loaded: LoadedTokenizer, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()
    ) -> None:
        self._bytes = loaded.token_bytes
        self._skipped = loaded.special_ids - kept if skip_special_tokens else frozenset[int]()
        self._decoder = _new_decoder("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        table, skipped = self._bytes, self._skipped
        size = len(table)
        return self._decoder.decode(b"".join([table[i] for i in token_ids if 0 <= i < size and i not in skipped]))

    def finish(self) -> str:
        """What is left: one U+FFFD for the bytes of a character that never came to its end, or nothing."""
        return self._decoder.decode(b"", final=True)


def decode(loaded: LoadedTokenizer, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text that would be encoded to these ids: without the space that the encoder puts first."""
    detokenizer = Detokenizer(loaded, skip_special_tokens)
    text = detokenizer.feed(token_ids) + detokenizer.finish()
    return text.removeprefix(" ") if loaded.strip_leading_space else text
