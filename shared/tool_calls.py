"""Parts of tool calls on their way to a client, and how their length is counted: see Delta.num_call_bytes."""

from __future__ import annotations

from collections.abc import Iterable

from quartet.shared.messages import ToolCallDelta


def num_call_bytes(parts: Iterable[ToolCallDelta]) -> int:
    """A call's id and name count as one byte, its arguments by UTF-8."""
    return sum(bool(part.name) + len(part.arguments.encode()) for part in parts)


def after_call_bytes(parts: Iterable[ToolCallDelta], count: int) -> list[ToolCallDelta]:
    """What follows the first `count` bytes."""
    rest: list[ToolCallDelta] = []
    for part in parts:
        head, arguments = bool(part.name), part.arguments.encode()
        if count >= head + len(arguments):
            count -= head + len(arguments)
        elif count:
            rest.append(ToolCallDelta(part.index, arguments=arguments[count - head :].decode("utf-8", "ignore")))
            count = 0
        else:
            rest.append(part)
    return rest


def joined(parts: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """The same with one part for each call."""
    calls: list[ToolCallDelta] = []
    for part in parts:
        if calls and calls[-1].index == part.index:
            last = calls[-1]
            calls[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + part.arguments)
        else:
            calls.append(part)
    return calls
