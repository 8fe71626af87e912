"""Kernels that draw tokens where the logits are, by the rules of the CPU's sampler.

A row is one program's: its outcome depends on neither its neighbours nor the number of processors. The
weight of a token is exp(-a) with a = (largest logit - logit) / temperature, so a >= 0 and the bits of a,
read as an integer, rise with it. Truncation keeps what has an `a` up to the row's limit, ties included.
The limit is searched for, not sorted: first among a few edges, then by bisection of the bits over the
few candidates below the edge (or over the whole row, where they are many).

Tokens are drawn by Gumbel's trick: the largest of -a - log(E), E exponential noise from (seed, choice
index, output index, token) alone. It needs no running sum. The CPU draws from the same law with other
numbers: a seed's tokens repeat on the same kind of device only.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of `params` [max_num_seqs, NUM_PARAMS] float32. A temperature of 0 is greedy.
TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
MIN_P_LIMIT = tl.constexpr(2)  # the largest `a` that min_p leaves
REPETITION = tl.constexpr(3)
FREQUENCY = tl.constexpr(4)
PRESENCE = tl.constexpr(5)
NUM_PARAMS = tl.constexpr(8)
# Columns of `counters` [max_num_seqs, NUM_COUNTERS] int64.
KEY = tl.constexpr(0)  # of the noise: mixed from seed and choice index
TOP_K = tl.constexpr(1)  # 0: off
SLOT = tl.constexpr(2)  # of tallies and biases, -1: none
MIN_TOKENS = tl.constexpr(3)
NUM_COUNTERS = tl.constexpr(4)
# Tallies [slots, vocab_size] int32: how often a token was put out, and two flags.
IN_PROMPT = tl.constexpr(1 << 28)
IS_STOP = tl.constexpr(1 << 29)
COUNT_MASK = tl.constexpr((1 << 28) - 1)

# Past this `a` a weight counts as 0.
WEIGHTLESS = tl.constexpr(79.0)
_FURTHEST = tl.constexpr(80.0)
_NUM_EDGES = tl.constexpr(16)
_EDGE_STEP = tl.constexpr(0.8)

ADJUST_TILE = 1024
ADJUST_WARPS = 4
ROW_TILE = 4096
# Beside the candidates that a program holds, registers are short: more threads share them.
LIMITS_TILE = 2048
LIMITS_WARPS = 16
EDGE_TILE = 512
MAX_CANDIDATES = 2048
NUM_WARPS = 8


@triton.jit(do_not_specialize_on_alignment=["rows", "output_indices"])
def adjust_kernel(
    logits,
    stride,
    rows,
    output_indices,
    params,
    counters,
    tallies,
    biases,
    vocab_size,
    TILE: tl.constexpr,
):
    """Programs (sample, tile): logit_bias, then penalties, then the mask of min_tokens, in place."""
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample)
    slot = tl.load(counters + row * NUM_COUNTERS + SLOT)
    if slot >= 0:
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = column < vocab_size
        place = logits + sample * stride + column
        tally = tl.load(tallies + slot * vocab_size + column, mask=inside, other=0)
        value = tl.load(place, mask=inside, other=0.0) + tl.load(
            biases + slot * vocab_size + column, mask=inside, other=0.0
        )
        count = (tally & COUNT_MASK).to(tl.float32)
        repetition = tl.load(params + row * NUM_PARAMS + REPETITION)
        charge = tl.load(params + row * NUM_PARAMS + FREQUENCY) * count
        charge += tl.where(count > 0, tl.load(params + row * NUM_PARAMS + PRESENCE), 0.0)
        met = (tally & (COUNT_MASK | IN_PROMPT)) != 0
        penalized = tl.where(value > 0, value / repetition, value * repetition) - charge
        value = tl.where(met, penalized, value)
        too_early = tl.load(output_indices + sample) < tl.load(counters + row * NUM_COUNTERS + MIN_TOKENS)
        value = tl.where(too_early & ((tally & IS_STOP) != 0), float("-inf"), value)
        tl.store(place, value, mask=inside)


@triton.jit
def row_max_kernel(logits, stride, best, token_ids, vocab_size, TILE: tl.constexpr):
    """A program per row: its largest value and that one's first place; a NaN in the row makes `best` NaN."""
    sample = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    largest = tl.full([TILE], float("-inf"), tl.float32)
    first = tl.zeros([TILE], tl.int32)
    not_numbers = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        column = start + lane
        value = tl.load(logits + sample * stride + column, mask=column < vocab_size, other=float("-inf"))
        not_numbers |= (value != value).to(tl.int32)
        better = value > largest
        largest = tl.where(better, value, largest)
        first = tl.where(better, column, first)
    maximum = tl.max(largest, 0)
    tl.store(token_ids + sample, tl.min(tl.where(largest == maximum, first, vocab_size - 1), 0))
    tl.store(best + sample, tl.where(tl.max(not_numbers, 0) > 0, float("nan"), maximum))


