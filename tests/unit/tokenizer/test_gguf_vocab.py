"""Tokenizers rebuilt from GGUF metadata, against the libraries that made the vocabularies."""

from __future__ import annotations

import io
import os
import random
import warnings
from pathlib import Path

import gguf
import pytest
import sentencepiece
from tokenizers import Tokenizer, pre_tokenizers

from quartet.services.tokenizer import gguf_vocab
from quartet.services.tokenizer.detokenizer import Detokenizer, decode
from quartet.services.tokenizer.gguf_metadata import read_metadata
from quartet.services.tokenizer.gguf_vocab import load_gguf
from quartet.services.tokenizer.loaded import LoadedTokenizer, TokenizerError, byte_level_alphabet
from quartet.shared.model_files import resolve_model

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   three\t\ttabs \n\n\n newlines\r\n",
    "I'm, you're, WE'LL, it'S 'd 've",
    "1 12 123 1234 12345.678 3rd x2y 2024-11-29 ½ Ⅷ ٣٤",
    "def f(x):\n    return x ** 2  # comment\n",
    "naïve café — “quotes” … \u00a0nbsp",
    "日本語 中文 한국어 العربية हिन्दी ไทย",
    "\N{GRINNING FACE} \N{REGIONAL INDICATOR SYMBOL LETTER D}\N{REGIONAL INDICATOR SYMBOL LETTER E} 👨‍👩‍👧 龜 가",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|> <|endoftext|>x<|not_special|>",
    "a" * 300 + " " * 70 + "\n" * 9,
    "e\u0301 vs \u00e9, \ufb01ligature",
]
# Without the sign that SentencePiece takes for a space.
PROSE = (Path(gguf_vocab.__file__).read_text() + Path(__file__).read_text()).replace("\u2581", "_")


def test_smollm_has_the_known_facts(smollm: LoadedTokenizer) -> None:
    assert smollm.vocab_size == 49152
    assert smollm.encode("\N{GRINNING FACE}", False) == [10813, 242, 218]
    assert smollm.encode("DEF", False) == [33203]
    assert smollm.encode("<|im_end|>", False) == [2]
    assert smollm.encode("", True) == []
    assert smollm.eos_token_ids == [2]
    for n in (1, 2, 15, 16, 17, 200):
        assert len(smollm.encode("one" + " one" * (n - 1), True)) == n
    for token_id in (111, 112, 113):
        assert decode(smollm, [token_id], False) == "\ufffd"


def test_smollm_agrees_with_transformers(smollm: LoadedTokenizer) -> None:
    path = resolve_model("smollm2-135m-instruct").path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # Its conversion leaves out the step of the model's own tokenizer.json that cuts digits apart.
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    rng = random.Random(1)
    pieces = [PROSE[i : i + rng.randrange(1, 200)] for i in (rng.randrange(len(PROSE)) for _ in range(300))]
    for text in [*TEXTS, *pieces]:
        ids = smollm.encode(text, False)
        assert ids == reference(text, add_special_tokens=False)["input_ids"], text
        assert decode(smollm, ids, False) == reference.decode(ids, skip_special_tokens=False), text


def test_smollm_cuts_digits_apart(smollm: LoadedTokenizer) -> None:
    assert [smollm.bytes_of(i) for i in smollm.encode("x 2024", False)] == [b"x", b" ", b"2", b"0", b"2", b"4"]


def test_token_bytes_are_what_the_library_decodes(smollm: LoadedTokenizer) -> None:
    for token_id in range(smollm.vocab_size):
        text = smollm.tokenizer.decode([token_id], skip_special_tokens=False)
        assert smollm.bytes_of(token_id).decode(errors="replace") == text


# --- SentencePiece --------------------------------------------------------------------------------


