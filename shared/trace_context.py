"""The W3C trace context that a request carries: its `traceparent`, or "" where there is none."""

from __future__ import annotations

import contextvars
import re

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
# As many bytes as version 00 has; later versions may be longer, and begin like it.
_LENGTH = 55
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16

# What the client of the call that is being handled has sent.
client_trace: contextvars.ContextVar[str] = contextvars.ContextVar("client_trace", default="")


def checked(text: str | bytes | None) -> str:
    """`text` as version 00 of a traceparent; "" when it is none that can be followed."""
    if not text:
        return ""
    if isinstance(text, bytes):
        text = text[: 4 * _LENGTH].decode("latin-1")
    if len(text) > _LENGTH:
        # A later version may say more, after a dash; version 00 may not.
        if text[:2] == "00" or text[_LENGTH] != "-":
            return ""
        text = text[:_LENGTH]
    if not _TRACEPARENT.fullmatch(text):
        return ""
    version, trace_id, span_id, flags = text.split("-")
    if version == "ff" or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return ""
    return f"00-{trace_id}-{span_id}-{flags}"


def is_sampled(traceparent: str) -> bool:
    """Whether spans of it are wanted; of a `checked` one."""
    return bool(traceparent) and bool(int(traceparent[-2:], 16) & 1)
