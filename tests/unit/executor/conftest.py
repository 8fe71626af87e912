import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from quartet.shared.block_hash import hash_root
from quartet.shared.messages import NewRow, StepPlan
from quartet.shared.sampling_params import SamplingParams

torch.set_num_threads(1)


@dataclasses.dataclass(frozen=True)
class Plans:
    """Builds plans from plain lists."""

    @staticmethod
    def column(values: Sequence[int], dtype: str = "<u4") -> bytes:
        return np.array(list(values), dtype).tobytes()

    def new_row(
        self,
        req_index: int,
        token_ids: Sequence[int],
        block_ids: Sequence[int] = (),
        *,
        num_prompt: int | None = None,
        num_computed: int = 0,
        sampling: SamplingParams | None = None,
        prompt_logprobs_start: int = -1,
        eos: Sequence[int] = (),
        choice_index: int = 0,
        root: bytes | None = None,
    ) -> NewRow:
        return NewRow(
            req_index=req_index,
            token_ids=self.column(token_ids),
            num_prompt_tokens=len(token_ids) if num_prompt is None else num_prompt,
            num_computed_tokens=num_computed,
            block_ids=self.column(block_ids),
            sampling=SamplingParams(temperature=0.0) if sampling is None else sampling,
            eos_token_ids=list(eos),
            choice_index=choice_index,
            hash_root=hash_root() if root is None else root,
            prompt_logprobs_start=prompt_logprobs_start,
        )

    def plan(
        self,
        step_id: int = 0,
        *,
        epoch: int = 1,
        removed: Sequence[int] = (),
        new: Sequence[NewRow] = (),
        blocks: Sequence[tuple[int, int]] = (),
        decode: Sequence[int] = (),
        prefill: Sequence[tuple[int, int]] = (),
    ) -> StepPlan:
        bits = np.zeros(8 * (max(decode, default=-8) // 8 + 1), np.uint8)
        bits[list(decode)] = 1
        return StepPlan(
            epoch=epoch,
            step_id=step_id,
            removed=self.column(removed, "<u2"),
            new_rows=list(new),
            block_rows=self.column([r for r, _ in blocks], "<u2"),
            block_ids=self.column([b for _, b in blocks]),
            decode_rows=np.packbits(bits, bitorder="little").tobytes(),
            prefill_rows=self.column([r for r, _ in prefill], "<u2"),
            prefill_counts=self.column([c for _, c in prefill]),
        )


@pytest.fixture
def plans() -> Plans:
    return Plans()


@pytest.fixture
def unpack() -> Callable[[bytes], list[int]]:
    return lambda packed: np.frombuffer(packed, "<u4").tolist()
