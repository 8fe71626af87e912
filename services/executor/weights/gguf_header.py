"""The head of a GGUF file: metadata and where each tensor lies.

The gguf library's reader makes several numpy views per vocabulary entry, which takes seconds; nothing
of the vocabulary is needed here, so arrays are stepped over.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quartet.services.executor.models.config import ModelError
from quartet.services.executor.weights.ggml_types import GGMLType, find_type

MetadataValue = int | float | bool | str | list[int | float | bool]

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
# Longer arrays (token scores and types) are of no use to the executor.
_LONGEST_KEPT_ARRAY = 4096


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """shape is rows first; `data` is a read-only view of the mapped file, one row of bytes per row."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    data: npt.NDArray[np.uint8]


class GGUFHeader:
    """metadata: scalars, strings and short number arrays by key. tensors: by name.
    Raises ModelError when the file is cut short, malformed or names a tensor twice."""

    def __init__(self, path: Path) -> None:
        self.metadata: dict[str, MetadataValue] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._offset = 0
            self._read(path)
        except (OSError, ValueError, struct.error) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"{path}: not a readable GGUF file ({error})") from error

    def _read(self, path: Path) -> None:
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file")
        self._offset = 4
        version = self._number(_U32)
        if version not in _VERSIONS:
            raise ModelError(f"{path}: GGUF version {version} is not supported (known: {_VERSIONS}, little-endian)")
        num_tensors, num_entries = self._number(_U64), self._number(_U64)
        for _ in range(num_entries):
            key = self._string()
            value = self._value(self._number(_U32))
            if value is not None:
                self.metadata[key] = value
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{path}: general.alignment {alignment!r} is not supported")
        self._map_tensors(path, entries, -(-self._offset // alignment) * alignment)

    def _map_tensors(self, path: Path, entries: Iterable[tuple[str, tuple[int, ...], int, int]], base: int) -> None:
        for name, shape, number, offset in entries:
            if name in self.tensors:
                raise ModelError(f"{path}: tensor {name} is in the file twice")
            kind = find_type(number)
            if kind is None:
                raise ModelError(f"{path}: tensor {name} has the unknown type {number}")
            if not shape or shape[-1] % kind.block:
                raise ModelError(f"{path}: tensor {name} of shape {shape} cannot be {kind.name}")
            row_bytes = shape[-1] // kind.block * kind.block_bytes
            size = int(np.prod(shape[:-1], dtype=object)) * row_bytes
            if base + offset + size > len(self._data):
                raise ModelError(f"{path}: the file ends within tensor {name}")
            data = np.frombuffer(self._data, np.uint8, size, base + offset).reshape(*shape[:-1], row_bytes)
            self.tensors[name] = GGUFTensor(name, shape, kind, data)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        # The file counts dimensions from the fastest.
        shape = tuple(reversed([self._number(_U64) for _ in range(self._number(_U32))]))
        return name, shape, self._number(_U32), self._number(_U64)

    def _number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._offset)
        self._offset += form.size
        return int(value)

    def _string(self) -> str:
        length = self._number(_U64)
        value = self._data[self._offset : self._offset + length]
        if len(value) != length:
            raise ValueError("a string reaches past the end")
        self._offset += length
        return value.decode("utf-8", "replace")

    def _value(self, kind: int) -> MetadataValue | None:
        """None for what is only stepped over."""
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        form = self._scalar(kind)
        (value,) = form.unpack_from(self._data, self._offset)
        self._offset += form.size
        scalar: MetadataValue = value
        return scalar

    def _array(self) -> MetadataValue | None:
        kind, length = self._number(_U32), self._number(_U64)
        if kind == _STRING:
            data, offset, unpack = self._data, self._offset, _U64.unpack_from
            for _ in range(length):
                offset += 8 + unpack(data, offset)[0]
            self._offset = offset
            return None
        form = self._scalar(kind)
        start, self._offset = self._offset, self._offset + length * form.size
        if self._offset > len(self._data):
            raise ValueError("an array reaches past the end")
        if length > _LONGEST_KEPT_ARRAY:
            return None
        return [value for (value,) in form.iter_unpack(self._data[start : self._offset])]

    def _scalar(self, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return _SCALARS[kind]
