"""From logits to tokens, in float32, a whole batch of rows at once.

The order: logit_bias, penalties, min_tokens, structured output; then log-probabilities are taken; then
temperature, top_k, top_p over what top_k left, min_p. Truncation is by a threshold on the values, so tokens that
tie at the edge all stay and a row's outcome never depends on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from quartet.services.executor.allowed_tokens import FewTokens, keep_allowed, pick_few
from quartet.services.executor.logprobs import gather_logprobs
from quartet.services.executor.noise import uniform
from quartet.services.executor.sampling_rows import SamplingRows
from quartet.shared.messages import FAILED_TOKEN_ID, TokenLogprobs

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# So many of a row's largest values are looked at for top_k and top_p before the whole row is sorted.
NUM_CANDIDATES = 1024
_SEARCH_BLOCK = 256
# Scaled logits below this (a weight of 1e-35) count as 0; exp() is slow where it underflows.
_LOWEST = -80.0


Draw = Callable[[torch.Tensor, IntArray, IntArray], tuple[IntArray, BoolArray]]


class Drawer(Protocol):
    """Draws as `draw` does, faster; of fewer tokens than the vocabulary has too."""

    def draw(self, logits: torch.Tensor, rows: IntArray, output_indices: IntArray) -> tuple[IntArray, BoolArray]: ...


class SamplerOutput(NamedTuple):
    """token_ids [S], FAILED_TOKEN_ID where `failed` [S] is set; logprobs has an entry per row when any asked."""

    token_ids: IntArray
    failed: npt.NDArray[np.bool_]
    logprobs: list[TokenLogprobs | None] | None


def sample(
    logits: torch.Tensor, state: SamplingRows, rows: IntArray, output_indices: IntArray, drawer: Drawer | None = None
) -> SamplerOutput:
    """Draws the next token of each of `rows`.

    logits [S, V] float32, changed in place; V may exceed the vocabulary (padded rows are never drawn).
    rows [S] req_index; output_indices [S], the place of the token to draw among the row's outputs.
    A row whose logits are not finite, or are all masked, fails alone. `drawer`: of this `state`, for logits
    on the CPU.
    """
    if logits.shape[1] != state.vocab_size:
        logits = logits[:, : state.vocab_size]
    _adjust(logits, state, rows, output_indices)
    drawing: Draw = drawer.draw if drawer is not None else lambda some, *where: draw(some, state, *where)
    allowed = state.structured.allowed(rows)
    if allowed is None:
        token_ids, failed = drawing(logits, rows, output_indices)
    else:
        few, others = pick_few(logits, allowed) if logits.device.type == "cpu" else (None, allowed)
        # Where few tokens are left, their log-probabilities are all that the others are masked for.
        keep_allowed(logits, allowed if state.with_logprobs else others)
        if few is None:
            token_ids, failed = drawing(logits, rows, output_indices)
        else:
            token_ids, failed = _draw_apart(logits, few, rows, output_indices, drawing)
    return SamplerOutput(token_ids, failed, _logprobs(logits, state, rows, token_ids, failed))


def draw(
    logits: torch.Tensor, state: SamplingRows, rows: IntArray, output_indices: IntArray
) -> tuple[IntArray, BoolArray]:
    """([S] token ids, FAILED_TOKEN_ID where a row failed, [S] which did) by adjusted logits [S, V]."""
    best, token_ids = _row_max(logits)
    failed = ~np.isfinite(best)
    random = np.flatnonzero(state.is_random[rows] & ~failed)
    if len(random):
        drawn = rows[random]
        noise = uniform(state.seed[drawn], state.choice_index[drawn], output_indices[random].astype(np.uint64))
        token_ids[random] = _draw(logits, best, state, rows, random, noise)
    token_ids[failed] = FAILED_TOKEN_ID
    return token_ids, failed


def _draw_apart(
    logits: torch.Tensor, few: FewTokens, rows: IntArray, output_indices: IntArray, drawing: Draw
) -> tuple[IntArray, BoolArray]:
    """As `drawing` does: of rows with few tokens these alone, and the other rows by themselves."""
    token_ids, failed = np.empty(len(rows), np.int64), np.zeros(len(rows), bool)
    found, failed[few.places] = drawing(few.logits, rows[few.places], output_indices[few.places])
    found[failed[few.places]] = 0
    token_ids[few.places] = few.ids[np.arange(len(found)), found]
    token_ids[failed.nonzero()[0]] = FAILED_TOKEN_ID
    if len(few.places) < len(rows):
        is_other = np.ones(len(rows), bool)
        is_other[few.places] = False
        others = is_other.nonzero()[0]
        subset = logits[torch.from_numpy(others)]
        token_ids[others], failed[others] = drawing(subset, rows[others], output_indices[others])
    return token_ids, failed


def _row_max(logits: torch.Tensor) -> tuple[FloatArray, IntArray]:
    """Each row's largest value and its first place; NaN wins."""
    if logits.device.type == "cpu":
        # numpy's argmax is several times faster than torch's on a CPU.
        array = logits.numpy()
        token_ids = array.argmax(-1)
        return array[np.arange(len(array)), token_ids].astype(np.float64), token_ids
    values, indices = logits.max(-1)
    return values.double().cpu().numpy(), indices.cpu().numpy()


