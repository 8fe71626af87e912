"""From a body's tools and formats to what the output must be."""

from __future__ import annotations

import msgspec

from quartet.services.gateway.http.errors import invalid
from quartet.services.gateway.http.requests import (
    ChatCompletionRequest,
    GenerationFields,
    ResponseFormat,
    StructuredOutputs,
    TokenizeRequest,
)
from quartet.shared.sampling_params import (
    RequestLimits,
    StructuredKind,
    StructuredOutput,
    Tool,
    ToolChoice,
    ToolParams,
    validate_tools,
)

_CHOICES = {None: ToolChoice.AUTO, "auto": ToolChoice.AUTO, "none": ToolChoice.NONE, "required": ToolChoice.REQUIRED}


def structured_output(body: GenerationFields) -> tuple[StructuredOutput | None, str]:
    """What the output must be, None for anything; and the field that says so. Raises ApiError."""
    formatted = None if body.response_format is None else _of_format(body.response_format)
    if body.structured_outputs is None:
        return formatted, "response_format"
    if formatted is not None:
        raise invalid("structured_outputs", "goes not together with response_format")
    return _of_structured(body.structured_outputs), "structured_outputs"


def chat_tools(body: ChatCompletionRequest, limits: RequestLimits) -> ToolParams | None:
    """None without tools. Raises ApiError and InvalidField."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "needs tools")
        return None
    name = ""
    if choice is not None and not isinstance(choice, str):
        name, choice = choice.function.name, "required"
    if choice not in _CHOICES:
        raise invalid("tool_choice", f"must be auto, none, required or a function's name in an object, got {choice!r}")
    params = ToolParams(_tools(body), _CHOICES[choice], name, body.parallel_tool_calls is not False)
    validate_tools(params, limits)
    return params


def tokenize_tools(body: TokenizeRequest, limits: RequestLimits) -> ToolParams | None:
    """Raises ApiError and InvalidField."""
    if not body.tools:
        return None
    params = ToolParams(_tools(body))
    validate_tools(params, limits)
    return params


def _tools(body: ChatCompletionRequest | TokenizeRequest) -> list[Tool]:
    tools: list[Tool] = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            raise invalid(f"tools[{i}].type", f"must be function, got {tool.type[:80]!r}")
        function = tool.function
        parameters = "" if not function.parameters else msgspec.json.encode(function.parameters).decode()
        tools.append(Tool(function.name, function.description or "", parameters, bool(function.strict)))
    return tools


def _of_format(given: ResponseFormat) -> StructuredOutput | None:
    match given.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutput(StructuredKind.JSON_OBJECT)
        case "json_schema":
            if given.json_schema is None or given.json_schema.schema is None:
                raise invalid("response_format", "json_schema needs json_schema.schema")
            return StructuredOutput(StructuredKind.JSON_SCHEMA, msgspec.json.encode(given.json_schema.schema).decode())
        case _:
            raise invalid("response_format", f"type must be text, json_object or json_schema, got {given.type[:80]!r}")


def _of_structured(given: StructuredOutputs) -> StructuredOutput:
    found: list[StructuredOutput] = []
    if given.json is not None:
        schema = given.json if isinstance(given.json, str) else msgspec.json.encode(given.json).decode()
        found.append(StructuredOutput(StructuredKind.JSON_SCHEMA, schema))
    if given.json_object:
        found.append(StructuredOutput(StructuredKind.JSON_OBJECT))
    if given.regex is not None:
        found.append(StructuredOutput(StructuredKind.REGEX, given.regex))
    if given.grammar is not None:
        found.append(StructuredOutput(StructuredKind.GRAMMAR, given.grammar))
    if given.choice is not None:
        found.append(StructuredOutput(StructuredKind.CHOICE, msgspec.json.encode(given.choice).decode()))
    if len(found) != 1:
        raise invalid("structured_outputs", "give one of json, json_object, regex, grammar and choice")
    return found[0]
