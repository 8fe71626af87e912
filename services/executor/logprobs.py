"""Log-probabilities as they are told: finite, floored, with rank and the top alternatives."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from quartet.shared.messages import LOGPROB_FLOOR, TokenLogprobs


def gather_logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], num_top: npt.NDArray[np.int64]
) -> list[TokenLogprobs]:
    """Logprob and rank of one token per row, with the row's `num_top` likeliest tokens.

    logits [N, V] float32; token_ids, num_top [N]. Masked tokens (-inf) and NaN come out as
    LOGPROB_FLOOR. The rank is 1 for a likeliest token.
    """
    if len(token_ids) == 0:
        return []
    chosen = torch.from_numpy(token_ids).to(logits.device).unsqueeze(1)
    chosen_logits = logits.gather(1, chosen)
    normalizer = logits.logsumexp(-1, keepdim=True)
    logprobs = _floored(chosen_logits - normalizer)[:, 0].tolist()
    ranks = ((logits > chosen_logits).sum(-1) + 1).tolist()
    tops = _top(logits, normalizer, num_top)
    return [TokenLogprobs(*entry) for entry in zip(token_ids.tolist(), logprobs, ranks, tops, strict=True)]


def _top(
    logits: torch.Tensor, normalizer: torch.Tensor, num_top: npt.NDArray[np.int64]
) -> list[list[tuple[int, float]]]:
    most = min(int(num_top.max()), logits.shape[1])
    if most == 0:
        return [[] for _ in range(len(logits))]
    values, ids = logits.topk(most, dim=-1)
    rows = zip(ids.tolist(), _floored(values - normalizer).tolist(), num_top.tolist(), strict=True)
    # Equal values by rising id: topk leaves their order open.
    return [
        sorted(zip(row_ids, row_values, strict=True), key=lambda pair: (-pair[1], pair[0]))[:count]
        for row_ids, row_values, count in rows
    ]


def _floored(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.nan_to_num(nan=LOGPROB_FLOOR, posinf=0.0).clamp_(min=LOGPROB_FLOOR, max=0.0)
