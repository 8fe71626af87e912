"""From a body's bytes to a request, or to what is wrong with it."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

from quartet.services.gateway.http.errors import ApiError, invalid

_AT_PATH = re.compile(r"^(.*?) - at `(?:key in )?\$\.?(.*?)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`", re.DOTALL)
# Fields of others that clients write out though they ask nothing by them, with the values by which they do not.
_ASKS_NOTHING = {
    "add_special_tokens": (b"false",),
    "bad_words": (b"[]",),
    "echo": (b"false",),
    "include_reasoning": (b"true",),
    "length_penalty": (b"1.0", b"1"),
    "spaces_between_special_tokens": (b"true",),
    "truncation_side": (b'"left"',),
    "use_beam_search": (b"false",),
}
_INSTEAD = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "functions": "tools",
    "function_call": "tool_choice",
    "max_new_tokens": "max_tokens",
}

T = TypeVar("T")


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises ApiError that names the field."""
    if not body:
        raise ApiError(400, "the body is empty; a JSON object is expected")
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if not _UNKNOWN.match(str(error)):
                raise
            return decoder.decode(_without_empty(decoder, body))
    except msgspec.ValidationError as error:
        raise _invalid_value(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(body, error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None


def _without_empty(decoder: msgspec.json.Decoder[Any], body: bytes) -> bytes:
    """Without the fields that are not known here and ask nothing, such as those that are null."""
    known = decoder.type.__struct_fields__
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    kept = {
        name: value
        for name, value in fields.items()
        if name in known or bytes(value) not in (b"null", *_ASKS_NOTHING.get(name, ()))
    }
    return msgspec.json.encode(kept)


def _invalid_value(text: str) -> ApiError:
    at = _AT_PATH.match(text)
    message, path = (at[1], at[2]) if at else (text, "")
    unknown = _UNKNOWN.match(message)
    if unknown:
        path = f"{path}.{unknown[1]}" if path else unknown[1]
        hint = f"; there is {_INSTEAD[path]}" if path in _INSTEAD else ""
        return ApiError(400, f"{path}: there is no such field{hint}", param=path, code="unknown_parameter")
    missing = re.match(r"Object missing required field `(.*?)`", message)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, f"{path}: is required", param=path, code="missing_required_parameter")
    message = message[:1].lower() + message[1:].replace("`", "")
    if not path:
        return ApiError(400, f"the body must be a JSON object: {message}")
    return invalid(path, message)


def _not_json(body: bytes, error: Exception) -> ApiError:
    """Python's decoder takes more, so what it takes says what is wrong."""
    found: list[str] = []
    constant = object()

    def pairs(items: list[tuple[str, Any]]) -> None:
        # A name may have half of a surrogate pair, which no answer can be written with.
        found.extend(name.encode(errors="replace").decode() for name, value in items if value is constant)

    if b"NaN" in body or b"Infinity" in body or b"\\u" in body:
        try:
            json.loads(body, parse_constant=lambda _: constant, object_pairs_hook=pairs)
        except (ValueError, RecursionError):
            pass
        else:
            if found:
                return invalid(found[0], "NaN and Infinity are no JSON, and no value for it")
            if b"\\u" in body:
                text = "a text has half of a surrogate pair (\\ud800 to \\udfff)"
                return ApiError(400, f"the body is not valid JSON: {text}")
    return ApiError(400, f"the body is not valid JSON: {error}")
