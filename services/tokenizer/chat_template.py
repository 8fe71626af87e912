"""Chat messages to a prompt's text, by the model's own jinja2 template in a sandbox.

The environment is the one that templates are written for (Hugging Face's). A template comes with a
model, so it is trusted no further than that: output, time and repetition are bounded.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quartet.services.tokenizer.tool_formats import as_template_variable, call_text, system_text
from quartet.shared.config import SettingsError
from quartet.shared.messages import ChatMessage, ChatPrompt
from quartet.shared.sampling_params import InvalidField, Tool, ToolChoice, ToolParams

ROLES = ("system", "user", "assistant", "tool")
MAX_RENDER_SECONDS = 5.0
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_TICK = "_quartet_tick"
# Marks the end of the final message so that the prompt can be cut there; the blank is trimmed with the message's own.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class NoChatTemplate(Exception):
    """The model has no chat template that can be used; the message says what to configure."""


class ChatTemplate:
    """`source` None: a model without a template, which refuses chats and serves all else.

    Raises jinja2.TemplateSyntaxError when the template does not compile.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: dict[str, str],
        max_bytes: int = 16 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._special_tokens = special_tokens
        self._max_bytes = max_bytes
        self._clock = clock
        self._template = _environment().from_string(source) if source else None
        self.source = source
        self._knows_tools = "tools" in (source or "")
        # A role beyond the usual ones is good where the template asks for it by name.
        self._roles = frozenset({*ROLES, *re.findall(r"[\"']([a-z_]{1,32})[\"']", source or "")})

    def render(self, prompt: ChatPrompt, tools: ToolParams | None = None) -> str:
        """The prompt's text. Raises NoChatTemplate, or InvalidField with the template's own message."""
        if self._template is None:
            raise NoChatTemplate(
                "the model has no chat template: start the tokenizer with --chat-template (a file or the template)"
            )
        offered = list(tools.tools) if tools is not None and tools.choice is not ToolChoice.NONE else []
        messages = self._messages(prompt, offered)
        deadline = self._clock() + MAX_RENDER_SECONDS

        def tick() -> str:
            if self._clock() > deadline:
                raise jinja2.TemplateError(f"the chat template takes longer than {MAX_RENDER_SECONDS:g} s")
            return ""

        variables = {
            "tools": as_template_variable(offered) if offered and self._knows_tools else None,
            "documents": None,
            **self._special_tokens,
            **prompt.template_kwargs,
            "messages": messages,
            "add_generation_prompt": prompt.add_generation_prompt,
            _TICK: tick,
        }
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                size += len(part)
                tick()
                if size > self._max_bytes:
                    raise jinja2.TemplateError(f"the chat template writes more than {self._max_bytes} characters")
        except jinja2.TemplateError as error:
            raise InvalidField("messages", error.message or "the chat template failed") from error
        except RecursionError as error:
            raise InvalidField("messages", "the chat template recurses without end") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidField("messages", f"the chat template failed on them: {error}") from error
        text = "".join(parts)
        return _cut_to_continue(text) if prompt.continue_final_message else text

    def _messages(self, prompt: ChatPrompt, offered: list[Tool]) -> list[dict[str, Any]]:
        _check(prompt, self._roles)
        messages: list[dict[str, Any]] = []
        for i, message in enumerate(prompt.messages):
            entry: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.name:
                entry["name"] = message.name
            if message.tool_call_id:
                entry["tool_call_id"] = message.tool_call_id
            if calls := _calls(i, message):
                entry["tool_calls"] = calls
                if not self._knows_tools:
                    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
                    entry["content"] += call_text(functions)
            messages.append(entry)
        if offered and not self._knows_tools:
            _tell_of_tools(messages, system_text(offered))
        if prompt.continue_final_message:
            messages[-1]["content"] += _CONTINUE_TAG
        return messages


def _tell_of_tools(messages: list[dict[str, Any]], text: str) -> None:
    if messages[0]["role"] == "system":
        before = messages[0]["content"]
        messages[0]["content"] = f"{before}\n\n{text}" if before else text
    else:
        messages.insert(0, {"role": "system", "content": text})


def read_template(setting: str) -> str | None:
    """The setting `chat_template`: a path or the template itself. Raises SettingsError."""
    if not setting or "{%" in setting or "{{" in setting:
        return setting or None
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"chat_template: cannot read {setting}: {error}") from error


def _check(prompt: ChatPrompt, roles: frozenset[str]) -> None:
    if not prompt.messages:
        raise InvalidField("messages", "must not be empty")
    if prompt.continue_final_message and prompt.add_generation_prompt:
        raise InvalidField("continue_final_message", "cannot be combined with add_generation_prompt")
    if reserved := _RESERVED.intersection(prompt.template_kwargs):
        raise InvalidField("template_kwargs", f"{min(reserved)} has a field of its own")
    for i, message in enumerate(prompt.messages):
        if message.role not in roles:
            raise InvalidField("messages", f"message {i} has the role {message.role!r}; roles are {', '.join(ROLES)}")


def _calls(i: int, message: ChatMessage) -> list[dict[str, Any]]:
    """As templates are written for: with arguments as values."""
    calls = []
    for call in message.tool_calls:
        try:
            arguments = msgspec.json.decode(call.arguments) if call.arguments.strip() else {}
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidField("messages", f"message {i}: the arguments of {call.name} are no JSON object")
        function = {"name": call.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return calls


def _cut_to_continue(text: str) -> str:
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0:
        raise InvalidField("continue_final_message", "the chat template leaves the final message out")
    # Where the tag lost its blank the template trims messages, and so the text to go on from.
    return text[:at] if text.startswith(_CONTINUE_TAG, at) else text[:at].rstrip()


# --- the environment ------------------------------------------------------------------------------


class _IgnoreGeneration(Extension):
    """{% generation %} marks what the assistant wrote, for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "**" and not (numbers and abs(left) < 1e6 and abs(right) < 64):
            raise SecurityError("the power is too large for a chat template")
        if operator == "*" and not numbers:
            sized, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(sized, Sequence) and isinstance(count, int) and len(sized) * count > 1 << 20:
                raise SecurityError("the repetition is too large for a chat template")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        # A loop that writes nothing would never come back to us: have each round look at the clock.
        for loop in tree.find_all(nodes.For):
            call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(call).set_lineno(loop.lineno))
        return tree


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_IgnoreGeneration, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes HTML, which is not what a model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
