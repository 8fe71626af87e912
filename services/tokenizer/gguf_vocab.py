"""Rebuilds a Hugging Face tokenizer from the tokenizer.ggml.* metadata of a GGUF file."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quartet.services.tokenizer.gguf_metadata import read_metadata
from quartet.services.tokenizer.loaded import WORD_BOUNDARY, LoadedTokenizer, TokenizerError, describe

_PREFIX = "tokenizer.ggml."
# Files that do not name their end-of-turn token have it under one of these texts.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")


class TokenType(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Split(NamedTuple):
    """How text is cut into words before byte-level BPE: regexes in turn, each cutting what the last left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
_QWEN2 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SINGLE_DIGITS = _Split((r"\p{N}", _GPT2))
_SPLITS = {
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "roberta-bpe"), _Split((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _Split((_LLAMA3,), True, True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Split((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Split((_QWEN2,), nfc=True)),
    "stablelm2": _Split((_QWEN2,)),
    "tekken": _Split((_TEKKEN,), True, True),
}


def load_gguf(path: Path) -> LoadedTokenizer:
    """Raises TokenizerError, with what is not supported, when the file's tokenizer cannot be rebuilt exactly."""
    try:
        metadata = read_metadata(path)
        return _build(metadata)
    except (OSError, ValueError) as error:
        message = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise TokenizerError(message) from error


def _build(metadata: dict[str, Any]) -> LoadedTokenizer:
    ggml = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    model = ggml.get("model")
    tokens: list[str] = ggml.get("tokens", [])
    if not tokens:
        raise TokenizerError("the file has no vocabulary (tokenizer.ggml.tokens)")
    types: list[int] = ggml.get("token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise TokenizerError(f"{len(tokens)} tokens but {len(types)} token types")

    if model == "gpt2":
        tokenizer, add_bos = _byte_level_bpe(ggml, tokens)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece_bpe(ggml, tokens, types), True
    else:
        raise TokenizerError(f"tokenizer.ggml.model {model!r} is not supported (gpt2 and llama are)")
    special = {TokenType.CONTROL, TokenType.UNKNOWN}
    tokenizer.add_special_tokens(
        [
            AddedToken(t, normalized=False, special=True)
            for t, kind in zip(tokens, types, strict=True)
            if kind in special
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(t, normalized=False)
            for t, kind in zip(tokens, types, strict=True)
            if kind == TokenType.USER_DEFINED
        ]
    )

    def token_id(name: str) -> int | None:
        value = ggml.get(f"{name}_token_id")
        return int(value) if value is not None and 0 <= value < len(tokens) else None

    bos = token_id("bos")
    ends = [i for i in map(token_id, ("eos", "eot", "eom")) if i is not None]
    if token_id("eot") is None:
        ends += [i for t in _END_OF_TURN if (i := tokenizer.token_to_id(t)) is not None and types[i] in special]
    names = {
        "bos_token": bos,
        "eos_token": token_id("eos"),
        "unk_token": token_id("unknown"),
        "pad_token": token_id("padding"),
    }
    template = metadata.get("tokenizer.chat_template")
    return describe(
        tokenizer,
        bos_token_id=bos,
        eos_token_ids=ends,
        add_bos=bool(ggml.get("add_bos_token", add_bos)) and bos is not None,
        chat_template=template if isinstance(template, str) and template else None,
        special_tokens={name: tokens[i] for name, i in names.items() if i is not None},
        fingerprint=_fingerprint(ggml),
    )


def _fingerprint(ggml: dict[str, Any]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(sorted(ggml.items()))).hexdigest()


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        token_id = next(i for i, token in enumerate(tokens) if vocab[token] != i)
        raise TokenizerError(f"the tokens {token_id} and {vocab[tokens[token_id]]} are the same: {tokens[token_id]!r}")
    return vocab


def _byte_level_bpe(ggml: dict[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    pre = ggml.get("pre", "default")
    split = _SPLITS.get(pre)
    if split is None:
        raise TokenizerError(
            f"the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported; supported: {', '.join(sorted(_SPLITS))}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in ggml.get("merges", [])]
    vocab = _vocabulary(tokens)
    for merge in merges:
        if len(merge) != 2 or not all(piece in vocab for piece in (*merge, "".join(merge))):
            raise TokenizerError(f"the merge {' '.join(merge)!r} is of pieces that are not in the vocabulary")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.ignore_merges))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _sentencepiece_bpe(ggml: dict[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    scores = ggml.get("scores")
    if not scores or len(scores) != len(tokens):
        raise TokenizerError("a vocabulary of the kind llama needs a score for each token (tokenizer.ggml.scores)")
    vocab = _vocabulary(tokens)
    has_bytes = TokenType.BYTE in types
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN), None)
    mergeable = {t: i for t, i in vocab.items() if types[i] == TokenType.NORMAL}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(mergeable, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    add_space_prefix = bool(ggml.get("add_space_prefix", True))
    prefix = [normalizers.Prepend(WORD_BOUNDARY)] if add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", WORD_BOUNDARY)])
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(WORD_BOUNDARY, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges any two neighbours whose union is a piece, the best score first; as a
    list of merges that is every way to cut each piece in two, in falling order of score."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[token_id], vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
