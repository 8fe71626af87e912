"""Streamed text is the one-shot text, and never half a character."""

from __future__ import annotations

import itertools
import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.services.tokenizer.detokenizer import Detokenizer, decode
from quartet.services.tokenizer.loaded import LoadedTokenizer

# A1: a plain emoji, rare letters, a flag, a family joined by ZWJ, a combining accent.
HARD = "\U0001f600 \u9f9c \uac00 \U0001f1e9\U0001f1ea \U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301"


def one_shot(loaded: LoadedTokenizer, ids: list[int], skip: bool) -> str:
    table, special = loaded.token_bytes, loaded.special_ids if skip else ()
    return b"".join(table[i] for i in ids if 0 <= i < len(table) and i not in special).decode(errors="replace")


def streamed(loaded: LoadedTokenizer, ids: list[int], skip: bool, cuts: list[int]) -> list[str]:
    detokenizer = Detokenizer(loaded, skip)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [detokenizer.feed(ids[a:b]) for a, b in itertools.pairwise(edges)] + [detokenizer.finish()]


def test_hard_characters_come_whole(smollm: LoadedTokenizer) -> None:
    ids = smollm.encode(HARD, False)
    parts = streamed(smollm, ids, True, list(range(len(ids))))
    assert "".join(parts) == HARD
    assert not any("\ufffd" in part for part in parts)
    assert decode(smollm, ids, True) == HARD


def test_a_token_may_bring_two_bytes_of_a_character(smollm: LoadedTokenizer) -> None:
    assert smollm.bytes_of(10813) == b"\xf0\x9f"
    assert streamed(smollm, [10813, 242, 218], True, [1, 2])[:3] == ["", "", "\N{GRINNING FACE}"]


def test_dangling_bytes_are_one_replacement_character(smollm: LoadedTokenizer) -> None:
    for ids in ([10813], [10813, 242]):
        detokenizer = Detokenizer(smollm)
        assert detokenizer.feed(ids) == ""
        assert detokenizer.finish() == "\ufffd" == decode(smollm, ids, True)


def test_special_tokens_are_skipped_or_kept(smollm: LoadedTokenizer) -> None:
    ids = smollm.encode("a<|im_end|>b", False)
    assert decode(smollm, ids, True) == "ab"
    assert decode(smollm, ids, False) == "a<|im_end|>b"


def test_ids_outside_the_vocabulary_have_no_text(smollm: LoadedTokenizer) -> None:
    assert decode(smollm, [-1, 49152, 2**31, *smollm.encode("ok", False)], False) == "ok"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_cut_anywhere_give_the_one_shot_text(smollm: LoadedTokenizer, data: st.DataObject) -> None:
    byte_like = st.integers(17, 300)  # single bytes, most of which are no characters alone
    ids = data.draw(st.lists(st.one_of(byte_like, st.integers(0, 49160)), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=10))
    skip = data.draw(st.booleans())
    parts = streamed(smollm, ids, skip, cuts)
    assert "".join(parts) == one_shot(smollm, ids, skip)
    for part in parts:
        part.encode()  # no lone surrogates: every part is a text of its own


def test_the_whole_vocabulary_at_once_and_one_by_one(smollm: LoadedTokenizer) -> None:
    ids = list(range(smollm.vocab_size))
    random.Random(3).shuffle(ids)
    parts = streamed(smollm, ids, False, list(range(len(ids))))
    assert "".join(parts) == one_shot(smollm, ids, False) == smollm.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_long_past_is_replayed_fast(smollm: LoadedTokenizer) -> None:
    ids = smollm.encode("The quick brown fox. " * 8000, False)
    start = time.process_time()
    Detokenizer(smollm).feed(ids)
    assert time.process_time() - start < 0.5