@triton.jit
def _distances(row_logits, column, vocab_size, best, temperature):
    """`a` of a tile of tokens; infinite past the vocabulary's end."""
    inside = column < vocab_size
    distance = (best - tl.load(row_logits + column, mask=inside, other=float("-inf"))) / temperature
    # A masked token is as far as tokens can be: it still counts for top_k, without weight.
    return tl.where(inside, tl.minimum(distance, _FURTHEST), float("inf"))


@triton.jit
def _weights(distance):
    return tl.where(distance < WEIGHTLESS, tl.exp(-distance), 0.0)


@triton.jit
def _edges(index):
    return tl.where(index == _NUM_EDGES - 1, _FURTHEST, (index + 1).to(tl.float32) * _EDGE_STEP)


@triton.jit(do_not_specialize_on_alignment=["rows", "num_candidates", "edges", "masses"])
def candidates_kernel(
    logits,
    stride,
    rows,
    best,
    params,
    counters,
    candidates,
    num_candidates,
    edges,
    masses,
    vocab_size,
    TILE: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
):
    """A program per row: the nearest edge that leaves all that top_k or top_p may keep, and its candidates.

    candidates [S, MAX_CANDIDATES]: their `a`, in no order that matters, written when they are not more;
    num_candidates, edges, masses [S]: how many, the edge, and the weight of the whole row.
    """
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample)
    maximum = tl.load(best + sample)
    temperature = tl.load(params + row * NUM_PARAMS + TEMPERATURE)
    top_p = tl.load(params + row * NUM_PARAMS + TOP_P)
    top_k = tl.load(counters + row * NUM_COUNTERS + TOP_K)
    # A row that has failed has no finite maximum.
    if (temperature > 0) & ((top_k > 0) | (top_p < 1)) & (tl.abs(maximum) < float("inf")):
        row_logits = logits + sample * stride
        lane = tl.arange(0, TILE)
        index = tl.arange(0, _NUM_EDGES)
        edge = _edges(index)
        counts = tl.zeros([_NUM_EDGES, TILE], tl.int32)
        weights = tl.zeros([_NUM_EDGES, TILE], tl.float32)
        for start in range(0, vocab_size, TILE):
            distance = _distances(row_logits, start + lane, vocab_size, maximum, temperature)
            below = distance[None, :] <= edge[:, None]
            counts += below.to(tl.int32)
            weights += tl.where(below, _weights(distance)[None, :], 0.0)
        count = tl.sum(counts, 1)
        mass = tl.sum(weights, 1)
        whole = tl.sum(tl.where(index == _NUM_EDGES - 1, mass, 0.0), 0)
        suffices = tl.where(top_k > 0, count >= top_k, mass >= top_p * whole)
        chosen = tl.min(tl.where(suffices, index, _NUM_EDGES - 1), 0)
        limit = tl.sum(tl.where(index == chosen, edge, 0.0), 0)
        total = tl.sum(tl.where(index == chosen, count, 0), 0)
        tl.store(num_candidates + sample, total)
        tl.store(edges + sample, limit)
        tl.store(masses + sample, whole)
        if total <= MAX_CANDIDATES:
            position = 0
            for start in range(0, vocab_size, TILE):
                distance = _distances(row_logits, start + lane, vocab_size, maximum, temperature)
                taken = (distance <= limit).to(tl.int32)
                place = position + tl.cumsum(taken, 0) - 1
                tl.store(candidates + sample * MAX_CANDIDATES + place, distance, mask=taken > 0)
                position += tl.sum(taken, 0)


@triton.jit
def _measure(distance, row_logits, vocab_size, best, temperature, are_candidates, limit, TILE: tl.constexpr):
    """How many tokens have an `a` whose bits are at most `limit`, and their weight."""
    if are_candidates:
        below = distance.to(tl.int32, bitcast=True) <= limit
        count = tl.sum(below.to(tl.int32), 0)
        mass = tl.sum(tl.where(below, _weights(distance), 0.0), 0)
    else:
        counts = tl.zeros([TILE], tl.int32)
        weights = tl.zeros([TILE], tl.float32)
        for start in range(0, vocab_size, TILE):
            tile = _distances(row_logits, start + tl.arange(0, TILE), vocab_size, best, temperature)
            within = tile.to(tl.int32, bitcast=True) <= limit
            counts += within.to(tl.int32)
            weights += tl.where(within, _weights(tile), 0.0)
        count = tl.sum(counts, 0)
        mass = tl.sum(weights, 0)
    return count, mass


