"""Whether what a neighbour says of tokens can be; asked at each service's door, before anything is stored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from quartet.shared.messages import TokenLogprobs
from quartet.shared.sampling_params import MAX_TOKEN_ID


def are_token_ids(token_ids: Sequence[int]) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) <= MAX_TOKEN_ID)


def are_logprobs(entries: Iterable[TokenLogprobs | None]) -> bool:
    """Finite numbers about ids that can be; None is an entry that is not there."""
    return all(entry is None or _is_sound(entry) for entry in entries)


def _is_sound(entry: TokenLogprobs) -> bool:
    if not (0 <= entry.token_id <= MAX_TOKEN_ID and 0 <= entry.rank <= MAX_TOKEN_ID and math.isfinite(entry.logprob)):
        return False
    return all(0 <= token_id <= MAX_TOKEN_ID and math.isfinite(logprob) for token_id, logprob in entry.top)
