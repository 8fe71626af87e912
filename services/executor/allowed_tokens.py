"""Which tokens rows may draw, as bits, and how the others are left out."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

# So many tokens are few, among tens of thousands.
FEW = 512


class AllowedTokens(NamedTuple):
    """places [M] int64 among the rows that sample; bits [M, W] uint8: bit (i & 7) of byte (i >> 3) for token i."""

    places: npt.NDArray[np.int64]
    bits: npt.NDArray[np.uint8]


def keep_allowed(logits: torch.Tensor, allowed: AllowedTokens) -> dict[int, npt.NDArray[np.int64]]:
    """logits [S, V] float32, changed in place: -inf where a token is not allowed; V is at most 8 W.

    On a CPU, gives the ids that are allowed, rising, by place, of rows where they are few."""
    width = logits.shape[1]
    if logits.device.type == "cpu":
        array = logits.numpy()
        found = {}
        for place, bits in zip(allowed.places.tolist(), allowed.bits, strict=True):
            ids = _keep(array[place], bits)
            if ids is not None:
                found[place] = ids
        return found
    places = torch.from_numpy(allowed.places).to(logits.device, non_blocking=True)
    forbidden_bits = torch.from_numpy(~allowed.bits).to(logits.device, non_blocking=True)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    unpacked = (forbidden_bits.unsqueeze(-1) >> shifts & 1).bool().flatten(1)[:, :width]
    logits.index_copy_(0, places, logits.index_select(0, places).masked_fill_(unpacked, -math.inf))
    return {}


def _keep(row: npt.NDArray[np.float32], bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64] | None:
    """The ids allowed, where they are few. Mostly they are, or else those that are not allowed are."""
    where = bits.nonzero()[0]
    if len(where) <= FEW:
        ids = _ids(bits, where, len(row))
        values = row[ids]
        row.fill(-math.inf)
        row[ids] = values
        return ids if len(ids) <= FEW else None
    forbidden = ~bits
    where = forbidden.nonzero()[0]
    if len(where) <= FEW:
        row[_ids(forbidden, where, len(row))] = -math.inf
    else:
        np.putmask(row, np.unpackbits(forbidden, bitorder="little", count=len(row)).view(bool), -math.inf)
    return None


def _ids(bits: npt.NDArray[np.uint8], where: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    """The bits that are set, all of them in the bytes `where`; those below `width`."""
    offsets = np.unpackbits(bits[where], bitorder="little").nonzero()[0]
    ids: npt.NDArray[np.int64] = (where[offsets >> 3] << 3) + (offsets & 7)
    return ids if not len(ids) or ids[-1] < width else ids[ids < width]
