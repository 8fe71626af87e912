"""The sampling state of the persistent batch: a column per parameter, a place per row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from quartet.services.executor.structured_rows import StructuredRows
from quartet.services.executor.token_counts import TokenCounts
from quartet.shared.sampling_params import SamplingParams

# A temperature below this is greedy: the runner-up would need to be within some 1e-4 to be seen.
GREEDY_TEMPERATURE = 1e-5

IntArray = npt.NDArray[np.int64]


class SamplingRows:
    """Columns of length `max_num_seqs`, and what few rows have (bias, penalties, stop ids where there are
    min_tokens, ...) by row in dicts.

    Token ids outside the vocabulary in a request's bias or stop ids are left out: the model cannot
    produce them.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float64)
        self.presence_penalty = np.zeros(max_num_seqs, np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, np.float32)
        self.repetition_penalty = np.ones(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.choice_index = np.zeros(max_num_seqs, np.uint64)
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int64)
        self.is_random = np.zeros(max_num_seqs, bool)
        self.logit_bias: dict[int, tuple[IntArray, npt.NDArray[np.float32]]] = {}
        self.token_counts: dict[int, TokenCounts] = {}
        self.stop_ids: dict[int, IntArray] = {}
        self.with_logprobs: set[int] = set()
        self.structured = StructuredRows(vocab_size)

    def add(
        self,
        req_index: int,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        choice_index: int,
        token_ids: npt.NDArray[np.int32],
        num_prompt_tokens: int,
        vocabulary: str = "",
    ) -> None:
        """`token_ids` [N]: the prompt, then the outputs so far. `vocabulary`: see NewRow."""
        self.remove([req_index])
        self.temperature[req_index] = params.temperature
        self.top_k[req_index] = params.top_k
        self.top_p[req_index] = params.top_p
        self.min_p[req_index] = params.min_p
        self.presence_penalty[req_index] = params.presence_penalty
        self.frequency_penalty[req_index] = params.frequency_penalty
        self.repetition_penalty[req_index] = params.repetition_penalty
        self.seed[req_index] = params.seed
        self.choice_index[req_index] = choice_index
        self.num_logprobs[req_index] = -1 if params.logprobs is None else params.logprobs
        if params.logprobs is not None:
            self.with_logprobs.add(req_index)
        self.is_random[req_index] = params.temperature >= GREEDY_TEMPERATURE
        bias = {i: value for i, value in params.logit_bias.items() if 0 <= i < self.vocab_size}
        if bias:
            self.logit_bias[req_index] = (
                np.fromiter(bias.keys(), np.int64, len(bias)),
                np.fromiter(bias.values(), np.float32, len(bias)),
            )
        repeats = params.repetition_penalty != 1.0
        if repeats or params.presence_penalty or params.frequency_penalty:
            prompt = token_ids[: num_prompt_tokens if repeats else 0]
            self.token_counts[req_index] = TokenCounts(prompt, token_ids[num_prompt_tokens:])
        self.min_tokens[req_index] = params.min_tokens
        if params.min_tokens > 0:
            stops = {*params.stop_token_ids, *eos_token_ids}
            self.stop_ids[req_index] = np.array([i for i in stops if 0 <= i < self.vocab_size], np.int64)
        if params.structured is not None:
            outputs = token_ids[num_prompt_tokens:].tolist()
            end_ids = {*params.stop_token_ids, *eos_token_ids}
            self.structured.add(req_index, params.structured, vocabulary, outputs, end_ids)

    def remove(self, req_indices: Iterable[int]) -> None:
        for req_index in req_indices:
            self.logit_bias.pop(req_index, None)
            self.token_counts.pop(req_index, None)
            self.stop_ids.pop(req_index, None)
            self.with_logprobs.discard(req_index)
            self.structured.remove(req_index)
            self.min_tokens[req_index] = 0

    def append(self, req_indices: IntArray, token_ids: IntArray) -> None:
        """One new output token for each of the rows."""
        self.structured.append(req_indices, token_ids)
        if self.token_counts:
            for req_index, token_id in zip(req_indices.tolist(), token_ids.tolist(), strict=True):
                if counts := self.token_counts.get(req_index):
                    counts.append(token_id)
