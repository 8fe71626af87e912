"""What takes a tokenizer's time, told to a gateway that traces."""

from __future__ import annotations

from collections.abc import Callable

from quartet.services.tokenizer.span_log import MAX_SPANS, SpanLog
from quartet.shared.messages import WatchedSpan, WatchedSpans


def test_what_was_noted_is_told_together_and_bounded() -> None:
    now, told, due = [10.0], list[WatchedSpans](), list[Callable[[], None]]()
    log = SpanLog(lambda: now[0], 1000.0, told.append, lambda _, call: due.append(call))
    now[0] = 10.002
    log.add("tokenize", 10.0, 5, request_id=7)
    log.add("detokenize", 10.001, 32)
    assert len(due) == 1 and not told
    due.pop()()
    assert told == [
        WatchedSpans([WatchedSpan("tokenize", 1010.0, 2000, 5, 7), WatchedSpan("detokenize", 1010.001, 1000, 32)])
    ]
    for i in range(MAX_SPANS + 3):
        log.add("detokenize", 10.0, i)
    due.pop()()
    assert [span.num_tokens for span in told[1].spans] == list(range(3, MAX_SPANS + 3))
