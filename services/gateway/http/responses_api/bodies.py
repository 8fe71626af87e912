"""Bodies of /v1/responses: requests and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quartet.services.gateway.http.requests import SamplingFields
from quartet.services.gateway.http.responses import ChatTokenLogprob

NoEffect = Annotated[Any, Meta(description="accepted; has no effect")]
Refused = Annotated[Any, Meta(description="not supported")]


class InputPart(msgspec.Struct):
    type: Annotated[str, Meta(description="input_text or output_text, or refusal")]
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """A message, a function_call or a function_call_output. Fields that answers have and requests do not need are
    ignored, so that an answer's output can be sent back."""

    type: Annotated[str | None, Meta(description="message (also without), function_call or function_call_output")] = (
        None
    )
    role: Annotated[str | None, Meta(description="of a message: user, assistant, system or developer")] = None
    content: Annotated[
        str | list[InputPart] | None,
        Meta(description="of a message: a text, or parts, which are joined by a line feed"),
    ] = None
    call_id: Annotated[str | None, Meta(description="of a call and its output")] = None
    name: Annotated[str | None, Meta(description="of a call")] = None
    arguments: Annotated[str | None, Meta(description="of a call: a JSON object")] = None
    output: Annotated[str | list[InputPart] | None, Meta(description="of a call's output")] = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    type: Annotated[str, Meta(description="text, json_object or json_schema")]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: Annotated[TextFormat | None, Meta(description="what the text must be")] = None
    verbosity: Annotated[str | None, Meta(description="accepted; has no effect")] = None


class FunctionTool(msgspec.Struct):
    type: Annotated[str, Meta(description="function")]
    name: str = ""
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="a JSON schema")] = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, Meta(description="function")]
    name: str = ""


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Annotated[bool | None, Meta(description="accepted; nothing is ever padded")] = None


class ResponsesRequest(SamplingFields, kw_only=True):
    input: Annotated[str | list[InputItem], Meta(description="what the user says, or the conversation so far")]
    model: Annotated[str | None, Meta(description="one of /v1/models; left out: the model that is served")] = None
    instructions: Annotated[str | None, Meta(description="a system message in front of the input")] = None
    max_output_tokens: Annotated[
        int | None, Meta(description="the most tokens to generate; left out: until the context is full")
    ] = None
    stream: Annotated[bool | None, Meta(description="server-sent events instead of one object")] = None
    stream_options: Annotated[ResponsesStreamOptions | None, Meta(description="only with stream")] = None
    stop: Annotated[str | list[str] | None, Meta(description="strings that end the answer")] = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Annotated[str | FunctionChoice | None, Meta(description="auto, none, required, or a function")] = None
    parallel_tool_calls: bool | None = None
    include: Annotated[
        list[str] | None, Meta(description="message.output_text.logprobs; reasoning.encrypted_content has no effect")
    ] = None
    top_logprobs: Annotated[
        int | None, Meta(description="log-probabilities of so many most likely tokens at each position")
    ] = None
    metadata: Annotated[
        dict[str, str] | None, Meta(description="comes back with the answer; 16 pairs of 64 and 512 characters at most")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, str | int | float | bool | None] | None, Meta(description="variables for the template")
    ] = None
    store: Annotated[bool | None, Meta(description="nothing is ever stored: every answer says false")] = None
    previous_response_id: Annotated[
        str | None, Meta(description="not supported, as nothing is stored: send the conversation as input")
    ] = None
    conversation: Refused = None
    prompt: Refused = None
    background: Annotated[bool | None, Meta(description="false only")] = None
    truncation: Annotated[str | None, Meta(description="disabled only; truncate_prompt_tokens cuts prompts")] = None
    reasoning: Annotated[dict[str, Any] | None, Meta(description="accepted; has no effect")] = None
    max_tool_calls: Annotated[int | None, Meta(description="accepted; no tools are run here")] = None
    user: Annotated[str | None, Meta(description="whom the request is accounted to, for fair scheduling")] = None
    service_tier: Annotated[str | None, Meta(description="accepted; has no effect")] = None
    safety_identifier: Annotated[str | None, Meta(description="accepted; has no effect")] = None
    prompt_cache_key: Annotated[str | None, Meta(description="accepted; prefixes are found without it")] = None
    prompt_cache_retention: NoEffect = None
    prompt_cache_options: NoEffect = None


Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str] = []
    logprobs: list[ChatTokenLogprob] = []


class OutputMessage(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputCall


class InputTokensDetails(msgspec.Struct):
    cached_tokens: Annotated[int, Meta(description="found in the prefix cache")]
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    total_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct):
    code: Annotated[str, Meta(description="server_error, rate_limit_exceeded or invalid_prompt")]
    message: str


class Response(msgspec.Struct, kw_only=True):
    """What was asked comes back with what was answered."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponsesUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    background: Literal[False] = False
    store: Literal[False] = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: int = 0
    text: TextConfig
    tool_choice: str | FunctionChoice = "auto"
    tools: list[FunctionTool] = []
    truncation: Literal["disabled"] = "disabled"
    user: str | None = None
