"""A step plan's packed columns as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quartet.shared.messages import NewRow, StepPlan

IntArray = npt.NDArray[np.int64]
_NONE = np.zeros(0, np.int64)
_NONE.flags.writeable = False


class PlanError(ValueError):
    """The plan contradicts itself or the rows; nothing of it was applied."""


@dataclass(slots=True)
class NewRowColumns:
    """A new row's ids: token_ids [N] int32, block_ids [B] int64."""

    row: NewRow
    token_ids: npt.NDArray[np.int32]
    block_ids: IntArray


@dataclass(slots=True)
class PlanColumns:
    """`removed`, `block_rows`, `decode_rows`, `prefill_rows` are req_index; decode rows rise."""

    removed: IntArray
    new_rows: list[NewRowColumns]
    block_rows: IntArray
    block_ids: IntArray
    decode_rows: IntArray
    prefill_rows: IntArray
    prefill_counts: IntArray


def unpack_plan(plan: StepPlan) -> PlanColumns:
    """Raises PlanError for a column that is cut short or does not match its partner."""
    columns = PlanColumns(
        removed=_column("removed", plan.removed, "<u2"),
        new_rows=[
            NewRowColumns(row, _token_ids(row.token_ids), _column("block_ids of a new row", row.block_ids, "<u4"))
            for row in plan.new_rows
        ],
        block_rows=_column("block_rows", plan.block_rows, "<u2"),
        block_ids=_column("block_ids", plan.block_ids, "<u4"),
        decode_rows=np.unpackbits(np.frombuffer(plan.decode_rows, np.uint8), bitorder="little").nonzero()[0],
        prefill_rows=_column("prefill_rows", plan.prefill_rows, "<u2"),
        prefill_counts=_column("prefill_counts", plan.prefill_counts, "<u4"),
    )
    for one, other in (("block_rows", "block_ids"), ("prefill_rows", "prefill_counts")):
        lengths = len(getattr(columns, one)), len(getattr(columns, other))
        if lengths[0] != lengths[1]:
            raise PlanError(f"{one} has {lengths[0]} entries and {other} {lengths[1]}")
    return columns


def _column(name: str, packed: bytes, dtype: str) -> IntArray:
    if not packed:
        return _NONE
    size = np.dtype(dtype).itemsize
    if len(packed) % size:
        raise PlanError(f"{name} has {len(packed)} bytes, no multiple of {size}")
    return np.frombuffer(packed, dtype).astype(np.int64)


def _token_ids(packed: bytes) -> npt.NDArray[np.int32]:
    ids = _column("token_ids of a new row", packed, "<u4")
    # Ids are checked against the vocabulary later; one past int32 must not wrap round into it.
    return np.minimum(ids, np.iinfo(np.int32).max).astype(np.int32)