def sentencepiece_metadata(
    add_space_prefix: bool, user_defined: list[str]
) -> tuple[sentencepiece.SentencePieceProcessor, dict[str, object]]:
    """A trained BPE model, and its vocabulary as llama.cpp's converter writes it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in PROSE.split("\n") if line.strip()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        user_defined_symbols=[text.replace(" ", "▁") for text in user_defined],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_space_prefix,
        character_coverage=0.99,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokens, types, scores = [], [], []
    own = {text.replace(" ", "▁"): text for text in user_defined}
    for i in range(processor.vocab_size()):
        piece = processor.id_to_piece(i)
        types.append(
            2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i)
            else 4 if piece in own else 1
        )  # fmt: skip
        tokens.append(own.get(piece, piece))
        scores.append(-1000.0 if piece in own else processor.get_score(i))
    ggml = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": add_space_prefix,
    }
    return processor, {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}


@pytest.mark.parametrize(
    ("add_space_prefix", "user_defined"),
    [(True, []), (False, ["\n\n", "  ", "   ", "    ", "<table>"])],
    ids=["llama", "gemma"],
)
def test_sentencepiece_vocabularies_encode_as_the_original(add_space_prefix: bool, user_defined: list[str]) -> None:
    processor, metadata = sentencepiece_metadata(add_space_prefix, user_defined)
    loaded = gguf_vocab._build(metadata)
    assert loaded.add_bos and loaded.bos_token_id == 1 and loaded.eos_token_ids == [2]
    assert loaded.strip_leading_space == add_space_prefix
    rng = random.Random(0)
    odd = [" ", "  ", "     ", "\n", "\n\n", "<table>", "龜", "\N{GRINNING FACE}", "é", "\t"]
    for _ in range(600):
        at = rng.randrange(len(PROSE))
        chars = list(PROSE[at : at + rng.randrange(60)])
        for _ in range(rng.randrange(5)):
            chars.insert(rng.randrange(len(chars) + 1), rng.choice(odd))
        text = "".join(chars)
        ids = loaded.encode(text, False)
        assert ids == processor.encode(text), text
        assert decode(loaded, ids, True) == text
    assert loaded.encode("", False) == []
    assert loaded.encode("hi", True) == [1, *loaded.encode("hi", False)]


def test_running_text_keeps_a_leading_space_and_joins_byte_tokens() -> None:
    _, metadata = sentencepiece_metadata(True, [])
    loaded = gguf_vocab._build(metadata)
    ids = loaded.encode("龜 the", False)
    assert all(len(loaded.bytes_of(i)) == 1 for i in ids[1:4])
    assert decode(loaded, ids, True) == "龜 the"
    detokenizer = Detokenizer(loaded)
    assert [detokenizer.feed([i]) for i in ids[:4]] == [" ", "", "", "龜"]


def test_gemma_ends_a_turn_without_being_told_which_token_does() -> None:
    _, metadata = sentencepiece_metadata(False, ["<end_of_turn>"])
    at = metadata["tokenizer.ggml.tokens"].index("<end_of_turn>")  # type: ignore[attr-defined]
    metadata["tokenizer.ggml.token_type"][at] = 3  # type: ignore[index]
    assert gguf_vocab._build(metadata).eos_token_ids == sorted([2, at])


# --- pre-tokenizers -------------------------------------------------------------------------------


def byte_level(pre_tokenizer: str | None, **extra: object) -> LoadedTokenizer:
    tokens = [*byte_level_alphabet(), "<|x|>", "<y>"]
    ggml = {"model": "gpt2", "tokens": tokens, "token_type": [1] * 256 + [3, 4], "merges": [], **extra}
    if pre_tokenizer is not None:
        ggml.setdefault("pre", pre_tokenizer)
    return gguf_vocab._build({f"tokenizer.ggml.{key}": value for key, value in ggml.items()})


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", " o", "'", "CLOCK", "!!", "\n\n", " x"]),
        ("gpt-2", ["It", "'s", " 1234", " o", "'", "CLOCK", "!!", "\n\n", " x"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " o", "'CLOCK", "!!\n\n", " x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " o", "'CLOCK", "!!\n\n", " x"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", " o", "'CLOCK", "!!\n\n", " x"]),
        ("default", ["It", "'", "s", " ", "123", "4", " o", "'", "CLOCK", "!!", "\n\n", " x"]),
    ],
)
def test_pre_tokenizers_cut_words_as_the_models_do(pre: str, expected: list[str]) -> None:
    assert words(byte_level(pre).tokenizer, "It's 1234 o'CLOCK!!\n\n x") == expected


def test_without_a_name_the_pre_tokenizer_is_the_default() -> None:
    assert words(byte_level(None).tokenizer, "a-1234") == words(byte_level("default").tokenizer, "a-1234")


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    loaded = byte_level("gpt-2")
    ids = loaded.encode("a<|x|><y>b", False)
    assert ids[1:3] == [256, 257]
    assert decode(loaded, ids, True) == "a<y>b"
    assert decode(loaded, ids, False) == "a<|x|><y>b"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pre": "mystery"}, "'mystery'.*smollm"),
        ({"model": "t5"}, "'t5'"),
        ({"merges": ["a zz"]}, "a zz"),
        ({"tokens": []}, "no vocabulary"),
        ({"token_type": [1]}, "258 tokens but 1"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "tokens 0 and 2 are the same"),
        ({"model": "llama"}, "scores"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        byte_level("gpt-2", **change)


# --- the file -------------------------------------------------------------------------------------


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_level_alphabet(), "<|x|>"])
    writer.add_token_types([1] * 256 + [3])
    writer.add_token_merges([])
    writer.add_eos_token_id(256)
    writer.add_float32("a.float", 0.5)
    writer.add_array("a.nested", [1.5, 2.5])
    writer.add_bool("a.bool", True)
    writer.add_int64("a.negative", -7)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_is_what_was_written(small_file: Path) -> None:
    metadata = read_metadata(small_file)
    assert metadata["a.float"] == 0.5 and metadata["a.nested"] == [1.5, 2.5]
    assert metadata["a.bool"] is True and metadata["a.negative"] == -7
    assert metadata["tokenizer.ggml.tokens"][-1] == "<|x|>"
    loaded = load_gguf(small_file)
    assert loaded.eos_token_ids == [256] and loaded.chat_template == "{{ messages }}" and not loaded.add_bos


def test_fingerprint_follows_the_vocabulary(small_file: Path) -> None:
    one = byte_level("gpt-2")
    assert one.fingerprint == byte_level("gpt-2").fingerprint
    assert one.fingerprint != byte_level("qwen2").fingerprint
    assert one.fingerprint != byte_level("gpt-2", eos_token_id=256).fingerprint


def test_a_broken_file_is_refused_with_its_name(small_file: Path, tmp_path: Path) -> None:
    data = small_file.read_bytes()
    for cut in (0, 3, 10, 60, len(data) // 2):
        small_file.write_bytes(data[:cut])
        with pytest.raises(TokenizerError, match=r"small\.gguf"):
            load_gguf(small_file)
    small_file.write_bytes(data[:24] + b"\xff" * 8 + data[32:])  # a key of absurd length
    with pytest.raises(TokenizerError, match="ends within"):
        load_gguf(small_file)
    with pytest.raises(TokenizerError, match="nowhere"):
        load_gguf(tmp_path / "nowhere.gguf")


def test_loading_is_fast_enough_to_restart_during_a_stream() -> None:
    start = os.times().user
    load_gguf(resolve_model("smollm2-135m-instruct").path)
    assert os.times().user - start < 2.0
