"""From a path to a decoder: every parameter set exactly once, or a refusal that names the tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from quartet.services.executor.models.config import ModelConfig, ModelError
from quartet.services.executor.models.decoder import Decoder, LoadParameter
from quartet.services.executor.models.parameters import EMBED_TOKENS, LM_HEAD, parameter_shapes
from quartet.services.executor.weights.gguf_file import GGUFFile
from quartet.services.executor.weights.safetensors_folder import SafetensorsFolder, read_folder_config
from quartet.services.executor.weights.source import WeightSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[int, int], None]
Built = TypeVar("Built")


def load_config(path: Path) -> ModelConfig:
    """`path` is a .gguf file or a model folder. Raises ModelError (a ValueError)."""
    if path.is_dir():
        return read_folder_config(path)
    return _open(path).config


def load_decoder(path: Path, dtype: str = "auto", device: str = "cpu", progress: Progress | None = None) -> Decoder:
    """The plain decoder of a model; see load_with."""
    return load_with(Decoder, path, dtype, device, progress)


def load_with(
    build: Callable[[ModelConfig, LoadParameter], Built],
    path: Path,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
) -> Built:
    """Reads, checks and converts the weights tensor by tensor, each when `build` asks for it.

    dtype is "auto" (what the model was saved for; bfloat16 for GGUF) or one of DTYPES. `progress` is
    called with (parameters loaded, parameters in all) after each. Raises ModelError (a ValueError).
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported (known: auto, {', '.join(DTYPES)})")
    source = _open(path)
    target = source.default_dtype if dtype == "auto" else DTYPES[dtype]
    if target not in DTYPES.values():
        raise ModelError(f"the model's own dtype {target} is not supported: choose one of {', '.join(DTYPES)}")

    config = source.config
    _check_names_and_shapes(config, source)
    if config.tie_word_embeddings and LM_HEAD in source.shapes and not _same_head(source):
        # The file's own head wins over a stale flag.
        config = replace(config, tie_word_embeddings=False)
    pending = set(parameter_shapes(config))
    total = len(pending)

    def load(name: str) -> torch.Tensor:
        pending.remove(name)
        parameter = source.read(name, target).to(device)
        if progress is not None:
            progress(total - len(pending), total)
        return parameter

    decoder = build(config, load)
    if pending:
        raise AssertionError(f"the decoder left parameters unset: {sorted(pending)}")
    return decoder


def _open(path: Path) -> WeightSource:
    if path.is_dir():
        return SafetensorsFolder(path)
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is neither a .gguf file nor a model folder")
    return GGUFFile(path)


def _check_names_and_shapes(config: ModelConfig, source: WeightSource) -> None:
    expected = parameter_shapes(config)
    found = source.shapes
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(f"tensor {source.display_name(missing[0])} is missing{_and_more(missing)}")
    optional = {LM_HEAD: expected[EMBED_TOKENS]} | expected
    unexpected = [name for name in found if name not in optional]
    if unexpected:
        raise ModelError(
            f"tensor {source.display_name(unexpected[0])} has no place in {config.architecture}{_and_more(unexpected)}"
        )
    for name, shape in found.items():
        if shape != optional[name]:
            tensor = source.display_name(name)
            raise ModelError(f"tensor {tensor} has shape {list(shape)}, the config calls for {list(optional[name])}")


def _same_head(source: WeightSource) -> bool:
    return torch.equal(source.read(LM_HEAD, torch.float32), source.read(EMBED_TOKENS, torch.float32))


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
