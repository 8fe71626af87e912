"""Tokenizers in a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quartet.services.tokenizer.detokenizer import decode
from quartet.services.tokenizer.loaded import LoadedTokenizer, TokenizerError
from quartet.services.tokenizer.loaders import load_tokenizer


@pytest.fixture
def folder(tiny: LoadedTokenizer, tmp_path: Path) -> Callable[..., Path]:
    def make(tokenizer: Tokenizer | None = None, **files: Any) -> Path:
        (tokenizer or tiny.tokenizer).save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return make


CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "T"}


def test_a_folder_is_the_tokenizer_it_was_saved_from(tiny: LoadedTokenizer, folder: Callable[..., Path]) -> None:
    loaded = load_tokenizer(folder(tokenizer_config=CONFIG))
    assert loaded.token_bytes == tiny.token_bytes and loaded.special_ids == {0, 1}
    assert (loaded.bos_token_id, loaded.eos_token_ids, loaded.add_bos) == (0, [1], False)
    assert loaded.chat_template == "T"
    assert loaded.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    text = "the \N{GRINNING FACE}<tool>"
    assert decode(loaded, loaded.encode(text, True), True) == text


def test_eos_is_generation_configs_before_configs(folder: Callable[..., Path]) -> None:
    path = folder(config={"eos_token_id": 5}, tokenizer_config={})
    assert load_tokenizer(path).eos_token_ids == [5]
    path = folder(generation_config={"eos_token_id": [7, 9]}, tokenizer_config=CONFIG)
    assert load_tokenizer(path).eos_token_ids == [1, 7, 9]
    path = folder(generation_config={}, config={"text_config": {"eos_token_id": 6}}, tokenizer_config={})
    assert load_tokenizer(path).eos_token_ids == [6]


def test_bos_is_added_as_the_post_processor_does_unless_the_config_says(
    tiny: LoadedTokenizer, folder: Callable[..., Path]
) -> None:
    tokenizer = Tokenizer.from_str(tiny.tokenizer.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    loaded = load_tokenizer(folder(tokenizer, tokenizer_config=CONFIG))
    assert loaded.add_bos
    assert loaded.encode("a", True) == [0, *loaded.encode("a", False)]
    assert loaded.encode("", True) == [0]
    assert not load_tokenizer(folder(tokenizer, tokenizer_config=CONFIG | {"add_bos_token": False})).add_bos
    assert load_tokenizer(folder(tokenizer_config=CONFIG | {"add_bos_token": True})).add_bos


def test_a_text_with_its_own_bos_gets_no_second(folder: Callable[..., Path]) -> None:
    loaded = load_tokenizer(folder(tokenizer_config=CONFIG | {"add_bos_token": True}))
    assert loaded.encode("<s>a", True) == loaded.encode("a", True)


def test_a_truncating_tokenizer_is_not_let_to(tiny: LoadedTokenizer, folder: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_str(tiny.tokenizer.to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    assert len(load_tokenizer(folder(tokenizer)).encode("x" * 10, False)) == 10


def test_the_template_may_be_in_three_places(folder: Callable[..., Path]) -> None:
    named = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]
    path = folder(tokenizer_config={"chat_template": named})
    assert load_tokenizer(path).chat_template == "D"
    path = folder(tokenizer_config={}, chat_template={"chat_template": "J"})
    assert load_tokenizer(path).chat_template == "J"
    (path / "chat_template.jinja").write_text("F")
    assert load_tokenizer(path).chat_template == "F"


def test_no_template_is_none(folder: Callable[..., Path]) -> None:
    assert load_tokenizer(folder()).chat_template is None


def test_a_sentencepiece_folder_decodes_as_the_library_does(folder: Callable[..., Path]) -> None:
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    for piece in ("▁", "a", "b", "▁a", "▁ab"):
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    loaded = load_tokenizer(folder(tokenizer))
    for text in ("ab a  b", "龜ab", "", "\N{GRINNING FACE}"):
        ids = loaded.encode(text, False)
        assert decode(loaded, ids, True) == text == tokenizer.decode(ids)
    assert loaded.max_bytes_per_token == len(b"<unk>")


def test_how_short_a_text_must_be_is_known_or_not_claimed(folder: Callable[..., Path], tiny: LoadedTokenizer) -> None:
    assert tiny.max_bytes_per_token == len("<tool>")
    tokenizer = Tokenizer.from_str(tiny.tokenizer.to_str())
    tokenizer.normalizer = normalizers.NFC()
    assert load_tokenizer(folder(tokenizer)).max_bytes_per_token == 4 * len("<tool>")
    tokenizer.normalizer = normalizers.Strip()
    assert load_tokenizer(folder(tokenizer)).max_bytes_per_token is None


def test_what_cannot_be_loaded_says_why(folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(TokenizerError, match="convert"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    wordpiece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        load_tokenizer(folder(wordpiece))
    path = folder()
    (path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="tokenizer_config"):
        load_tokenizer(path)


def test_fingerprint_follows_what_defines_the_ids(folder: Callable[..., Path], tiny: LoadedTokenizer) -> None:
    one = load_tokenizer(folder(tokenizer_config=CONFIG)).fingerprint
    assert one == load_tokenizer(folder(tokenizer_config=CONFIG | {"chat_template": "other"})).fingerprint
    assert one != load_tokenizer(folder(tokenizer_config=CONFIG | {"add_bos_token": True})).fingerprint
