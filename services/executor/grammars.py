"""Vocabularies that the scheduler has sent, and what has been compiled against them."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer

from quartet.shared.log import get_logger
from quartet.shared.messages import Vocabulary
from quartet.shared.sampling_params import StructuredOutput
from quartet.shared.structured_output import build_vocabulary, compile_grammar

MAX_VOCABULARIES = 4
MAX_VOCABULARY = 2**24
MAX_GRAMMARS = 64
MAX_GRAMMAR_BYTES = 4 << 20

_log = get_logger()


class Grammars:
    """Building and compiling happen in the one thread of `pool`, in order."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, "grammar")
        self._vocabularies: OrderedDict[str, tuple[int, Future[LLTokenizer]]] = OrderedDict()
        self._parts: list[Vocabulary] = []
        self._compiled: OrderedDict[tuple[str, StructuredOutput], Future[LLMatcher]] = OrderedDict()
        self._num_bytes = 0

    def add(self, part: Vocabulary) -> None:
        """Built when it is whole; one that does not follow on the part before is dropped, with all before it."""
        if part.start == 0:
            self._parts = []
        known = sum(len(p.tokens) for p in self._parts)
        first = self._parts[0] if self._parts else part
        end = known + len(part.tokens)
        same = (part.fingerprint, part.num_tokens) == (first.fingerprint, first.num_tokens)
        if part.start != known or not same or not part.tokens or not end <= part.num_tokens <= MAX_VOCABULARY:
            _log.warning("part of a vocabulary dropped", start=part.start, known=known, num_tokens=part.num_tokens)
            self._parts = []
            return
        self._parts.append(part)
        if end == part.num_tokens:
            parts, self._parts = self._parts, []
            self._take(part.fingerprint, part.num_tokens, parts)

    def num_tokens(self, fingerprint: str) -> int | None:
        """Of a vocabulary; None when it is not here."""
        found = self._vocabularies.get(fingerprint)
        return None if found is None else found[0]

    def compile(self, structured: StructuredOutput, fingerprint: str) -> Future[LLMatcher]:
        """A matcher at the beginning, to be copied; fails with GrammarError. The vocabulary must be here."""
        key = (fingerprint, structured)
        compiled = self._compiled.get(key)
        if compiled is None:
            _, vocabulary = self._vocabularies[fingerprint]
            compiled = self.pool.submit(lambda: compile_grammar(structured, vocabulary.result()))
            self._compiled[key] = compiled
            self._num_bytes += len(structured.text)
            while len(self._compiled) > MAX_GRAMMARS or (
                self._num_bytes > MAX_GRAMMAR_BYTES and len(self._compiled) > 1
            ):
                (_, oldest), _ = self._compiled.popitem(last=False)
                self._num_bytes -= len(oldest.text)
        self._compiled.move_to_end(key)
        return compiled

    def _take(self, fingerprint: str, num_tokens: int, parts: list[Vocabulary]) -> None:
        if self.num_tokens(fingerprint) != num_tokens:
            tokens = [token for part in parts for token in part.tokens]
            special = [i for part in parts for i in part.special_token_ids if 0 <= i < num_tokens]
            built = self.pool.submit(build_vocabulary, tokens, special)
            self._vocabularies[fingerprint] = (num_tokens, built)
            _log.info("vocabulary", fingerprint=fingerprint[:12], num_tokens=num_tokens)
        self._vocabularies.move_to_end(fingerprint)
        if len(self._vocabularies) > MAX_VOCABULARIES:
            gone, _ = self._vocabularies.popitem(last=False)
            for key in [key for key in self._compiled if key[0] == gone]:
                del self._compiled[key]
                self._num_bytes -= len(key[1].text)
