"""Which tokens rows may draw, as bits, and how the others are left out."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class AllowedTokens(NamedTuple):
    """places [M] int64 among the rows that sample; bits [M, W] uint8: bit (i & 7) of byte (i >> 3) for token i."""

    places: npt.NDArray[np.int64]
    bits: npt.NDArray[np.uint8]


def keep_allowed(logits: torch.Tensor, allowed: AllowedTokens) -> None:
    """logits [S, V] float32, changed in place: -inf where a token is not allowed; V is at most 8 W."""
    width = logits.shape[1]
    if logits.device.type == "cpu":
        array = logits.numpy()
        for place, bits in zip(allowed.places.tolist(), allowed.bits, strict=True):
            forbidden = np.unpackbits(~bits, bitorder="little", count=width).view(bool)
            np.putmask(array[place], forbidden, -math.inf)
        return
    places = torch.from_numpy(allowed.places).to(logits.device, non_blocking=True)
    forbidden_bits = torch.from_numpy(~allowed.bits).to(logits.device, non_blocking=True)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    unpacked = (forbidden_bits.unsqueeze(-1) >> shifts & 1).bool().flatten(1)[:, :width]
    logits.index_copy_(0, places, logits.index_select(0, places).masked_fill_(unpacked, -math.inf))