# --- bias, penalties, min_tokens ------------------------------------------------------------------


def _adjust(logits: torch.Tensor, state: SamplingRows, rows: IntArray, output_indices: IntArray) -> None:
    if not (state.logit_bias or state.token_counts or state.stop_ids):
        return
    masked = np.flatnonzero(output_indices < state.min_tokens[rows])
    req_indices = rows.tolist()
    biased = [(i, *state.logit_bias[r]) for i, r in enumerate(req_indices) if r in state.logit_bias]
    if biased:
        place = _places(logits, [i for i, _, _ in biased], [ids for _, ids, _ in biased])
        logits[place] += _on(logits, np.concatenate([values for _, _, values in biased]))
    counted = [i for i, r in enumerate(req_indices) if r in state.token_counts]
    if counted:
        _penalize(logits, state, rows[counted], counted)
    if len(masked):
        logits[_places(logits, masked.tolist(), [state.stop_ids[req_indices[i]] for i in masked])] = -math.inf


def _penalize(logits: torch.Tensor, state: SamplingRows, rows: IntArray, places: list[int]) -> None:
    counts = [state.token_counts[r] for r in rows.tolist()]
    sizes = [len(c.ids) for c in counts]
    where = _places(logits, places, [c.ids for c in counts])
    output_counts = np.concatenate([c.output_counts for c in counts])
    repetition = _on(logits, np.repeat(state.repetition_penalty[rows], sizes))
    charge = np.repeat(state.frequency_penalty[rows], sizes) * output_counts
    charge += np.repeat(state.presence_penalty[rows], sizes) * (output_counts > 0)
    values = logits[where]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[where] = values - _on(logits, charge)


def _places(logits: torch.Tensor, row_places: list[int], ids: list[IntArray]) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = [len(i) for i in ids]
    return (
        _on(logits, np.repeat(np.array(row_places, np.int64), sizes)),
        _on(logits, np.concatenate(ids)),
    )


def _on(logits: torch.Tensor, array: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array).to(logits.device, non_blocking=True)


# --- drawing --------------------------------------------------------------------------------------


def _draw(
    logits: torch.Tensor, best: FloatArray, state: SamplingRows, rows: IntArray, chosen: IntArray, noise: FloatArray
) -> IntArray:
    """Inverse CDF in token order over each chosen row's truncated distribution."""
    whole = len(chosen) == len(rows)
    scaled = logits if whole else logits[_on(logits, chosen)]
    rows = rows[chosen]
    # The largest becomes 0 before the division, so that no temperature overflows.
    scaled = (scaled - _on(logits, best[chosen].astype(np.float32)).unsqueeze(1)).div_(
        _on(logits, state.temperature[rows]).unsqueeze(1)
    )
    scaled.clamp_(min=_LOWEST)
    # In float64, so that however it is summed, the same token is drawn.
    weights = scaled.double().exp_().masked_fill_(scaled <= _LOWEST + 1, 0.0)
    threshold = _threshold(scaled, weights, state, rows)
    if threshold is not None:
        weights.masked_fill_(scaled < _on(logits, threshold).unsqueeze(1), 0.0)
    return _inverse_cdf(weights, noise)


def _inverse_cdf(weights: torch.Tensor, noise: FloatArray) -> IntArray:
    """The first token at which the running sum of weights [N, V] passes noise [N] times the whole."""
    blocks, sums = _block_sums(weights)
    sums = sums.cumsum(-1)
    totals = sums[:, -1:]
    zero = torch.zeros_like(totals)
    target = torch.minimum(_on(weights, noise).unsqueeze(1) * totals, torch.nextafter(totals, zero))
    block = torch.searchsorted(sums, target, right=True)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks[torch.arange(len(blocks), device=weights.device), block[:, 0]].cumsum(-1)
    # A block's sum is rounded otherwise than the sums inside it: its end is its last token with any weight.
    rest = torch.minimum(target - before, torch.nextafter(inside[:, -1:], zero))
    token = torch.searchsorted(inside, rest, right=True)
    return (block * _SEARCH_BLOCK + token)[:, 0].cpu().numpy()


