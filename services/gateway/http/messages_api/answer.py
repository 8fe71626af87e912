"""What a generation says, as a message and as the events of one."""

from __future__ import annotations

from typing import Any

import msgspec

from quartet.services.gateway.events import Chunk, Completed, Event
from quartet.services.gateway.http.blocks import Block, Blocks, Change, Step
from quartet.services.gateway.http.messages_api.bodies import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageDelta,
    MessagesAnswer,
    MessagesEvent,
    MessageStart,
    MessageStop,
    MessagesUsage,
    StopDelta,
    TextBlock,
    ToolUseBlock,
)
from quartet.shared.messages import FinishReason

_encode = msgspec.json.encode


class Answer:
    """A message that grows."""

    def __init__(self, request_id: int, model: str, num_prompt_tokens: int, may_call: bool) -> None:
        self._blocks = Blocks(may_call=may_call)
        self._usage = MessagesUsage(num_prompt_tokens, 0)
        self._head: dict[str, Any] = {"id": f"msg_{request_id:016x}", "model": model}
        self._text_head = b""

    def message(self) -> MessagesAnswer:
        """As it is now."""
        content = [_block(block) for block in self._blocks.blocks]
        reason, sequence = self._stop() if self._blocks.finish_reason is not None else (None, None)
        usage = self._usage
        return MessagesAnswer(**self._head, content=content, stop_reason=reason, stop_sequence=sequence, usage=usage)

    def begin(self) -> bytes:
        return event(MessageStart(self.message()))

    def add(self, news: Event) -> list[Change]:
        match news:
            case Chunk():
                return self._blocks.add(news)
            case Completed():
                # Not before the end is it known how much of the prompt was in the cache.
                cached = news.cached_tokens
                self._usage = MessagesUsage(news.prompt_tokens - cached, news.completion_tokens, cached)
        return []

    def write(self, changes: list[Change]) -> bytes:
        return b"".join([self._write(change) for change in changes])

    def end(self) -> bytes:
        return event(MessageDelta(StopDelta(*self._stop()), self._usage)) + event(MessageStop())

    def _write(self, change: Change) -> bytes:
        step, block = change.step, change.block
        match step:
            case Step.BEGIN:
                self._text_head = (
                    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
                    b'"delta":{"type":"text_delta","text":' % block.index
                )
                empty = ToolUseBlock(block.call_id, block.name, {}) if block.call_id else TextBlock("")
                return event(ContentBlockStart(block.index, empty))
            case Step.GROW if block.call_id:
                return event(ContentBlockDelta(block.index, InputJsonDelta(change.piece)))
            case Step.GROW:
                return self._text_head + _encode(change.piece) + b"}}\n\n"
            case Step.END:
                return event(ContentBlockStop(block.index))

    def _stop(self) -> tuple[str, str | None]:
        """stop_reason and stop_sequence."""
        if self._blocks.finish_reason is not FinishReason.STOP:
            return "max_tokens", None
        if isinstance(self._blocks.stop_reason, str):
            return "stop_sequence", self._blocks.stop_reason
        return ("tool_use" if self._blocks.called else "end_turn"), None


def event(data: MessagesEvent) -> bytes:
    return f"event: {data.__struct_config__.tag}\ndata: ".encode() + _encode(data) + b"\n\n"


def _block(block: Block) -> TextBlock | ToolUseBlock:
    if not block.call_id:
        return TextBlock(block.content)
    try:
        arguments = msgspec.json.decode(block.content, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        arguments = {}
    return ToolUseBlock(block.call_id, block.name, arguments)
