"""What a checkpoint, of whatever format, gives to the loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from quartet.services.executor.models.config import ModelConfig


class WeightSource(Protocol):
    @property
    def config(self) -> ModelConfig: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """All tensors by Hugging Face name. One that has no such name goes by its own."""
        ...

    @property
    def default_dtype(self) -> torch.dtype:
        """What "auto" stands for."""
        ...

    def display_name(self, name: str) -> str:
        """The tensor's name in the file, for messages."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor on the CPU that owns its memory."""
        ...

    def read_q4_1(self, name: str) -> torch.Tensor | None:
        """A matrix as GGML's Q4_1 blocks [rows, columns / 32 * 20] uint8 where the checkpoint holds it so."""
        ...
