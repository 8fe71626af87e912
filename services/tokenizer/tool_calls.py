"""Finds tool calls in an output's text as it comes.

Text that is no call passes. A call's arguments are let out while they are being written; what comes out, all in all,
does not depend on how the text was cut into pieces. A call of a tool that was not offered is text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import NamedTuple

from quartet.services.tokenizer.tool_formats import ToolFormat
from quartet.shared.messages import ToolCallDelta
from quartet.shared.sampling_params import ToolParams

_ARGUMENT_KEYS = ("arguments", "parameters")
_WHITESPACE = " \n\r\t"
_MAX_BARE_NAME = 200


class Parsed(NamedTuple):
    text: str
    tool_calls: list[ToolCallDelta]


class ToolCallParser:
    """Of one choice. `new_id` gives the id of its call number n.

    Each state takes a character, or goes to another state and leaves the character to that one (False). `_held` is
    what may still turn out to be text.
    """

    def __init__(self, form: ToolFormat, params: ToolParams, new_id: Callable[[int], str]) -> None:
        self._form = form
        self._names = frozenset(tool.name for tool in params.tools)
        self._most = None if params.parallel else 1
        self._new_id = new_id
        self._state: Callable[[str], bool] = self._in_text if form.start else self._before_bare_call
        self._held = ""
        self._text: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._num_calls = 0
        self._in_list = False
        self._closed = False
        self._call = _Call()

    def feed(self, piece: str) -> Parsed:
        if self._state == self._in_text and not self._held and self._form.start[0] not in piece:
            return Parsed(piece, [])
        for char in piece:
            self._take_in(char)
        return self._let_out()

    def finish(self) -> Parsed:
        """The text has ended: what is held back belongs to it, unless it is of a call that has been told of."""
        told = self._state == self._in_call and self._call.told
        closing = self._state == self._behind_call and self._form.end.startswith(self._held.strip())
        rest = "" if told or closing else self._held
        self._text.append(rest)
        self._held = ""
        return self._let_out()

    def _take_in(self, char: str) -> None:
        while not self._state(char):
            pass

    def _let_out(self) -> Parsed:
        parsed = Parsed("".join(self._text), self._calls)
        self._text, self._calls = [], []
        return parsed

    # --- states -----------------------------------------------------------------------------------

    def _in_text(self, char: str) -> bool:
        start = self._form.start
        self._held += char
        if self._held == start:
            self._state = self._before_call
            return True
        while not start.startswith(self._held):
            self._text.append(self._held[0])
            self._held = self._held[1:]
        return True

    def _in_text_to_the_end(self, char: str) -> bool:
        self._text.append(char)
        return True

    def _before_bare_call(self, char: str) -> bool:
        """Where no marker opens a call, an output that begins with a brace may be one."""
        if char == "{":
            return self._begin_call()
        if char not in _WHITESPACE:
            return self._is_text()
        self._held += char
        return True

    def _before_call(self, char: str) -> bool:
        if char == "{":
            return self._begin_call()
        if char == "[":
            self._in_list = True
            self._state = self._in_list_of_calls
        elif self._form.listed and (char.isalnum() or char == "_"):
            self._call = _Call()
            self._state = self._in_bare_name
            return False
        elif char not in _WHITESPACE:
            return self._is_text()
        self._held += char
        return True

    def _in_list_of_calls(self, char: str) -> bool:
        if char == "{":
            return self._begin_call()
        if char == "]":
            self._in_list = False
            self._end_call()
            return True
        if char not in _WHITESPACE and char != ",":
            return self._is_text()
        self._held += char
        return True

    def _in_bare_name(self, char: str) -> bool:
        """Mistral's later form: the name, [ARGS], the arguments."""
        if char == "{":
            name = self._call.name.partition("[")[0].strip()
            self._call = _Call(name, bare=True)
            self._state = self._in_call
            return False
        if len(self._call.name) > _MAX_BARE_NAME:
            return self._is_text()
        self._call.name += char
        self._held += char
        return True

    def _in_call(self, char: str) -> bool:
        call = self._call
        if not call.told:
            self._held += char
        is_call = call.feed(char)
        if is_call and not call.told and call.name and (call.has_arguments or call.done):
            is_call = call.name in self._names
            if is_call:
                self._tell_of(call)
        if not is_call or (call.done and not call.told):
            if call.told:
                self._end_call()
            else:
                self._is_text()
            return True
        if call.told:
            arguments = call.take_arguments()
            if call.done and not call.has_arguments:
                arguments = "{}"
            if arguments:
                self._add(ToolCallDelta(self._num_calls - 1, arguments=arguments))
        if call.done:
            self._end_call()
        return True

    def _behind_call(self, char: str) -> bool:
        """The closing marker, another call, or text; blanks between are neither."""
        if self._in_list:
            self._state = self._in_list_of_calls
            return False
        form, held = self._form, self._held + char
        core = held.lstrip()
        if not form.start and char == "{":
            self._held = ""
            return self._begin_call()
        may_end = not self._closed and form.end.startswith(core)
        may_go_on = form.start.startswith(core) if form.start else core.strip() == ";"
        if core and not may_end and not may_go_on:
            self._held = ""
            self._state = self._in_text if form.start else self._in_text_to_the_end
            for earlier in held:
                self._take_in(earlier)
        elif core and may_end and core == form.end:
            self._held, self._closed = "", True
        elif core and core == form.start:
            self._held, self._state = core, self._before_call
        else:
            self._held = held
        return True

    # --- within -----------------------------------------------------------------------------------

    def _begin_call(self) -> bool:
        self._call = _Call()
        self._state = self._in_call
        return False

    def _end_call(self) -> None:
        self._held, self._closed = "", False
        self._state = self._behind_call

    def _is_text(self) -> bool:
        self._text.append(self._held)
        self._held, self._in_list = "", False
        self._state = self._in_text if self._form.start else self._in_text_to_the_end
        return False

    def _tell_of(self, call: _Call) -> None:
        call.told = True
        self._held = ""
        self._add(ToolCallDelta(self._num_calls, self._new_id(self._num_calls), call.name))
        self._num_calls += 1

    def _add(self, part: ToolCallDelta) -> None:
        if self._most is not None and part.index >= self._most:
            return
        last = self._calls[-1] if self._calls else None
        if last is not None and last.index == part.index:
            self._calls[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + part.arguments)
        else:
            self._calls.append(part)


