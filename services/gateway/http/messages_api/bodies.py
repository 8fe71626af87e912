"""Bodies of /v1/messages: requests, answers and the events of streams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quartet.services.gateway.http.requests import SamplingFields


class ResultPart(msgspec.Struct):
    type: Annotated[str, Meta(description="text")]
    text: str | None = None


class ContentBlock(msgspec.Struct):
    """Fields that answers have and requests do not need are ignored, so that an answer can be sent back."""

    type: Annotated[str, Meta(description="text, tool_use (of an assistant) or tool_result (of a user)")]
    text: str | None = None
    id: Annotated[str | None, Meta(description="of a tool_use")] = None
    name: Annotated[str | None, Meta(description="of a tool_use")] = None
    input: Annotated[dict[str, Any] | None, Meta(description="of a tool_use")] = None
    tool_use_id: Annotated[str | None, Meta(description="of a tool_result: the call that it answers")] = None
    content: Annotated[str | list[ResultPart] | None, Meta(description="of a tool_result")] = None


class MessageParam(msgspec.Struct):
    role: Annotated[str, Meta(description="user, assistant or system")]
    content: str | list[ContentBlock]


class MessagesTool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, Meta(description="a JSON schema")] = None
    type: Annotated[str | None, Meta(description="custom, which it is without")] = None
    strict: bool | None = None


class MessagesToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, Meta(description="auto, any, tool or none")]
    name: Annotated[str | None, Meta(description="with tool: the only one that may be called")] = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, Meta(description="json_schema")]
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: Annotated[OutputFormat | None, Meta(description="what the text must be")] = None
    effort: Annotated[str | None, Meta(description="accepted; has no effect")] = None


class Thinking(msgspec.Struct):
    type: Annotated[str, Meta(description="disabled or adaptive; a model thinks as its chat template has it")]


class MessagesMetadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: Annotated[str | None, Meta(description="whom the request is accounted to, for fair scheduling")] = None


Messages = Annotated[
    list[MessageParam],
    Meta(description="the model goes on with the last one where it is the assistant's"),
]
System = str | list[ResultPart] | None
NoEffect = Annotated[Any, Meta(description="accepted; has no effect")]


class MessagesRequest(SamplingFields, kw_only=True):
    messages: Messages
    max_tokens: Annotated[int, Meta(description="the most tokens to generate")]
    model: Annotated[str | None, Meta(description="one of /v1/models; left out: the model that is served")] = None
    system: System = None
    stop_sequences: Annotated[list[str] | None, Meta(description="strings that end the answer")] = None
    stream: Annotated[bool | None, Meta(description="server-sent events instead of one object")] = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: Annotated[
        dict[str, str | int | float | bool | None] | None, Meta(description="variables for the template")
    ] = None
    metadata: MessagesMetadata | None = None
    cache_control: Annotated[Any, Meta(description="accepted; prefixes are found without it")] = None
    service_tier: NoEffect = None
    speed: NoEffect = None
    inference_geo: NoEffect = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """A body of /v1/messages as it is: fields that make no difference to the prompt are ignored."""

    messages: Messages
    model: str | None = None
    system: System = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Annotated[dict[str, Any], Meta(description="empty where max_tokens cut it off")]


class MessagesUsage(msgspec.Struct):
    """The prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: Annotated[int, Meta(description="found in the prefix cache")] = 0
    cache_creation_input_tokens: int = 0


class MessagesAnswer(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ToolUseBlock]
    stop_reason: Annotated[
        str | None, Meta(description="end_turn, max_tokens, stop_sequence or tool_use; null in message_start")
    ] = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


# --- events, in the order of a stream; `type` is the event's name too --------------------------------


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: MessagesAnswer


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: TextBlock | ToolUseBlock


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: Annotated[str, Meta(description="joined they are the input, which is an object")]


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessagesUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


MessagesEvent = MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop
