"""Which tokens a row has met, and how often it has put them out: what penalties are computed from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """The distinct tokens of one row, kept up token by token. Sparse: a row meets few of a vocabulary.

    `prompt_ids` may be empty when only output tokens count.
    """

    def __init__(self, prompt_ids: npt.NDArray[np.int32], output_ids: npt.NDArray[np.int32]) -> None:
        distinct = np.union1d(prompt_ids, output_ids).astype(np.int64)
        self._size = len(distinct)
        self._ids = np.zeros(max(64, 2 * self._size), np.int64)
        self._ids[: self._size] = distinct
        self._counts = np.zeros(len(self._ids), np.float32)
        put_out, counts = np.unique(output_ids, return_counts=True)
        self._counts[np.searchsorted(distinct, put_out)] = counts
        self._place = {token_id: place for place, token_id in enumerate(distinct.tolist())}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[N] distinct token ids, in no order that matters."""
        return self._ids[: self._size]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """[N] how often each of `ids` was put out; 0 for one that is only in the prompt."""
        return self._counts[: self._size]

    def append(self, token_id: int) -> None:
        """One more output token."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self._size
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._size += 1
        self._counts[place] += 1
