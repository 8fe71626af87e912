"""From a path to a decoder: every parameter set exactly once, or a refusal that names the tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from quartet.services.executor.dtypes import DTYPES
from quartet.services.executor.models.config import ModelConfig, ModelError
from quartet.services.executor.models.decoder import Decoder
from quartet.services.executor.models.parameters import EMBED_TOKENS, LM_HEAD, parameter_shapes
from quartet.services.executor.weights.gguf_file import GGUFFile
from quartet.services.executor.weights.safetensors_folder import SafetensorsFolder, read_folder_config
from quartet.services.executor.weights.source import WeightSource

Progress = Callable[[int, int], None]
Built = TypeVar("Built")


class Parameters:
    """Gives each parameter once, by calling it with the name or in the checkpoint's own 4 bits."""

    def __init__(
        self, source: WeightSource, names: set[str], dtype: torch.dtype, device: str, progress: Progress | None
    ) -> None:
        self.pending = names
        self._source = source
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._total = len(names)

    def __call__(self, name: str) -> torch.Tensor:
        return self._taken(name, self._source.read(name, self._dtype).to(self._device))

    def q4_1(self, name: str) -> torch.Tensor | None:
        """See WeightSource.read_q4_1; None leaves the parameter to be asked for otherwise."""
        blocks = self._source.read_q4_1(name)
        return None if blocks is None else self._taken(name, blocks)

    def _taken(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        self.pending.remove(name)
        if self._progress is not None:
            self._progress(self._total - len(self.pending), self._total)
        return parameter


def load_config(path: Path) -> ModelConfig:
    """`path` is a .gguf file or a model folder. Raises ModelError (a ValueError)."""
    if path.is_dir():
        return read_folder_config(path)
    return _open(path).config


def is_q4_1(path: Path) -> bool:
    """Whether the checkpoint holds its layers' matrices in GGML's Q4_1."""
    source = _open(path)
    return source.read_q4_1("model.layers.0.mlp.down_proj.weight") is not None


def load_decoder(path: Path, dtype: str = "auto", device: str = "cpu", progress: Progress | None = None) -> Decoder:
    """The plain decoder of a model; see load_with."""
    return load_with(Decoder, path, dtype, device, progress)


def load_with(
    build: Callable[[ModelConfig, Parameters], Built],
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
    parameters = Parameters(source, set(parameter_shapes(config)), target, device, progress)
    decoder = build(config, parameters)
    if parameters.pending:
        raise AssertionError(f"the decoder left parameters unset: {sorted(parameters.pending)}")
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
