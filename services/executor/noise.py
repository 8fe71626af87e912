"""Counter-based noise: the number a token is drawn with depends on nothing but where it stands."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(
    seeds: npt.NDArray[np.uint64], choice_indices: npt.NDArray[np.uint64], output_indices: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, choice_index, output_index); all arrays [N], the result too.

    Three chained rounds of SplitMix64's finalizer, one per key. Part of what a seed promises: the
    function is never changed.
    """
    state = _mix((stream_keys(seeds, choice_indices) ^ output_indices) + _GAMMA)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def stream_keys(seeds: npt.NDArray[np.uint64], choice_indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """[N] what the noise of all of a choice's outputs has in common."""
    return _mix((_mix(seeds + _GAMMA) ^ choice_indices) + _GAMMA)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
