"""Reads the key-value head of a GGUF file without touching its tensors.

The `gguf` package maps every string to a numpy view, which takes seconds for a vocabulary; a
tokenizer that restarts during a stream should not.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4


def read_metadata(path: Path) -> dict[str, Any]:
    """All metadata of the file, arrays as lists. Raises ValueError when it is not a whole GGUF head."""
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Head(data).read()
        except (struct.error, IndexError) as error:
            raise ValueError(f"{path}: the file ends within its metadata") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


class _Head:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> dict[str, Any]:
        if self._data[:4] != b"GGUF":
            raise ValueError("not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported (2 and 3 are)")
        self._scalar("Q")  # the number of tensors
        return {self._string(): self._value(self._scalar("I")) for _ in range(self._scalar("Q"))}

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        start = self._at + 8
        end = start + int.from_bytes(self._data[self._at : start], "little")
        if end > len(self._data):
            raise IndexError
        self._at = end
        return self._data[start:end].decode("utf-8", errors="replace")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > _MAX_NESTING:
            raise ValueError(f"unknown metadata type {kind}")
        item_kind, length = self._scalar("I"), self._scalar("Q")
        if length > len(self._data):
            raise IndexError
        if item_kind in _SCALARS:
            form = f"<{length}{_SCALARS[item_kind]}"
            values = list(struct.unpack_from(form, self._data, self._at))
            self._at += struct.calcsize(form)
            return values
        if item_kind == _STRING:
            return [self._string() for _ in range(length)]
        return [self._value(item_kind, depth + 1) for _ in range(length)]
