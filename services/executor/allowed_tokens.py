"""Which tokens rows may draw, as bits, and how the others are left out."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# By a byte of bits: inf for what is allowed.
_CEILINGS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_CEILINGS = _CEILINGS.astype(np.float32)

# Few are the tokens of a row of which no more 64-bit words than these have any.
FEW_WORDS = 256


class AllowedTokens(NamedTuple):
    """places [M] int64 among the rows that sample; bits [M, W] uint8, W a multiple of 8: bit (i & 7) of byte
    (i >> 3) for token i."""

    places: IntArray
    bits: npt.NDArray[np.uint8]


class FewTokens(NamedTuple):
    """Rows that may draw few tokens: places [F] among the rows that sample; ids [F, C], each row's in rising order;
    logits [F, C] float32, -inf past a row's last."""

    places: IntArray
    ids: IntArray
    logits: torch.Tensor


def keep_allowed(logits: torch.Tensor, allowed: AllowedTokens) -> None:
    """logits [S, V] float32, changed in place: -inf where a token is not allowed; V is at most 8 W."""
    width = logits.shape[1]
    if not len(allowed.places):
        return
    if logits.device.type == "cpu":
        array = logits.numpy()
        forbidden = np.unpackbits(~allowed.bits, axis=1, count=width, bitorder="little").view(bool)
        for place, where, bits in zip(allowed.places.tolist(), forbidden, allowed.bits, strict=True):
            _leave_out(array[place], where, bits)
        return
    places = torch.from_numpy(allowed.places).to(logits.device, non_blocking=True)
    forbidden_bits = torch.from_numpy(~allowed.bits).to(logits.device, non_blocking=True)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    unpacked = (forbidden_bits.unsqueeze(-1) >> shifts & 1).bool().flatten(1)[:, :width]
    logits.index_copy_(0, places, logits.index_select(0, places).masked_fill_(unpacked, -math.inf))


def pick_few(logits: torch.Tensor, allowed: AllowedTokens) -> tuple[FewTokens | None, AllowedTokens]:
    """The rows of which few tokens are allowed, and the others; logits [S, V] float32 on the CPU."""
    array = logits.numpy()
    words = allowed.bits.view("<u8")
    num_words = words.shape[1]
    is_few = np.count_nonzero(words, axis=1) <= FEW_WORDS
    if not is_few.any():
        return None, allowed
    places, rest = allowed.places, AllowedTokens(allowed.places[:0], allowed.bits[:0])
    if not is_few.all():
        rest = AllowedTokens(places[~is_few], allowed.bits[~is_few])
        places, words = places[is_few], words[is_few]
    used = words.ravel().nonzero()[0]
    spread = np.unpackbits(words.ravel()[used].view(np.uint8), bitorder="little").nonzero()[0]
    # A bit's word, and the word's row.
    word = used[spread >> 6]
    row = word // num_words
    ids = ((word - row * num_words) << 6) + (spread & 63)
    if len(ids) and ids.max() >= array.shape[1]:
        there = ids < array.shape[1]
        row, ids = row[there], ids[there]
    counts = np.bincount(row, minlength=len(places))
    column = np.arange(len(ids)) - (counts.cumsum() - counts)[row]
    shape = (len(places), max(1, int(counts.max())))
    table, values = np.zeros(shape, np.int64), np.full(shape, -math.inf, np.float32)
    table[row, column] = ids
    values[row, column] = array[places[row], ids]
    return FewTokens(places, table, torch.from_numpy(values)), rest


def _leave_out(row: npt.NDArray[np.float32], where: BoolArray, bits: npt.NDArray[np.uint8]) -> None:
    """-inf at each `where` [V], which `bits` [W] does not name. Mostly it is few places or nearly all."""
    count = np.count_nonzero(where)
    if count <= len(row) >> 3:
        row[where.nonzero()[0]] = -math.inf
    elif len(row) - count <= len(row) >> 3:
        ids = np.flatnonzero(~where)
        values = row[ids]
        row.fill(-math.inf)
        row[ids] = values
    else:
        # A NaN where nothing is allowed is left out too.
        np.fmin(row, _CEILINGS.take(bits, axis=0).reshape(-1)[: len(row)], out=row)
