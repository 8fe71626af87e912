"""A tokenizer that says what it is told to, and the named events that a gateway makes of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

from support.gateway_fakes import AnsweringPeer, delta
from support.http import Reply

from quartet.shared.messages import Deltas, ErrorCode, Failed, FinishReason, Submit, TokenLogprobs, ToolCallDelta


def scripted(
    *parts: str | list[ToolCallDelta],
    finish: FinishReason = FinishReason.STOP,
    stop_reason: str | int | None = None,
    error: ErrorCode | None = None,
) -> type[AnsweringPeer]:
    """A tokenizer that says each of `parts`, a text or tool call parts, in a delta of its own."""

    class Peer(AnsweringPeer):
        def speak(self, submit: Submit, upto: int | None = None) -> None:
            text_bytes = call_bytes = 0
            for i, part in enumerate(parts):
                text, calls = (part, []) if isinstance(part, str) else ("", part)
                text_bytes += len(text.encode())
                call_bytes += sum(bool(call.name) + len(call.arguments.encode()) for call in calls)
                last = i == len(parts) - 1 and error is None
                fields = {
                    "tool_calls": calls,
                    "num_call_bytes": call_bytes,
                    "stop_reason": stop_reason if last else None,
                }
                if submit.sampling.logprobs is not None:
                    fields["logprobs"] = [TokenLogprobs(100 + i, -0.5, 1, [(100 + i, -0.5)], [text.encode()] * 2)]
                reason = finish if last else None
                self._say(Deltas([delta(submit, i, [100 + i], text, text_bytes, finish=reason, **fields)]))
            if error is not None:
                self._say(Failed(submit.request_id, submit.attempt, error, "it broke"))

    return Peer


CALLS = scripted(
    "Let me see.",
    [ToolCallDelta(0, "call_a", "weather", "")],
    [ToolCallDelta(0, arguments='{"city": ')],
    [ToolCallDelta(0, arguments='"Ulm"}'), ToolCallDelta(1, "call_b", "weather", "{}")],
    "\n",
)


def named_events(reply: Reply) -> list[dict[str, Any]]:
    """Each event's data, checked for the name in front of it."""
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream"), reply
    *blocks, rest = reply.body.decode().split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        first, second = block.split("\n")
        events.append(json.loads(second.removeprefix("data: ")))
        assert first == f"event: {events[-1]['type']}"
    return events


def runs(kinds: Iterable[str]) -> list[str]:
    """Each kind once for any number of it in a row."""
    return [kind for kind, _ in itertools.groupby(kinds)]
