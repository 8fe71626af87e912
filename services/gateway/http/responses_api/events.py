"""The events of a stream of /v1/responses; `type` is the event's name too, and sequence_number counts from 0."""

from __future__ import annotations

import msgspec

from quartet.services.gateway.http.responses import ChatTokenLogprob
from quartet.services.gateway.http.responses_api.bodies import OutputItem, OutputText, Response


class Event(msgspec.Struct, tag_field="type", kw_only=True):
    sequence_number: int = 0


class _OfResponse(Event, kw_only=True):
    response: Response


class Created(_OfResponse, tag="response.created", kw_only=True):
    pass


class InProgress(_OfResponse, tag="response.in_progress", kw_only=True):
    pass


class Completed(_OfResponse, tag="response.completed", kw_only=True):
    pass


class Incomplete(_OfResponse, tag="response.incomplete", kw_only=True):
    """max_output_tokens, or the end of the context, was reached."""


class Failed(_OfResponse, tag="response.failed", kw_only=True):
    """The last event of a stream that an error ends."""


class ItemAdded(Event, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: OutputItem


class ItemDone(Event, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: OutputItem


class _OfItem(Event, kw_only=True):
    item_id: str
    output_index: int


class _OfPart(_OfItem, kw_only=True):
    content_index: int = 0


class PartAdded(_OfPart, tag="response.content_part.added", kw_only=True):
    part: OutputText


class PartDone(_OfPart, tag="response.content_part.done", kw_only=True):
    part: OutputText


class OutputTextDelta(_OfPart, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[ChatTokenLogprob] = []


class OutputTextDone(_OfPart, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[ChatTokenLogprob] = []


class ArgumentsDelta(_OfItem, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ArgumentsDone(_OfItem, tag="response.function_call_arguments.done", kw_only=True):
    name: str
    arguments: str


ResponsesEvent = (
    Created
    | InProgress
    | ItemAdded
    | PartAdded
    | OutputTextDelta
    | OutputTextDone
    | PartDone
    | ArgumentsDelta
    | ArgumentsDone
    | ItemDone
    | Completed
    | Incomplete
    | Failed
)
