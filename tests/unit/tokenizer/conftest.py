"""Two tokenizers: SmolLM2's own, and a tiny byte-level one whose ids are easy to write down."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quartet.services.tokenizer.loaded import LoadedTokenizer, byte_level_alphabet, describe
from quartet.services.tokenizer.loaders import load_tokenizer
from quartet.shared.messages import ModelInfo
from quartet.shared.model_files import resolve_model

BOS, EOS = 0, 1
FIRST_BYTE = 3
WORDS = ["th", "the", "DE", "DEF", "ab", "abc", "\N{GRINNING FACE}"]


@pytest.fixture(scope="session")
def smollm() -> LoadedTokenizer:
    return load_tokenizer(resolve_model("smollm2-135m-instruct").path)


def make_tiny(
    eos_token_ids: tuple[int, ...] = (EOS,), add_bos: bool = False, chat_template: str | None = None
) -> LoadedTokenizer:
    """Ids 0 <s>, 1 </s>, 2 <tool>; 3 + b is byte b; then merged pieces."""
    stand_in = {byte: char for char, byte in byte_level_alphabet().items()}
    vocab = {"<s>": 0, "</s>": 1, "<tool>": 2} | {stand_in[byte]: FIRST_BYTE + byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        data = word.encode()
        for end in range(2, len(data) + 1):
            left, right = "".join(stand_in[b] for b in data[: end - 1]), stand_in[data[end - 1]]
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return describe(
        tokenizer,
        bos_token_id=BOS,
        eos_token_ids=eos_token_ids,
        add_bos=add_bos,
        chat_template=chat_template,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        fingerprint="tiny",
    )


@pytest.fixture(scope="session")
def tiny() -> LoadedTokenizer:
    return make_tiny()


@pytest.fixture(scope="session")
def tiny_factory() -> Callable[..., LoadedTokenizer]:
    return make_tiny


@pytest.fixture(scope="session")
def model_info() -> Callable[..., ModelInfo]:
    def make(vocab_size: int = 1000, max_model_len: int = 128) -> ModelInfo:
        return ModelInfo("m", "f", vocab_size, max_model_len, 64, 16, 8, 256, "float32", "cpu")

    return make
