"""Finds a model's tokenizer: in a Hugging Face folder or in a GGUF file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quartet.services.tokenizer.gguf_vocab import load_gguf
from quartet.services.tokenizer.loaded import LoadedTokenizer, TokenizerError, describe

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def load_tokenizer(path: Path) -> LoadedTokenizer:
    """`path` is a .gguf file, or a folder with tokenizer.json or a .gguf file. Raises TokenizerError."""
    if path.is_file():
        return load_gguf(path)
    if (path / "tokenizer.json").is_file():
        return load_folder(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return load_gguf(files[0])
    hint = "; convert tokenizer.model with transformers first" if (path / "tokenizer.model").is_file() else ""
    raise TokenizerError(f"{path} has no tokenizer.json{hint}")


def load_folder(path: Path) -> LoadedTokenizer:
    """Raises TokenizerError when a file is broken or the tokenizer cannot be streamed exactly."""
    content = (path / "tokenizer.json").read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"{path / 'tokenizer.json'}: {error}") from error
    config = _json(path / "tokenizer_config.json")
    special_tokens = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))}
    bos = tokenizer.token_to_id(special_tokens["bos_token"]) if "bos_token" in special_tokens else None

    prefix = tokenizer.encode("").ids  # what its post-processor puts around nothing
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, bool):
        add_bos = prefix[:1] == [bos] if bos is not None else False
    ends = _eos_token_ids(path, tokenizer, special_tokens)
    try:
        return describe(
            tokenizer,
            bos_token_id=bos,
            eos_token_ids=ends,
            add_bos=add_bos and bos is not None,
            chat_template=_chat_template(path, config),
            special_tokens=special_tokens,
            fingerprint=hashlib.sha256(content + json.dumps([bos, sorted(set(ends)), add_bos]).encode()).hexdigest(),
        )
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_token_ids(path: Path, tokenizer: Tokenizer, special_tokens: dict[str, str]) -> list[int]:
    """What ends generation: as transformers has it (generation_config, else config), and the tokenizer's own."""
    ends: list[int] = []
    for name in ("generation_config.json", "config.json"):
        config = _json(path / name)
        value = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        if value is not None:
            ends = value if isinstance(value, list) else [value]
            break
    own = tokenizer.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return [i for i in [*ends, own] if isinstance(i, int) and 0 <= i < size]


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = config.get("chat_template") or _json(path / "chat_template.json").get("chat_template")
    if isinstance(value, list):  # several named ones
        named = {item["name"]: item["template"] for item in value if isinstance(item, dict) and "template" in item}
        value = named.get("default")
    return value if isinstance(value, str) and value else None
