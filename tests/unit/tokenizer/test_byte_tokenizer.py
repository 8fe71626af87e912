"""The tokenizer whose tokens are bytes."""

from __future__ import annotations

import random
import time

import pytest

from quartet.services.tokenizer.byte_level import BOS_TOKEN_ID, EOS_TOKEN_ID, byte_tokenizer
from quartet.services.tokenizer.chat_template import ChatTemplate
from quartet.services.tokenizer.detokenizer import Detokenizer, decode
from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.shared.messages import ChatMessage, ChatPrompt


@pytest.fixture(scope="module")
def tokenizer() -> LoadedTokenizer:
    return byte_tokenizer()


@pytest.mark.parametrize("text", ["", "a", "héllo  wörld\n\n\t x ", "\N{GRINNING FACE}가龜", "\0\x7f\r\n", "'s 're"])
def test_ids_are_the_bytes(tokenizer: LoadedTokenizer, text: str) -> None:
    ids = tokenizer.encode(text, False)
    assert ids == list(text.encode())
    assert tokenizer.encode(text, True) == [BOS_TOKEN_ID, *ids]
    assert decode(tokenizer, ids, True) == text


def test_any_text_comes_back(tokenizer: LoadedTokenizer) -> None:
    r = random.Random(1)
    for _ in range(200):
        text = "".join(chr(r.choice([r.randrange(0x80), r.randrange(0xD800), 0x1F600])) for _ in range(30))
        ids = tokenizer.encode(text, False)
        assert ids == list(text.encode())
        detokenizer = Detokenizer(tokenizer)
        assert "".join(detokenizer.feed([i]) for i in ids) + detokenizer.finish() == text


def test_what_begins_and_ends_a_text(tokenizer: LoadedTokenizer) -> None:
    assert tokenizer.vocab_size == 258
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS_TOKEN_ID, [EOS_TOKEN_ID])
    assert tokenizer.encode("<|bos|>a<|eos|>", True) == [BOS_TOKEN_ID, 97, EOS_TOKEN_ID]
    assert decode(tokenizer, [BOS_TOKEN_ID, 97, EOS_TOKEN_ID], True) == "a"
    assert decode(tokenizer, [97, EOS_TOKEN_ID, 300], False) == "a<|eos|>"


def test_the_chat_template(tokenizer: LoadedTokenizer) -> None:
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    prompt = ChatPrompt([ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")])
    text = template.render(prompt)
    assert text == "<|bos|>system: Be brief.\nuser: Hi\nassistant: "
    assert tokenizer.encode(text, False)[:2] == [BOS_TOKEN_ID, ord("s")]


def test_the_fingerprint_is_its_own(tokenizer: LoadedTokenizer, smollm: LoadedTokenizer) -> None:
    assert tokenizer.fingerprint == byte_tokenizer().fingerprint != smollm.fingerprint


def test_a_long_text_without_a_blank_takes_no_longer(tokenizer: LoadedTokenizer) -> None:
    start = time.monotonic()
    assert len(tokenizer.encode("x" * 1_000_000, False)) == 1_000_000
    assert time.monotonic() - start < 30