@triton.jit(do_not_specialize_on_alignment=["rows", "num_candidates", "edges", "masses", "limits"])
def limits_kernel(
    logits,
    stride,
    rows,
    best,
    params,
    counters,
    candidates,
    num_candidates,
    edges,
    masses,
    limits,
    vocab_size,
    TILE: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
):
    """A program per row: limits [S] float32, the largest `a` that top_k, top_p and min_p keep."""
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample)
    maximum = tl.load(best + sample)
    temperature = tl.load(params + row * NUM_PARAMS + TEMPERATURE)
    top_p = tl.load(params + row * NUM_PARAMS + TOP_P)
    top_k = tl.load(counters + row * NUM_COUNTERS + TOP_K)
    limit = tl.load(params + row * NUM_PARAMS + MIN_P_LIMIT)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1)) & (tl.abs(maximum) < float("inf")):
        row_logits = logits + sample * stride
        total = tl.load(num_candidates + sample)
        few = total <= MAX_CANDIDATES
        lane = tl.arange(0, MAX_CANDIDATES)
        distance = tl.load(candidates + sample * MAX_CANDIDATES + lane, mask=few & (lane < total), other=float("inf"))
        mass = tl.load(masses + sample)
        # The bits of the largest `a` kept lie in (low, high].
        high = tl.load(edges + sample).to(tl.int32, bitcast=True)
        if top_k > 0:
            low = -1
            while high - low > 1:
                middle = low + (high - low) // 2
                count, _ = _measure(distance, row_logits, vocab_size, maximum, temperature, few, middle, TILE)
                if count >= top_k:
                    high = middle
                else:
                    low = middle
            # Of those that tie at the edge, top_p's share counts no more than top_k asks for.
            count, mass = _measure(distance, row_logits, vocab_size, maximum, temperature, few, high - 1, TILE)
            at_edge = _weights(high.to(tl.float32, bitcast=True))
            mass += (top_k - count).to(tl.float32) * at_edge
        if top_p < 1:
            target = top_p * mass
            low = -1
            while high - low > 1:
                middle = low + (high - low) // 2
                _, reached = _measure(distance, row_logits, vocab_size, maximum, temperature, few, middle, TILE)
                if reached >= target:
                    high = middle
                else:
                    low = middle
        limit = tl.minimum(limit, high.to(tl.float32, bitcast=True))
    tl.store(limits + sample, limit)


@triton.jit
def _mix(z):
    """SplitMix64's finalizer, as in noise.py."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _log_exponential(key, token):
    """The logarithm of exponential noise, a function of key and token alone."""
    bits = (_mix((key ^ token.to(tl.uint64)) + 0x9E3779B97F4A7C15) >> 32).to(tl.uint32)
    uniform = tl.minimum(bits.to(tl.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)
    # -log(1 - uniform); where it is small, what decides, 1 - uniform would lose its bits.
    series = uniform * (1 + uniform * (0.5 + uniform * (1 / 3 + uniform * 0.25)))
    return tl.log(tl.where(uniform < 2.0**-6, series, -tl.log(1 - uniform)))


@triton.jit(do_not_specialize_on_alignment=["rows", "output_indices", "limits"])
def draw_kernel(
    logits,
    stride,
    rows,
    output_indices,
    best,
    token_ids,
    params,
    counters,
    limits,
    last_tokens,
    tallies,
    vocab_size,
    TILE: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    IS_TRUNCATED: tl.constexpr,
):
    """A program per row: token_ids [S] int32 holds the likeliest token and gets the drawn one, -1 where the
    row's logits are not finite. last_tokens [max_num_seqs] int64 gets it too, and the row's tally."""
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample)
    maximum = tl.load(best + sample)
    token = tl.load(token_ids + sample)
    if tl.abs(maximum) < float("inf"):
        if IS_RANDOM:
            temperature = tl.load(params + row * NUM_PARAMS + TEMPERATURE)
            if temperature > 0:
                limit = WEIGHTLESS
                if IS_TRUNCATED:
                    limit = tl.minimum(limit, tl.load(limits + sample))
                counter = tl.load(output_indices + sample).to(tl.uint64)
                key = tl.load(counters + row * NUM_COUNTERS + KEY).to(tl.uint64)
                key = _mix((key ^ counter) + 0x9E3779B97F4A7C15)
                row_logits = logits + sample * stride
                lane = tl.arange(0, TILE)
                largest = tl.full([TILE], float("-inf"), tl.float32)
                drawn = tl.zeros([TILE], tl.int32)
                for start in range(0, vocab_size, TILE):
                    distance = _distances(row_logits, start + lane, vocab_size, maximum, temperature)
                    # Truncation leaves nothing of most tiles.
                    if tl.min(distance, 0) <= limit:
                        score = -distance - _log_exponential(key, start + lane)
                        better = (distance <= limit) & (distance < WEIGHTLESS) & (score > largest)
                        largest = tl.where(better, score, largest)
                        drawn = tl.where(better, start + lane, drawn)
                token = tl.min(tl.where(largest == tl.max(largest, 0), drawn, vocab_size), 0)
                tl.store(token_ids + sample, token)
        tl.store(last_tokens + row, token.to(tl.int64))
        slot = tl.load(counters + row * NUM_COUNTERS + SLOT)
        if slot >= 0:
            tally = tallies + slot * vocab_size + token
            tl.store(tally, tl.load(tally) + 1)
    else:
        tl.store(token_ids + sample, -1)
        # A stand-in, so that steps already planned for the row can run.
        tl.store(last_tokens + row, tl.zeros([], tl.int64))
