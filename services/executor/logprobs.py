"""Log-probabilities as they are told: finite, floored, with rank and the top alternatives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quartet.shared.messages import LOGPROB_FLOOR, TokenLogprobs


class GatheredLogprobs(NamedTuple):
    """What `gather` found, on the logits' device.

    logprobs [N] float32; ranks [N] int64; top_ids [N, M] int64 and top_logprobs [N, M] float32, falling.
    """

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def gather_logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], num_top: npt.NDArray[np.int64]
) -> list[TokenLogprobs]:
    """Logprob and rank of one token per row, with the row's `num_top` likeliest tokens.

    logits [N, V] float32; token_ids, num_top [N]. Masked tokens (-inf) and NaN come out as
    LOGPROB_FLOOR. The rank is 1 for a likeliest token.
    """
    if len(token_ids) == 0:
        return []
    chosen = torch.from_numpy(token_ids).to(logits.device)
    return logprob_entries(gather(logits, chosen, int(num_top.max())), token_ids, num_top)


def gather(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> GatheredLogprobs:
    """The part of gather_logprobs that runs where the logits are; token_ids [N] int64. Waits for nothing."""
    chosen_logits = logits.gather(1, token_ids.unsqueeze(1))
    normalizer = logits.logsumexp(-1, keepdim=True)
    logprobs = _floored(chosen_logits - normalizer)[:, 0]
    ranks = (logits > chosen_logits).sum(-1) + 1
    values, top_ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return GatheredLogprobs(logprobs, ranks, top_ids, _floored(values - normalizer))


def logprob_entries(
    gathered: GatheredLogprobs, token_ids: npt.NDArray[np.int64], num_top: npt.NDArray[np.int64]
) -> list[TokenLogprobs]:
    """What `gather` found as it is told; waits for it where it is still being computed."""
    logprobs, ranks, top_ids, top_logprobs = (tensor.tolist() for tensor in gathered)
    # Equal values by rising id: topk leaves their order open.
    tops = [
        sorted(zip(row_ids, row_values, strict=True), key=lambda pair: (-pair[1], pair[0]))[:count]
        for row_ids, row_values, count in zip(top_ids, top_logprobs, num_top.tolist(), strict=True)
    ]
    return [TokenLogprobs(*entry) for entry in zip(token_ids.tolist(), logprobs, ranks, tops, strict=True)]


def _floored(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.nan_to_num(nan=LOGPROB_FLOOR, posinf=0.0).clamp_(min=LOGPROB_FLOOR, max=0.0)
