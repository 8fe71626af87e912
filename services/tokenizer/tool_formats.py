"""How models write tool calls, and which of these forms a model is likely to know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.shared.sampling_params import StructuredKind, StructuredOutput, Tool, ToolChoice, ToolParams
from quartet.shared.structured_output import JSON_OPTIONS

MAX_CALLS = 16


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`start` opens calls; with none, an output that begins with "{" is calls. A call is a JSON object with a name
    and, under `arguments_key`, the arguments. `listed`: several stand in a JSON list, behind one `start`. `end` closes
    what `start` opened, if anything does. `written_by_us`: the model's template says nothing of tools."""

    name: str
    start: str
    end: str
    arguments_key: str = "arguments"
    listed: bool = False
    separator: str = "\n"
    written_by_us: bool = False
    short_ids: bool = False

    def marker_ids(self, loaded: LoadedTokenizer) -> frozenset[int]:
        """Special tokens that calls are told by."""
        texts = (self.start, self.end, "[ARGS]", "[CALL_ID]")
        ids = [loaded.tokenizer.token_to_id(text) for text in texts if text]
        return frozenset(i for i in ids if i is not None) & loaded.special_ids


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA3_JSON = ToolFormat("llama3_json", "", "", "parameters", separator="; ")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", listed=True, short_ids=True)
SMOLLM2 = ToolFormat("smollm2", "<tool_call>", "</tool_call>", listed=True, written_by_us=True)
FORMATS = {form.name: form for form in (HERMES, LLAMA3_JSON, MISTRAL, SMOLLM2)}


def pick_format(setting: str, template: str | None) -> ToolFormat | None:
    """By the setting `tool_parser`, which may leave it to the chat template. None: tools are refused."""
    if setting != "auto":
        return FORMATS.get(setting)
    if not template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if "tools" not in template:
        return SMOLLM2
    return LLAMA3_JSON if "<|start_header_id|>" in template else None


def as_template_variable(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As chat templates are written for."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def system_text(tools: Sequence[Tool]) -> str:
    """For models whose template says nothing of tools: what SmolLM2 has been trained on."""
    listed = json.dumps(as_template_variable(tools), ensure_ascii=False)
    return _SYSTEM_TEXT.replace("%TOOLS%", listed)


def call_text(calls: Sequence[tuple[str, Any]]) -> str:
    """Calls that were made, as such a model would have written them."""
    listed = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls], ensure_ascii=False)
    return f"{SMOLLM2.start}{listed}{SMOLLM2.end}"


def calls_or(
    form: ToolFormat, params: ToolParams, loaded: LoadedTokenizer, answer: StructuredOutput | None
) -> StructuredOutput | None:
    """What the output must be where tools are offered: calls where they are required, else calls or the answer.
    None: anything."""
    if params.choice is ToolChoice.NONE or (params.choice is ToolChoice.AUTO and answer is None):
        return answer
    tools = [tool for tool in params.tools if params.name in ("", tool.name)]
    rules = [*_call_rules(form, tools, loaded, MAX_CALLS if params.parallel else 1)]
    if answer is None:
        rules.insert(0, "start: calls")
    elif (text := _as_rule(answer)) is not None:
        rules[:0] = ["start: calls | answer", f"answer: {text}"]
    else:
        return answer
    return StructuredOutput(StructuredKind.GRAMMAR, "\n".join(rules))


def _call_rules(form: ToolFormat, tools: Sequence[Tool], loaded: LoadedTokenizer, most: int) -> list[str]:
    def marker(text: str) -> str:
        token_id = loaded.tokenizer.token_to_id(text)
        return f"<[{token_id}]>" if token_id in loaded.special_ids else json.dumps(text)

    more = f" ({json.dumps(', ' if form.listed else form.separator)} call){{0,{most - 1}}}" if most > 1 else ""
    if form.listed:
        end = f' "]" {marker(form.end)}' if form.end else ' "]"'
        rules = [f'calls: {marker(form.start)} "[" call{more}{end}', "call: object"]
    elif form.start:
        newline = json.dumps("\n")
        rules = [f"calls: call{more}", f"call: {marker(form.start)} {newline} object {newline} {marker(form.end)}"]
    else:
        rules = [f"calls: call{more}", "call: object"]
    rules.append("object: " + " | ".join(f"tool{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "{form.arguments_key}": ')
        rules += [f'tool{i}: {head} arguments{i} "}}"', f"arguments{i}: %json {_arguments_schema(tool)}"]
    return rules


def _arguments_schema(tool: Tool) -> str:
    schema: dict[str, Any] = {"properties": {}, "additionalProperties": False}
    if tool.parameters:
        schema = msgspec.json.decode(tool.parameters)
    return json.dumps({"type": "object", **schema, "x-guidance": JSON_OPTIONS})


def _as_rule(answer: StructuredOutput) -> str | None:
    match answer.kind:
        case StructuredKind.JSON_SCHEMA:
            schema = msgspec.json.decode(answer.text)
            schema = {} if schema is True else schema
            return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}" if isinstance(schema, dict) else None
        case StructuredKind.JSON_OBJECT:
            return f"%json {json.dumps({'type': 'object', 'x-guidance': JSON_OPTIONS})}"
        case StructuredKind.CHOICE:
            return " | ".join(map(json.dumps, msgspec.json.decode(answer.text)))
    return None


def _function(tool: Tool) -> dict[str, Any]:
    parameters = msgspec.json.decode(tool.parameters) if tool.parameters else {"type": "object", "properties": {}}
    strict = {"strict": True} if tool.strict else {}
    return {"name": tool.name, "description": tool.description, "parameters": parameters, **strict}


_SYSTEM_TEXT = """\
You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>%TOOLS%</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function call is needed, \
please make the tool calls an empty list '[]'.
<tool_call>[
{"name": "func_name1", "arguments": {"argument1": "value1", "argument2": "value2"}},
... (more tool calls as required)
]</tool_call>"""
