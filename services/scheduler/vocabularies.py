"""What tokenizers have told of their vocabularies, for an executor that keeps outputs to grammars."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from quartet.shared.log import get_logger
from quartet.shared.messages import Vocabulary

MAX_VOCABULARIES = 4

_log = get_logger()


class Vocabularies:
    """The last few that came whole, by fingerprint, in parts as they came."""

    def __init__(self) -> None:
        self._whole: OrderedDict[str, list[Vocabulary]] = OrderedDict()
        self._coming: OrderedDict[str, list[Vocabulary]] = OrderedDict()

    def add(self, part: Vocabulary) -> list[Vocabulary]:
        """All parts, when this one completes it. What does not follow on the parts before is dropped with them."""
        parts = self._coming.pop(part.fingerprint, [])
        if part.start == 0:
            parts = []
        known = sum(len(p.tokens) for p in parts)
        if part.start != known or not part.tokens or known + len(part.tokens) > part.num_tokens:
            _log.warning("part of a vocabulary dropped", start=part.start, known=known, num_tokens=part.num_tokens)
            return []
        parts.append(part)
        if known + len(part.tokens) < part.num_tokens:
            self._coming[part.fingerprint] = parts
            _bound(self._coming)
            return []
        self._whole[part.fingerprint] = parts
        self._whole.move_to_end(part.fingerprint)
        _bound(self._whole)
        return parts

    def parts(self) -> Iterator[Vocabulary]:
        """Of all, the one that came last at the end."""
        for parts in self._whole.values():
            yield from parts


def _bound(vocabularies: OrderedDict[str, list[Vocabulary]]) -> None:
    if len(vocabularies) > MAX_VOCABULARIES:
        vocabularies.popitem(last=False)
