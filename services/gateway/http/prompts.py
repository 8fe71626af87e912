"""From a body's prompt or messages to prompts for the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.services.gateway.convert import CONTENT_SEPARATOR
from quartet.services.gateway.http.errors import ApiError, invalid
from quartet.services.gateway.http.requests import ChatCompletionRequest, Message, Scalar, TokenizeRequest
from quartet.shared.messages import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokensPrompt, ToolCall
from quartet.shared.sampling_params import MAX_TOKEN_ID

ROLES = {"developer": "system"}


def completion_prompts(
    given: str | list[str | int | list[int]] | None, add_special_tokens: bool, max_prompts: int
) -> list[Prompt]:
    """One or more prompts, none of them empty. Raises ApiError."""
    if given is None:
        raise ApiError(400, "prompt: is required", param="prompt", code="missing_required_parameter")
    if isinstance(given, str):
        return [_text("prompt", given, add_special_tokens)]
    if not given:
        raise invalid("prompt", "must not be empty")
    if isinstance(given[0], int):
        return [_tokens("prompt", given)]
    if len(given) > max_prompts:
        raise invalid("prompt", f"at most {max_prompts} prompts (the gateway's max_prompts_per_request)")
    kind = type(given[0])
    prompts: list[Prompt] = []
    for i, item in enumerate(given):
        if not isinstance(item, kind):
            raise invalid(f"prompt[{i}]", "texts and token ids cannot be mixed")
        prompts.append(
            _text(f"prompt[{i}]", item, add_special_tokens)
            if isinstance(item, str)
            else _tokens(f"prompt[{i}]", item if isinstance(item, list) else [])
        )
    return prompts


def chat_prompt(
    body: ChatCompletionRequest | TokenizeRequest, messages: list[Message], max_messages: int
) -> ChatPrompt:
    """Raises ApiError."""
    if not messages:
        raise invalid("messages", "must not be empty")
    if len(messages) > max_messages:
        raise invalid("messages", f"at most {max_messages} messages (the gateway's max_messages)")
    add_generation_prompt = not body.continue_final_message
    if body.add_generation_prompt is not None:
        if body.add_generation_prompt and body.continue_final_message:
            raise invalid("continue_final_message", "goes not together with add_generation_prompt")
        add_generation_prompt = body.add_generation_prompt
    return ChatPrompt(
        [_message(f"messages[{i}]", message) for i, message in enumerate(messages)],
        add_generation_prompt,
        bool(body.continue_final_message),
        _template_kwargs(body),
    )


def _template_kwargs(body: ChatCompletionRequest | TokenizeRequest) -> dict[str, Scalar]:
    given = body.chat_template_kwargs or {}
    effort = body.reasoning_effort if isinstance(body, ChatCompletionRequest) else None
    if effort is None:
        return given
    of_effort: dict[str, Scalar] = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return of_effort | given


def checked_ids(field: str, token_ids: Sequence[object]) -> list[int]:
    """What the model has no row for is refused by the tokenizer, which knows the model."""
    # Two million of them should not hold up everybody while they are looked at one by one.
    if token_ids and set(map(type, token_ids)) == {int}:
        ids: list[int] = list(token_ids)  # type: ignore[arg-type]
        if min(ids) >= 0 and max(ids) <= MAX_TOKEN_ID:
            return ids
    for i, token_id in enumerate(token_ids):
        if not isinstance(token_id, int):
            raise invalid(f"{field}[{i}]", "texts and token ids cannot be mixed")
        if not 0 <= token_id <= MAX_TOKEN_ID:
            raise invalid(f"{field}[{i}]", f"token id {token_id} is outside every vocabulary")
    return list(token_ids)  # type: ignore[arg-type]


def _text(field: str, text: str, add_special_tokens: bool) -> TextPrompt:
    if not text:
        raise invalid(field, "must not be empty")
    return TextPrompt(text, add_special_tokens)


def _tokens(field: str, token_ids: Sequence[object]) -> TokensPrompt:
    if not token_ids:
        raise invalid(field, "must not be empty")
    return TokensPrompt(checked_ids(field, token_ids))


def _message(field: str, message: Message) -> ChatMessage:
    if not message.role:
        raise invalid(f"{field}.role", "must not be empty")
    calls = [ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    role = ROLES.get(message.role, message.role)
    return ChatMessage(role, _content(field, message), message.name or "", calls, message.tool_call_id or "")


def _content(field: str, message: Message) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        # An assistant that only called tools said nothing.
        if message.role != "assistant":
            raise invalid(f"{field}.content", "is required")
        return ""
    texts: list[str] = []
    for i, part in enumerate(content):
        if part.type != "text":
            raise invalid(f"{field}.content[{i}].type", f"{part.type[:80]} is not supported, only text is")
        if part.text is None:
            raise invalid(f"{field}.content[{i}].text", "is required")
        texts.append(part.text)
    return CONTENT_SEPARATOR.join(texts)
