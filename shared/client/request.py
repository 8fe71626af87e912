"""Requests from plain Python values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quartet.shared.pb import inference_pb2 as pb

_SAMPLING_FIELDS = frozenset(field.name for field in pb.SamplingParams.DESCRIPTOR.fields)
_CHAT_FIELDS = frozenset(("add_generation_prompt", "continue_final_message", "template_kwargs"))
_REQUEST_FIELDS = frozenset(field.name for field in pb.GenerateRequest.DESCRIPTOR.fields) - {
    "text",
    "chat",
    "token_ids",
    "sampling",
}


def build_request(
    prompt: str | None = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    token_ids: Iterable[int] | None = None,
    **options: Any,
) -> pb.GenerateRequest:
    """A GenerateRequest from Python values; options that are None are left out."""
    given = {name: value for name, value in options.items() if value is not None}
    unknown = given.keys() - _SAMPLING_FIELDS - _CHAT_FIELDS - _REQUEST_FIELDS
    if unknown:
        raise TypeError(f"generate() has no option {sorted(unknown)[0]!r}")
    if sum(source is not None for source in (prompt, messages, token_ids)) != 1:
        raise ValueError("give exactly one of prompt, messages and token_ids")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    request = pb.GenerateRequest(
        sampling=pb.SamplingParams(**{name: given[name] for name in given.keys() & _SAMPLING_FIELDS}),
        **{name: given[name] for name in given.keys() & _REQUEST_FIELDS},
    )
    if prompt is not None:
        request.text = prompt
    elif messages is not None:
        request.chat.CopyFrom(_chat(messages, **{name: given[name] for name in given.keys() & _CHAT_FIELDS}))
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=token_ids))
    return request


def build_tokenize_request(
    text: str | None, messages: Sequence[Mapping[str, Any]] | None, add_special_tokens: bool | None
) -> pb.TokenizeRequest:
    if (text is None) == (messages is None):
        raise ValueError("give exactly one of text and messages")
    if messages is not None:
        return pb.TokenizeRequest(chat=_chat(messages))
    return pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)


def _chat(
    messages: Sequence[Mapping[str, Any]], *, template_kwargs: Mapping[str, Any] | None = None, **options: Any
) -> pb.ChatPrompt:
    chat = pb.ChatPrompt(messages=map(_message, messages), **options)
    for name, value in (template_kwargs or {}).items():
        target = chat.template_kwargs[name]
        if value is None:
            target.null_value = 0  # type: ignore[assignment]
        elif isinstance(value, bool):
            target.bool_value = value
        elif isinstance(value, str):
            target.string_value = value
        else:
            target.number_value = value
    return chat


def _message(message: Mapping[str, Any]) -> pb.ChatMessage:
    content = message.get("content") or ""
    built = pb.ChatMessage(
        role=message["role"], name=message.get("name") or "", tool_call_id=message.get("tool_call_id") or ""
    )
    for call in message.get("tool_calls") or ():
        built.tool_calls.add(id=call["id"], name=call["name"], arguments=call["arguments"])
    if isinstance(content, str):
        built.content = content
        return built
    for part in content:
        if not isinstance(part, str) and part.get("type", "text") != "text":
            raise ValueError(f"content: only text parts are supported, not {part['type']!r}")
        built.parts.add(text=part if isinstance(part, str) else part["text"])
    return built
