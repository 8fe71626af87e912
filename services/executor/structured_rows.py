"""Rows whose output must follow a grammar: a matcher each, and the tokens that it allows next.

Matchers are advanced and masks computed in a thread, for which the library releases the GIL: between a token's
arrival and the end of the next forward pass there is time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from quartet.services.executor.allowed_tokens import AllowedTokens
from quartet.services.executor.grammars import Grammars
from quartet.shared.messages import Vocabulary
from quartet.shared.sampling_params import StructuredOutput
from quartet.shared.structured_output import NO_TOKEN, GrammarError, why

IntArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

# Of the thread's own time. Usual is a ten-thousandth; who needs more would keep everyone waiting again and again.
MAX_MASK_SECONDS = 0.5


class StructuredRows:
    """Rows by req_index. All methods but the thread's work are for the main thread."""

    def __init__(self, vocab_size: int) -> None:
        self._grammars = Grammars()
        self._rows: dict[int, _Row] = {}
        self._thread = ThreadPoolExecutor(1, "masks")
        self._advanced: Future[None] | None = None
        self._num_bytes = -(-vocab_size // 64) * 8

    def add_vocabulary(self, part: Vocabulary) -> None:
        self._grammars.add(part)

    def add(
        self, req_index: int, structured: StructuredOutput, vocabulary: str, outputs: Sequence[int], end_ids: set[int]
    ) -> None:
        """`outputs` so far; `end_ids` end the output where it is complete."""
        # Bits of its own: what a thread still writes for the row's last occupant must not reach this one.
        row = self._rows[req_index] = _Row(np.zeros(self._num_bytes, np.uint8), end_ids)
        num_tokens = self._grammars.num_tokens(vocabulary)
        if num_tokens is None:
            row.failure = "the vocabulary of its structured output has not been sent"
            return
        compiled = self._grammars.compile(structured, vocabulary)
        outputs = list(outputs)
        row.started = self._grammars.pool.submit(lambda: row.start(compiled, num_tokens, outputs))

    def remove(self, req_index: int) -> None:
        row = self._rows.pop(req_index, None)
        if row is not None and row.started is not None:
            row.started.cancel()

    def any(self, rows: IntArray) -> bool:
        """Whether one of these rows is structured."""
        return bool(self._rows) and any(req_index in self._rows for req_index in rows.tolist())

    def append(self, req_indices: IntArray, token_ids: IntArray) -> None:
        """One new output token for each of the rows."""
        if not self._rows:
            return
        told = [
            (row, token_id)
            for req_index, token_id in zip(req_indices.tolist(), token_ids.tolist(), strict=True)
            if (row := self._rows.get(req_index)) is not None
        ]
        for row, _ in told:
            row.wait()
        if told:
            self._advanced = self._thread.submit(_advance, told)

    def allowed(self, rows: IntArray) -> AllowedTokens | None:
        """What the next token of each structured row among `rows` may be; None where there is none. Waits."""
        if not self._rows:
            return None
        found = [
            (place, row)
            for place, req_index in enumerate(rows.tolist())
            if (row := self._rows.get(req_index)) is not None
        ]
        if not found:
            return None
        for _, row in found:
            row.wait()
        if self._advanced is not None:
            self._advanced.result()
        # Of a row that has failed no token counts, and others are not to be troubled by it.
        usable = [(place, row) for place, row in found if not row.failure]
        bits = np.empty((len(usable), self._num_bytes), np.uint8)
        for i, (_, row) in enumerate(usable):
            bits[i] = row.bits
        return AllowedTokens(np.array([place for place, _ in usable], np.int64), bits)

    def failure(self, req_index: int) -> str:
        """Why the row cannot go on; empty when it can. As of the last call of `allowed`."""
        row = self._rows.get(req_index)
        return row.failure if row is not None else ""

    def invalid(self, req_index: int) -> bool:
        """Whether it is for what was asked that the row cannot go on."""
        row = self._rows.get(req_index)
        return row is not None and row.invalid

    def failed(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """[R] whether a row cannot go on."""
        if not self._rows:
            return np.zeros(len(rows), bool)
        return np.array([bool(self.failure(req_index)) for req_index in rows.tolist()], bool)


class _Row:
    """`bits` [8 ceil(V / 64)] is written by the threads: by `start` before `started` is done, then by `advance`."""

    def __init__(self, bits: ByteArray, end_ids: set[int]) -> None:
        self.started: Future[None] | None = None
        self.failure = ""
        self.invalid = False
        self.bits = bits
        self._end_ids = end_ids
        self._matcher: LLMatcher | None = None
        self._num_tokens = 0
        self._mask = np.zeros(0, np.uint8)
        self._view = self._mask.data
        self._pointer = 0
        self._ended = False

    def wait(self) -> None:
        """Until it has started."""
        if self.started is not None:
            self.started.result()
            self.started = None

    def start(self, compiled: Future[LLMatcher], num_tokens: int, outputs: list[int]) -> None:
        try:
            self._matcher = compiled.result().deep_copy()
        except GrammarError as error:
            self._refuse(str(error))
            return
        self._num_tokens = num_tokens
        self._mask = np.zeros(-(-(num_tokens + 1) // 32) * 4, np.uint8)
        self._view, self._pointer = self._mask.data, self._mask.ctypes.data
        self._end_ids = {i for i in self._end_ids if 0 <= i < num_tokens}
        if outputs and not self._matcher.consume_tokens(outputs):
            self.failure = "the outputs so far do not follow its structured output"
            return
        self._timed(lambda: None)

    def advance(self, token_id: int) -> None:
        if self.failure or self._ended:
            return
        if token_id in self._end_ids:
            # What is sampled behind the end, by a plan that was made before it was known, is dropped.
            self._ended = True
            self.bits[:] = 0xFF
            return
        assert self._matcher is not None
        matcher = self._matcher
        self._timed(lambda: matcher.consume_token(token_id))

    def _timed(self, advance: Callable[[], object]) -> None:
        started = time.thread_time()
        advance()
        self._compute_mask()
        if not self.failure and time.thread_time() - started > MAX_MASK_SECONDS:
            self._refuse("it takes too long to follow")

    def _compute_mask(self) -> None:
        assert self._matcher is not None
        matcher, mask, end = self._matcher, self._view, self._num_tokens
        matcher.unsafe_compute_mask_ptr(self._pointer, len(mask))
        if matcher.is_error():
            self._refuse(why(matcher))
            return
        complete = mask[end >> 3] >> (end & 7) & 1
        mask[end >> 3] &= 0xFF ^ (1 << (end & 7))
        for i in self._end_ids:
            mask[i >> 3] &= 0xFF ^ (1 << (i & 7))
            mask[i >> 3] |= complete << (i & 7)
        width = min(len(self.bits), len(mask))
        self.bits[:width] = self._mask[:width]
        # Where nothing can go on and the output is not complete, the library has said so.
        if ((complete and not self._end_ids) or len(mask) > width) and not self.bits.any():
            self._refuse(NO_TOKEN)

    def _refuse(self, reason: str) -> None:
        self.failure, self.invalid = f"structured: {reason}", True


def _advance(told: list[tuple[_Row, int]]) -> None:
    for row, token_id in told:
        row.advance(token_id)