def _block_sums(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weights [N, V] float64 as ([N, B, _SEARCH_BLOCK], the sums of these blocks [N, B]).

    In blocks since a row's sum is then the same in any batch, and since a search may begin with few.
    """
    num_rows, width = weights.shape
    padding = -width % _SEARCH_BLOCK
    padded = torch.nn.functional.pad(weights, (0, padding)) if padding else weights
    blocks = padded.view(num_rows, -1, _SEARCH_BLOCK)
    return blocks, blocks.sum(-1)


def _threshold(
    scaled: torch.Tensor, weights: torch.Tensor, state: SamplingRows, rows: IntArray
) -> npt.NDArray[np.float32] | None:
    """[N] the smallest value that stays, or None when no row truncates. `scaled` [N, V] has maximum 0,
    `weights` is its exp()."""
    width = scaled.shape[1]
    min_p = state.min_p[rows]
    top_k = np.where((state.top_k[rows] > 0) & (state.top_k[rows] < width), state.top_k[rows], 0)
    top_p = state.top_p[rows]
    ranked = (top_k > 0) | (top_p < 1.0)
    if not (ranked.any() or (min_p > 0).any()):
        return None
    with np.errstate(divide="ignore"):
        threshold = np.log(min_p).astype(np.float32)
    mass = np.zeros(len(rows))
    if ((top_p < 1.0) & (top_k == 0)).any():
        mass = _block_sums(weights)[1].sum(-1).cpu().numpy()
    pending = np.flatnonzero(ranked)
    for num_candidates in (NUM_CANDIDATES, width):
        if not len(pending):
            break
        subset = scaled if len(pending) == len(rows) else scaled[_on(scaled, pending)]
        values = _largest(subset, min(num_candidates, width))
        found, found_threshold = _rank_threshold(values, top_k[pending], top_p[pending], mass[pending], width)
        done = pending[found]
        threshold[done] = np.maximum(threshold[done], found_threshold[found])
        pending = pending[~found]
    return threshold


def _rank_threshold(
    values: npt.NDArray[np.float32], top_k: IntArray, top_p: FloatArray, mass: FloatArray, width: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """([N] whether the values sufficed, [N] the value at which top_k and top_p cut).

    values [N, C]: each row's largest in falling order, of `width` in all; mass [N]: the sum of all weights.
    """
    num_rows, num_candidates = values.shape
    each = np.arange(num_rows)
    found = (num_candidates == width) | (top_k <= num_candidates)
    last = np.where(top_k > 0, np.minimum(top_k, num_candidates), num_candidates) - 1
    nucleus = top_p < 1.0
    if nucleus.any():
        sums = np.exp(values.astype(np.float64)).cumsum(-1)
        whole = np.where((top_k > 0) | (num_candidates == width), sums[each, last], mass)
        target = np.minimum(top_p * whole, np.nextafter(whole, 0))
        reached = sums >= target[:, None]
        found &= ~nucleus | reached[:, -1]
        last = np.where(nucleus, np.minimum(reached.argmax(-1), last), last)
    return found, values[each, last]


def _largest(scaled: torch.Tensor, count: int) -> npt.NDArray[np.float32]:
    """[N, count] each row's largest values in falling order."""
    if scaled.device.type == "cpu":
        # numpy selects and sorts float32 with SIMD: many times faster than torch's topk on a CPU.
        array = scaled.numpy()
        start = array.shape[1] - count
        part = np.partition(array, start, axis=-1)[:, start:] if start else array.copy()
        part.sort(axis=-1)
        return part[:, ::-1]
    return scaled.topk(count, dim=-1).values.cpu().numpy()


# --- log-probabilities ----------------------------------------------------------------------------


def _logprobs(
    logits: torch.Tensor, state: SamplingRows, rows: IntArray, token_ids: IntArray, failed: npt.NDArray[np.bool_]
) -> list[TokenLogprobs | None] | None:
    if not state.with_logprobs:
        return None
    wanted = state.num_logprobs[rows] >= 0
    if not wanted.any():
        return None
    places = np.flatnonzero(wanted & ~failed)
    subset = logits if len(places) == len(rows) else logits[_on(logits, places)]
    entries: list[TokenLogprobs | None] = [None] * len(rows)
    gathered = gather_logprobs(subset, token_ids[places], state.num_logprobs[rows[places]])
    for place, entry in zip(places.tolist(), gathered, strict=True):
        entries[place] = entry
    return entries
