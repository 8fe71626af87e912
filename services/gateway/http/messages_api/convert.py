"""From a body of /v1/messages to a prompt, its tools and what is sampled."""

from __future__ import annotations

import msgspec

from quartet.services.gateway.convert import CONTENT_SEPARATOR, MAX_LABEL_BYTES
from quartet.services.gateway.http.errors import invalid, required
from quartet.services.gateway.http.messages_api.bodies import (
    ContentBlock,
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    ResultPart,
)
from quartet.services.gateway.http.params import Params, chat_params
from quartet.services.gateway.http.requests import (
    ChatCompletionRequest,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingFields,
)
from quartet.shared.messages import ChatMessage, ChatPrompt, ToolCall
from quartet.shared.sampling_params import RequestLimits, Tool, ToolChoice, ToolParams, validate_tools

ROLES = ("user", "assistant", "system")
_CHOICES = {
    "auto": ToolChoice.AUTO,
    "any": ToolChoice.REQUIRED,
    "tool": ToolChoice.REQUIRED,
    "none": ToolChoice.NONE,
}

Body = MessagesRequest | CountTokensRequest


def prompt_of(body: Body, max_messages: int) -> ChatPrompt:
    """Raises ApiError."""
    if not body.messages:
        raise invalid("messages", "must not be empty")
    if len(body.messages) > max_messages:
        raise invalid("messages", f"at most {max_messages} messages (the gateway's max_messages)")
    if body.thinking is not None and body.thinking.type not in ("disabled", "adaptive"):
        raise invalid("thinking.type", f"must be disabled or adaptive, got {body.thinking.type[:80]!r}")
    messages: list[ChatMessage] = []
    if body.system:
        system = body.system if isinstance(body.system, str) else _joined("system", body.system)
        messages.append(ChatMessage("system", system))
    for i, message in enumerate(body.messages):
        messages += _messages(f"messages[{i}]", message)
    goes_on = messages[-1].role == "assistant"
    if goes_on and messages[-1].tool_calls:
        raise invalid(f"messages[{len(body.messages) - 1}]", "calls tools, and no tool_result follows")
    return ChatPrompt(messages, not goes_on, goes_on, body.chat_template_kwargs or {})


def tools_of(body: Body, limits: RequestLimits) -> ToolParams | None:
    """None without tools. Raises ApiError and InvalidField."""
    choice = body.tool_choice
    kind = "auto" if choice is None else choice.type
    if kind not in _CHOICES:
        raise invalid("tool_choice.type", f"must be auto, any, tool or none, got {kind[:80]!r}")
    name = choice.name or "" if choice is not None else ""
    if bool(name) != (kind == "tool"):
        raise invalid("tool_choice.name", "goes with the type tool, and has to be there then")
    if not body.tools:
        if kind in ("any", "tool"):
            raise invalid("tool_choice", "needs tools")
        return None
    tools: list[Tool] = []
    for i, tool in enumerate(body.tools):
        if tool.type not in (None, "custom"):
            raise invalid(f"tools[{i}].type", f"{tool.type[:80]} is not supported, only custom tools are")
        schema = "" if not tool.input_schema else msgspec.json.encode(tool.input_schema).decode()
        tools.append(Tool(tool.name, tool.description or "", schema, bool(tool.strict)))
    parallel = choice is None or not choice.disable_parallel_tool_use
    params = ToolParams(tools, _CHOICES[kind], name, parallel)
    validate_tools(params, limits)
    return params


def params_of(body: MessagesRequest, limits: RequestLimits, tenant: str) -> Params:
    """Raises ApiError and InvalidField, which names fields as chats do: see FIELDS."""
    formatted = None
    if body.output_config is not None and body.output_config.format is not None:
        wanted = body.output_config.format
        if wanted.type != "json_schema":
            raise invalid("output_config.format.type", f"must be json_schema, got {wanted.type[:80]!r}")
        if wanted.schema is None:
            raise invalid("output_config.format.schema", "is required")
        if body.structured_outputs is not None:
            raise invalid("structured_outputs", "goes not together with output_config.format")
        formatted = ResponseFormat("json_schema", JsonSchemaFormat("output", schema=wanted.schema))
    user = body.metadata.user_id if body.metadata is not None else None
    if len((user or "").encode()) > MAX_LABEL_BYTES:
        raise invalid("metadata.user_id", f"has at most {MAX_LABEL_BYTES} bytes")
    chat = ChatCompletionRequest(
        messages=[],
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        user=user,
        response_format=formatted,
        **{name: getattr(body, name) for name in SamplingFields.__struct_fields__},
    )
    return chat_params(chat, limits, tenant)


def fields_of(body: MessagesRequest) -> dict[str, str]:
    """What is called otherwise here."""
    structured = "structured_outputs" if body.structured_outputs is not None else "output_config.format"
    return {
        "stop": "stop_sequences",
        "structured": structured,
        "prompt_token_ids": "messages",
    }


def _messages(field: str, message: MessageParam) -> list[ChatMessage]:
    """A user's results of tools are messages of their own, in front of what is said with them."""
    role, content = message.role, message.content
    if role not in ROLES:
        raise invalid(f"{field}.role", f"must be user, assistant or system, got {role[:80]!r}")
    if isinstance(content, str):
        return [ChatMessage(role, content)]
    if not content:
        raise invalid(f"{field}.content", "must not be empty")
    texts: list[str] = []
    calls: list[ToolCall] = []
    results: list[ChatMessage] = []
    for i, block in enumerate(content):
        where = f"{field}.content[{i}]"
        match block.type:
            case "text":
                texts.append(required(f"{where}.text", block.text))
            case "tool_use" if role == "assistant":
                calls.append(_call(where, block))
            case "tool_result" if role == "user":
                results.append(_result(where, block))
            case "tool_use" | "tool_result":
                raise invalid(f"{where}.type", f"{block.type} is none of the {role}'s")
            case _:
                raise invalid(f"{where}.type", f"{block.type[:80]} is not supported")
    said = [ChatMessage(role, CONTENT_SEPARATOR.join(texts), tool_calls=calls)] if texts or calls else []
    return results + said


def _call(field: str, block: ContentBlock) -> ToolCall:
    arguments = msgspec.json.encode(block.input or {}).decode()
    return ToolCall(required(f"{field}.id", block.id), required(f"{field}.name", block.name), arguments)


def _result(field: str, block: ContentBlock) -> ChatMessage:
    content = block.content or ""
    text = content if isinstance(content, str) else _joined(f"{field}.content", content)
    return ChatMessage("tool", text, tool_call_id=required(f"{field}.tool_use_id", block.tool_use_id))


def _joined(field: str, parts: list[ResultPart]) -> str:
    texts: list[str] = []
    for i, part in enumerate(parts):
        if part.type != "text":
            raise invalid(f"{field}[{i}].type", f"{part.type[:80]} is not supported, only text is")
        texts.append(required(f"{field}[{i}].text", part.text))
    return CONTENT_SEPARATOR.join(texts)