class _Call:
    """A call's JSON object, character by character. `bare`: the object is the arguments themselves."""

    def __init__(self, name: str = "", *, bare: bool = False) -> None:
        self.name = name
        self.told = False
        self.done = False
        self.has_arguments = False
        self._bare = bare
        self._state = "value" if bare else "open"
        self._key = _ARGUMENT_KEYS[0] if bare else ""
        self._raw = ""  # of the key or value that is being read; of arguments only their first character
        self._arguments: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def take_arguments(self) -> str:
        """What has been read of them since the last time."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def feed(self, char: str) -> bool:
        """False: this is no call."""
        if self._in_string:
            self._read_string(char)
            return True
        if self._state == "value":
            return self._feed_value(char)
        if char in _WHITESPACE:
            return True
        match self._state, char:
            case "open", "{":
                self._state = "key"
            case "key", '"':
                self._raw = ""
                self._open_string()
            case "key", "}":
                return self._close()
            case "colon", ":":
                self._state, self._raw = "value", ""
            case _:
                return False
        return True

    def _feed_value(self, char: str) -> bool:
        if self._depth:
            if char == '"':
                self._open_string()
                return True
            self._append(char)
            self._depth += (char in "{[") - (char in "}]")
            if not self._depth and self._bare:
                self.done = True
            return True
        if char in _WHITESPACE:
            return True
        if char in ",}":
            if not self._end_value():
                return False
            self._state = "key"
            return char == "," or self._close()
        if char in '"{[' and self._raw:
            return False
        if char in "{[":
            self._depth = 1
            self.has_arguments = self.has_arguments or (char == "{" and self._key in _ARGUMENT_KEYS)
        if char == '"':
            self._open_string()
        else:
            self._append(char)
        return char not in "]:"

    def _open_string(self) -> None:
        self._in_string, self._escaped = True, False
        self._append('"')

    def _read_string(self, char: str) -> None:
        self._append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._state == "key":
                self._key, self._state = _unquoted(self._raw), "colon"

    def _append(self, char: str) -> None:
        if self._state == "value" and self._key in _ARGUMENT_KEYS and self.has_arguments:
            self._arguments.append(char)
            self._raw = "{"
        else:
            self._raw += char

    def _end_value(self) -> bool:
        if self._key == "name":
            self.name = _unquoted(self._raw)
            return bool(self.name)
        return self._key not in _ARGUMENT_KEYS or self._raw in ("{", "null")

    def _close(self) -> bool:
        self.done = True
        return bool(self.name)


def _unquoted(text: str) -> str:
    """The JSON string that this is; empty where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def call_ids(form: ToolFormat, request_id: int, choice: int) -> Callable[[int], str]:
    """Ids of a choice's calls: the same whenever it is read again, others for every request."""

    def new_id(number: int) -> str:
        digest = hashlib.sha256(f"{request_id:016x} {choice} {number}".encode()).hexdigest()
        return digest[:9] if form.short_ids else f"call_{digest[:24]}"

    return new_id
