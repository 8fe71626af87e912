"""A Hugging Face model folder: config.json and safetensors, in one file or sharded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quartet.services.executor.models.config import ModelConfig, ModelError
from quartet.services.executor.models.hf_config import config_from_hf
from quartet.services.executor.models.parameters import EMBED_TOKENS

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Old checkpoints saved what is computed from the config.
_COMPUTED_SUFFIXES = ("rotary_emb.inv_freq",)


def read_folder_config(folder: Path) -> ModelConfig:
    return config_from_hf(_read_json(folder / "config.json"))


class SafetensorsFolder:
    """A WeightSource. Raises ModelError naming the file or tensor that is missing or of no use."""

    def __init__(self, folder: Path) -> None:
        self.config = read_folder_config(folder)
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in _weight_files(folder):
            self._add(path)
        if EMBED_TOKENS not in self._files:
            raise ModelError(f"{folder}: tensor {EMBED_TOKENS} is missing")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def default_dtype(self) -> torch.dtype:
        name = self.config.dtype
        if name is None:
            return _DTYPES[self._files[EMBED_TOKENS].get_slice(EMBED_TOKENS).get_dtype()]
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ModelError(f"config.json: dtype {name!r} is not supported")
        return dtype

    def display_name(self, name: str) -> str:
        return name

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        # A copy: the file is mapped, and may be replaced while the model serves.
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor.to(dtype, copy=True)

    def read_q4_1(self, name: str) -> torch.Tensor | None:
        return None

    def _add(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: not a readable safetensors file ({error})") from error
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if name.endswith(_COMPUTED_SUFFIXES):
                continue
            if name in self._files:
                raise ModelError(f"{path}: tensor {name} is in another file of the model too")
            entry = file.get_slice(name)
            if entry.get_dtype() not in _DTYPES:
                raise ModelError(f"{path}: tensor {name} has dtype {entry.get_dtype()}, which is not supported")
            self._files[name] = file
            self._shapes[name] = tuple(entry.get_shape())


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).exists():
        weight_map = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / _INDEX}: weight_map is missing")
        files = [folder / name for name in sorted({str(name) for name in weight_map.values()})]
        for file in files:
            if file.parent != folder or not file.is_file():
                raise ModelError(f"{folder / _INDEX} names {file.name}, which is not in the folder")
        return files
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise ModelError(f"{folder}: {pickled[0]} is a pickle, which is never loaded: convert it to safetensors")
    raise ModelError(f"{folder}: no safetensors file")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value
