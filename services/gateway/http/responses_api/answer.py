"""What a generation says, as a response and as the events of one."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from quartet.services.gateway import events as generation
from quartet.services.gateway.http.blocks import Block, Blocks, Change, Step
from quartet.services.gateway.http.errors import ApiError
from quartet.services.gateway.http.logprobs import chat_logprobs
from quartet.services.gateway.http.responses import ChatTokenLogprob
from quartet.services.gateway.http.responses_api import events
from quartet.services.gateway.http.responses_api.bodies import (
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    Response,
    ResponseError,
    ResponsesRequest,
    ResponsesUsage,
    Status,
    TextConfig,
    TextFormat,
)
from quartet.services.gateway.http.responses_api.convert import wants_logprobs
from quartet.services.gateway.http.responses_api.events import Event
from quartet.shared.messages import FinishReason, TokenLogprobs

_encode = msgspec.json.encode


class Answer:
    """A response that grows."""

    def __init__(self, body: ResponsesRequest, request_id: int, model: str) -> None:
        self._blocks = Blocks(may_call=bool(body.tools), never_empty=True)
        self._request_id = request_id
        self._num_top = body.top_logprobs or 0
        self._plain = not wants_logprobs(body)
        self._usage: ResponsesUsage | None = None
        self._sequence_number = 0
        self._text_head = b""
        self._echo = _echo(body) | {
            "id": f"resp_{request_id:016x}",
            "model": model,
            "created_at": int(time.time()),
        }

    def response(self) -> Response:
        """As it is now."""
        status = self._status()
        ended = status != "in_progress"
        return Response(
            **self._echo,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=[self._item(block) for block in self._blocks.blocks],
            usage=self._usage if ended else None,
        )

    def begin(self) -> bytes:
        response = self.response()
        return self._event(events.Created(response=response)) + self._event(events.InProgress(response=response))

    def add(self, news: generation.Event) -> list[Change]:
        match news:
            case generation.Chunk():
                return self._blocks.add(news)
            case generation.Completed():
                prompt, output = news.prompt_tokens, news.completion_tokens
                self._usage = ResponsesUsage(prompt, InputTokensDetails(news.cached_tokens), output, prompt + output)
        return []

    def write(self, changes: list[Change]) -> bytes:
        return b"".join([data for change in changes for data in self._write(change)])

    def end(self) -> bytes:
        kind = events.Completed if self._status() == "completed" else events.Incomplete
        return self._event(kind(response=self.response()))

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response = self.response()
        response.status = "failed"
        response.error = ResponseError("rate_limit_exceeded" if error.status == 429 else code, error.detail.message)
        return self._event(events.Failed(response=response))

    def _write(self, change: Change) -> list[bytes]:
        block, piece = change.block, change.piece
        item_id = self._item_id(block)
        place: dict[str, Any] = {"item_id": item_id, "output_index": block.index}
        match change.step:
            case Step.BEGIN:
                parts = [self._event(events.ItemAdded(output_index=block.index, item=self._new_item(block)))]
                if not block.call_id:
                    parts.append(self._event(events.PartAdded(**place, part=OutputText(text=""))))
                    self._text_head = (
                        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
                        b'"item_id":"%s","output_index":%d,"content_index":0,"logprobs":[],"delta":'
                        % (item_id.encode(), block.index)
                    )
                return parts
            case Step.GROW if block.call_id:
                return [self._event(events.ArgumentsDelta(**place, delta=piece))]
            case Step.GROW if self._plain:
                self._sequence_number += 1
                number = self._sequence_number - 1
                return [b'%s%s,"sequence_number":%d}\n\n' % (self._text_head, _encode(piece), number)]
            case Step.GROW:
                logprobs = self._logprobs(change.logprobs)
                return [self._event(events.OutputTextDelta(**place, delta=piece, logprobs=logprobs))]
            case Step.END:
                item = self._item(block)
                ends: list[Event] = []
                if isinstance(item, OutputMessage):
                    (part,) = item.content
                    ends.append(events.OutputTextDone(**place, text=part.text, logprobs=part.logprobs))
                    ends.append(events.PartDone(**place, part=part))
                else:
                    ends.append(events.ArgumentsDone(**place, name=item.name, arguments=item.arguments))
                return [self._event(event) for event in (*ends, events.ItemDone(output_index=block.index, item=item))]

    def _event(self, event: Event) -> bytes:
        event.sequence_number = self._sequence_number
        self._sequence_number += 1
        return f"event: {event.__struct_config__.tag}\ndata: ".encode() + _encode(event) + b"\n\n"

    def _status(self) -> Status:
        reason = self._blocks.finish_reason
        if reason is None:
            return "in_progress"
        return "completed" if reason is FinishReason.STOP else "incomplete"

    def _item_id(self, block: Block) -> str:
        return f"{'fc' if block.call_id else 'msg'}_{self._request_id:016x}{block.index:04x}"

    def _new_item(self, block: Block) -> OutputItem:
        item_id = self._item_id(block)
        if block.call_id:
            return OutputCall(id=item_id, status="in_progress", call_id=block.call_id, name=block.name, arguments="")
        return OutputMessage(id=item_id, status="in_progress", content=[])

    def _item(self, block: Block) -> OutputItem:
        """What `max_output_tokens` cut off is incomplete, and that is the last item."""
        item = self._new_item(block)
        if block.ended:
            last = block.index == len(self._blocks.blocks) - 1
            item.status = "incomplete" if last and self._status() == "incomplete" else "completed"
        if isinstance(item, OutputCall):
            item.arguments = block.content
        else:
            item.content = [OutputText(text=block.content, logprobs=self._logprobs(block.logprobs))]
        return item

    def _logprobs(self, entries: list[TokenLogprobs]) -> list[ChatTokenLogprob]:
        return [] if self._plain else chat_logprobs(entries, self._num_top).content


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    text = body.text or TextConfig()
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": body.reasoning,
        "safety_identifier": body.safety_identifier,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": TextConfig(text.format or TextFormat("text"), text.verbosity),
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "user": body.user,
    }
