"""GGML's tensor types: the bytes of a row, and its values.

What is common is decoded here. The rest is left to the gguf library, imported only then: it is several
times slower, and keeps a whole tensor in small pieces that the heap does not give back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Decoded at a time: what lies between file and result stays in the cache.
_SLICE_ELEMENTS = 1 << 17

Decode = Callable[[npt.NDArray[np.uint8]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A row is blocks of `block` elements in `block_bytes` bytes. `number` is its name in files."""

    number: int
    name: str
    block: int
    block_bytes: int


F32 = GGMLType(0, "F32", 1, 4)
F16 = GGMLType(1, "F16", 1, 2)
Q4_1 = GGMLType(3, "Q4_1", 32, 20)
Q8_0 = GGMLType(8, "Q8_0", 32, 34)
BF16 = GGMLType(30, "BF16", 1, 2)
_COMMON = {kind.number: kind for kind in (F32, F16, Q4_1, Q8_0, BF16)}


def find_type(number: int) -> GGMLType | None:
    """None for a number that no type is known by."""
    if number in _COMMON:
        return _COMMON[number]
    import gguf

    if number not in set(gguf.GGMLQuantizationType):
        return None
    kind = gguf.GGMLQuantizationType(number)
    return GGMLType(number, kind.name, *gguf.GGML_QUANT_SIZES[kind])


def dequantize(kind: GGMLType, rows: npt.NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    """rows [..., bytes] -> [..., elements], in memory of its own; values are rounded to `dtype` once.

    Raises NotImplementedError for a type that has no decoder.
    """
    decode = _decoder(kind)
    flat = rows.reshape(-1, rows.shape[-1])
    out = torch.empty(len(flat), flat.shape[1] // kind.block_bytes * kind.block, dtype=dtype)
    step = max(1, _SLICE_ELEMENTS // out.shape[1])
    with _one_thread():
        for start in range(0, len(flat), step):
            # A copy: torch takes no memory that it may not write to, such as a mapped file's.
            out[start : start + step] = decode(flat[start : start + step].copy())
    return out.view(*rows.shape[:-1], -1)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """To wake threads for an operation on a slice takes longer than the operation."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _decoder(kind: GGMLType) -> Decode:
    """[N, bytes] -> [N, elements] in any dtype that holds them exactly, or float32."""
    if kind in _DECODERS:
        return _DECODERS[kind]
    import gguf

    number: Any = gguf.GGMLQuantizationType(kind.number)
    gguf.quants.dequantize(np.zeros((1, kind.block_bytes), np.uint8), number)
    return lambda rows: torch.from_numpy(gguf.quants.dequantize(rows, number))


def _plain(dtype: torch.dtype) -> Decode:
    return lambda rows: torch.from_numpy(rows).view(dtype)


def _q4_1(rows: npt.NDArray[np.uint8]) -> torch.Tensor:
    blocks = torch.from_numpy(rows).view(len(rows), -1, Q4_1.block_bytes)
    header = blocks[..., :4].contiguous().view(torch.float16).float()
    values = torch.empty(len(rows), blocks.shape[1], Q4_1.block)
    # Whole blocks are masked and shifted, headers and all: that is faster than to leave them out.
    values[..., :16] = (blocks & 15)[..., 4:]
    values[..., 16:] = (blocks >> 4)[..., 4:]
    return values.mul_(header[..., :1]).add_(header[..., 1:]).flatten(1)


def _q8_0(rows: npt.NDArray[np.uint8]) -> torch.Tensor:
    blocks = torch.from_numpy(rows).view(len(rows), -1, Q8_0.block_bytes)
    scales = blocks[..., :2].contiguous().view(torch.float16).float()
    return blocks[..., 2:].contiguous().view(torch.int8).float().mul_(scales).flatten(1)


_DECODERS: dict[GGMLType, Decode] = {
    F32: _plain(torch.float32),
    F16: _plain(torch.float16),
    BF16: _plain(torch.bfloat16),
    Q4_1: _q4_1,
    Q8_0: _q8_0,
}
