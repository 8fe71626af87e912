"""From a body of /v1/responses to a prompt, its tools and what is sampled."""

from __future__ import annotations

import msgspec

from quartet.services.gateway.convert import CONTENT_SEPARATOR
from quartet.services.gateway.http.errors import invalid, missing, required
from quartet.services.gateway.http.params import Params, chat_params
from quartet.services.gateway.http.requests import (
    ChatCompletionRequest,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingFields,
)
from quartet.services.gateway.http.responses_api.bodies import (
    FunctionChoice,
    InputItem,
    InputPart,
    ResponsesRequest,
)
from quartet.shared.messages import ChatMessage, ChatPrompt, ToolCall
from quartet.shared.sampling_params import RequestLimits, Tool, ToolChoice, ToolParams, validate_tools

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_CHOICES = {"auto": ToolChoice.AUTO, "none": ToolChoice.NONE, "required": ToolChoice.REQUIRED}


def check(body: ResponsesRequest) -> None:
    """What is refused whatever else is asked for. Raises ApiError."""
    if body.previous_response_id is not None:
        raise invalid("previous_response_id", "is not supported, as nothing is stored: send the conversation as input")
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise invalid(name, "is not supported, as nothing is stored: send the conversation as input")
    if body.background:
        raise invalid("background", "is not supported: leave it out and stream")
    if body.truncation not in (None, "disabled"):
        raise invalid("truncation", "only disabled is supported; truncate_prompt_tokens cuts prompts")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream to be true")
    for i, name in enumerate(body.include or ()):
        if name not in INCLUDABLE:
            raise invalid(f"include[{i}]", f"{name[:80]!r} is not supported; {' and '.join(INCLUDABLE)} are")
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"at most {MAX_METADATA} pairs, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            limits = f"at most {MAX_METADATA_KEY} characters of a key and {MAX_METADATA_VALUE} of a value"
            raise invalid("metadata", f"{limits}, which {key[:80]!r} has not")


def prompt_of(body: ResponsesRequest, max_messages: int) -> ChatPrompt:
    """Raises ApiError."""
    if not body.input:
        raise invalid("input", "must not be empty")
    messages = [ChatMessage("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        messages.append(ChatMessage("user", body.input))
    else:
        if len(body.input) > max_messages:
            raise invalid("input", f"at most {max_messages} items (the gateway's max_messages)")
        for i, item in enumerate(body.input):
            _add(messages, f"input[{i}]", item)
    return ChatPrompt(messages, template_kwargs=body.chat_template_kwargs or {})


def tools_of(body: ResponsesRequest, limits: RequestLimits) -> ToolParams | None:
    """None without tools. Raises ApiError and InvalidField."""
    given, choice, name = body.tool_choice, "auto", ""
    if isinstance(given, FunctionChoice):
        if given.type != "function" or not given.name:
            raise invalid("tool_choice", 'an object must be {"type": "function", "name": …}')
        choice, name = "required", given.name
    elif given is not None:
        choice = given
    if choice not in _CHOICES:
        raise invalid("tool_choice", f"must be auto, none, required or an object, got {choice[:80]!r}")
    if not body.tools:
        if choice == "required":
            raise invalid("tool_choice", "needs tools")
        return None
    tools: list[Tool] = []
    for i, tool in enumerate(body.tools):
        if tool.type != "function":
            raise invalid(f"tools[{i}].type", f"{tool.type[:80]} is not supported, only function is")
        parameters = "" if not tool.parameters else msgspec.json.encode(tool.parameters).decode()
        tools.append(Tool(tool.name, tool.description or "", parameters, bool(tool.strict)))
    params = ToolParams(tools, _CHOICES[choice], name, body.parallel_tool_calls is not False)
    validate_tools(params, limits)
    return params


def params_of(body: ResponsesRequest, limits: RequestLimits, tenant: str) -> Params:
    """Raises ApiError and InvalidField, which names fields as chats do: see fields_of."""
    chat = ChatCompletionRequest(
        messages=[],
        max_tokens=body.max_output_tokens,
        stop=body.stop,
        user=body.user,
        response_format=_format(body),
        logprobs=wants_logprobs(body),
        top_logprobs=body.top_logprobs,
        **{name: getattr(body, name) for name in SamplingFields.__struct_fields__},
    )
    return chat_params(chat, limits, tenant)


def wants_logprobs(body: ResponsesRequest) -> bool:
    return bool(body.top_logprobs) or LOGPROBS in (body.include or ())


def fields_of(body: ResponsesRequest) -> dict[str, str]:
    """What is called otherwise here."""
    structured = "structured_outputs" if body.structured_outputs is not None else "text.format"
    return {
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
        "structured": structured,
        "messages": "input",
        "prompt_token_ids": "input",
    }


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = body.text.format if body.text is not None else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type not in ("json_object", "json_schema"):
        raise invalid("text.format.type", f"must be text, json_object or json_schema, got {wanted.type[:80]!r}")
    if body.structured_outputs is not None:
        raise invalid("structured_outputs", "goes not together with text.format")
    if wanted.type == "json_object":
        return ResponseFormat("json_object")
    if wanted.schema is None:
        raise invalid("text.format.schema", "is required")
    return ResponseFormat("json_schema", JsonSchemaFormat(wanted.name or "", schema=wanted.schema))


def _add(messages: list[ChatMessage], field: str, item: InputItem) -> None:
    """Calls belong to the assistant's message before them, where there is one."""
    match item.type or "message":
        case "message":
            role = required(f"{field}.role", item.role)
            if role not in _ROLES:
                raise invalid(f"{field}.role", f"must be {', '.join(_ROLES)}, got {role[:80]!r}")
            content = _text(f"{field}.content", item.content)
            messages.append(ChatMessage(_ROLES[role], content))
        case "function_call":
            if not messages or messages[-1].role != "assistant":
                messages.append(ChatMessage("assistant", "", tool_calls=[]))
            call = ToolCall(
                required(f"{field}.call_id", item.call_id),
                required(f"{field}.name", item.name),
                required(f"{field}.arguments", item.arguments),
            )
            messages[-1].tool_calls = [*messages[-1].tool_calls, call]
        case "function_call_output":
            output = _text(f"{field}.output", item.output)
            call_id = required(f"{field}.call_id", item.call_id)
            messages.append(ChatMessage("tool", output, tool_call_id=call_id))
        case "reasoning":
            pass  # what another model thought is no part of the conversation
        case "item_reference":
            raise invalid(f"{field}.type", "item_reference is not supported, as nothing is stored")
        case other:
            raise invalid(f"{field}.type", f"{other[:80]} is not supported")


def _text(field: str, content: str | list[InputPart] | None) -> str:
    if content is None:
        raise missing(field)
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for i, part in enumerate(content):
        if part.type in ("input_text", "output_text", "text"):
            texts.append(required(f"{field}[{i}].text", part.text))
        elif part.type == "refusal":
            texts.append(required(f"{field}[{i}].refusal", part.refusal))
        else:
            raise invalid(f"{field}[{i}].type", f"{part.type[:80]} is not supported, only text is")
    return CONTENT_SEPARATOR.join(texts)
