"""Between the public API's messages and the services'. What is wrong with a request is said here,
as InvalidField with the field's public name."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Any

from quartet.services.gateway.choice import Choice, Position
from quartet.services.gateway.events import Chunk, Completed, Event, PromptChunk, Started, StreamError
from quartet.services.gateway.stream import Stream
from quartet.shared.messages import (
    ChatMessage,
    ChatPrompt,
    FinishReason,
    Loads,
    ModelInfo,
    Prompt,
    TextPrompt,
    TokenLogprobs,
    TokensPrompt,
    ToolCall,
)
from quartet.shared.pb import inference_pb2 as pb
from quartet.shared.sampling_params import (
    MAX_TOKEN_ID,
    InvalidField,
    RequestLimits,
    SamplingParams,
    StructuredKind,
    StructuredOutput,
    TextParams,
    Tool,
    ToolChoice,
    ToolParams,
    validate,
    validate_tools,
)

CONTENT_SEPARATOR = "\n"
MAX_LABEL_BYTES = 1024
MAX_TEXT_BYTES = 2**31 - 1
SEED_BITS = 63

# What the services behind call the fields that this API names otherwise.
_PUBLIC_FIELDS = {
    "prompt": "text",
    "prompt_token_ids": "token_ids",
    "messages": "chat.messages",
    "continue_final_message": "chat.continue_final_message",
    "template_kwargs": "chat.template_kwargs",
}
_TEXT_FIELDS = frozenset(TextParams.__struct_fields__)
_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_TOOL_CHOICES = {
    pb.TOOL_CHOICE_UNSPECIFIED: ToolChoice.AUTO,
    pb.TOOL_CHOICE_AUTO: ToolChoice.AUTO,
    pb.TOOL_CHOICE_NONE: ToolChoice.NONE,
    pb.TOOL_CHOICE_REQUIRED: ToolChoice.REQUIRED,
}


# --- requests -------------------------------------------------------------------------------------


def stream_from(request: pb.GenerateRequest, request_id: int, limits: RequestLimits, max_detach_grace: float) -> Stream:
    """Raises InvalidField."""
    sampling, text = _sampling(request.sampling)
    n = request.n if request.HasField("n") else 1
    validate(sampling, text, n, limits)
    for label in ("cache_salt", "client_request_id", "tenant"):
        if len(getattr(request, label).encode()) > MAX_LABEL_BYTES:
            raise InvalidField(label, f"has at most {MAX_LABEL_BYTES} bytes")
    return Stream(
        request_id,
        _generate_prompt(request),
        sampling,
        text,
        _choices(request, n),
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        detach_grace=detach_grace(request, max_detach_grace) or 0.0,
        prompt_logprobs_start=request.prompt_logprobs_start,
        tools=tools_from(request, limits),
        read_prefix_cache=request.read_prefix_cache or not request.HasField("read_prefix_cache"),
        write_prefix_cache=request.write_prefix_cache or not request.HasField("write_prefix_cache"),
    )


def detach_grace(request: pb.GenerateRequest | pb.AttachRequest, max_detach_grace: float) -> float | None:
    """In seconds; None when not given."""
    if not request.HasField("detach_grace_ms"):
        return None
    if request.detach_grace_ms > max_detach_grace * 1000:
        raise InvalidField(
            "detach_grace_ms", f"must be at most {max_detach_grace * 1000:g}, got {request.detach_grace_ms}"
        )
    return request.detach_grace_ms / 1000


def request_id_from(text: str) -> int:
    try:
        if len(text) == 16:
            return int.from_bytes(bytes.fromhex(text))
    except ValueError:
        pass
    raise InvalidField("request_id", f"must be 16 hexadecimal digits, got {text[:40]!r}")


def positions_from(request: pb.AttachRequest) -> dict[int, Position]:
    positions: dict[int, Position] = {}
    for position in request.positions:
        if position.index in positions:
            raise InvalidField("positions", f"choice {position.index} is named twice")
        positions[position.index] = Position(position.next_index, position.finished)
    return positions


def tokenize_prompt(request: pb.TokenizeRequest) -> Prompt:
    """The empty text is no error here: it has no tokens."""
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text, request.add_special_tokens or not request.HasField("add_special_tokens"))
        case "chat":
            return _chat(request.chat)
        case _:
            raise InvalidField("prompt", "one of text and chat must be set")


def tools_from(request: pb.GenerateRequest | pb.TokenizeRequest, limits: RequestLimits) -> ToolParams | None:
    if not request.HasField("tools"):
        return None
    given = request.tools
    if given.choice not in _TOOL_CHOICES:
        raise InvalidField("tools", f"there is no choice {given.choice}")
    tools = [Tool(tool.name, tool.description, tool.parameters, tool.strict) for tool in given.tools]
    parallel = given.parallel or not given.HasField("parallel")
    params = ToolParams(tools, _TOOL_CHOICES[given.choice], given.name, parallel)
    validate_tools(params, limits)
    return params


def _generate_prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                raise InvalidField("text", "must not be empty")
            return TextPrompt(request.text, request.add_special_tokens or not request.HasField("add_special_tokens"))
        case "chat":
            return _chat(request.chat)
        case "token_ids":
            if not request.token_ids.ids:
                raise InvalidField("token_ids", "must not be empty")
            return TokensPrompt(checked_token_ids("token_ids", request.token_ids.ids))
        case _:
            raise InvalidField("prompt", "one of text, chat and token_ids must be set")


def checked_token_ids(field: str, ids: Iterable[int]) -> list[int]:
    """What the model has no row for is refused by the tokenizer, which knows the model."""
    token_ids = list(ids)
    if token_ids and max(token_ids) > MAX_TOKEN_ID:
        bad = next(token_id for token_id in token_ids if token_id > MAX_TOKEN_ID)
        raise InvalidField(field, f"token id {bad} is outside every vocabulary")
    return token_ids


def _chat(chat: pb.ChatPrompt) -> ChatPrompt:
    if not chat.messages:
        raise InvalidField("chat.messages", "must not be empty")
    messages = [_chat_message(message, f"chat.messages[{i}]") for i, message in enumerate(chat.messages)]
    add_generation_prompt = not chat.continue_final_message
    if chat.HasField("add_generation_prompt"):
        if chat.add_generation_prompt and chat.continue_final_message:
            raise InvalidField("chat.continue_final_message", "goes not together with add_generation_prompt")
        add_generation_prompt = chat.add_generation_prompt
    template_kwargs = {name: _scalar(name, value) for name, value in chat.template_kwargs.items()}
    return ChatPrompt(messages, add_generation_prompt, chat.continue_final_message, template_kwargs)


def _chat_message(message: pb.ChatMessage, field: str) -> ChatMessage:
    if not message.role:
        raise InvalidField(f"{field}.role", "must not be empty")
    if message.HasField("content"):
        if message.parts:
            raise InvalidField(f"{field}.parts", "give either content or parts")
        return _chat_message_of(message, message.content)
    texts = []
    for i, part in enumerate(message.parts):
        if part.WhichOneof("kind") != "text":
            raise InvalidField(f"{field}.parts[{i}]", "only text parts are supported")
        texts.append(part.text)
    return _chat_message_of(message, CONTENT_SEPARATOR.join(texts))


def _chat_message_of(message: pb.ChatMessage, content: str) -> ChatMessage:
    calls = [ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls]
    return ChatMessage(message.role, content, message.name, calls, message.tool_call_id)


def _scalar(name: str, value: Any) -> str | int | float | bool | None:
    match value.WhichOneof("kind"):
        case "string_value":
            return str(value.string_value)
        case "bool_value":
            return bool(value.bool_value)
        case "number_value":
            number = float(value.number_value)
            return int(number) if number.is_integer() else number
        case "null_value":
            return None
        case _:
            raise InvalidField(f"chat.template_kwargs.{name}", "must be a number, a string, a boolean or null")


def _sampling(message: pb.SamplingParams) -> tuple[SamplingParams, TextParams]:
    sampling: dict[str, Any] = {}
    text: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        if descriptor.name == "logit_bias":
            value = dict(value)
        elif descriptor.name == "structured":
            value = _structured(value)
        elif descriptor.is_repeated:
            value = list(value)
        (text if descriptor.name in _TEXT_FIELDS else sampling)[descriptor.name] = value
    if "seed" not in sampling:
        sampling["seed"] = secrets.randbits(SEED_BITS)
    return SamplingParams(**sampling), TextParams(**text)


def _structured(message: pb.StructuredOutput) -> StructuredOutput:
    match message.WhichOneof("kind"):
        case "json_schema":
            return StructuredOutput(StructuredKind.JSON_SCHEMA, message.json_schema)
        case "json_object" if message.json_object:
            return StructuredOutput(StructuredKind.JSON_OBJECT)
        case "regex":
            return StructuredOutput(StructuredKind.REGEX, message.regex)
        case "grammar":
            return StructuredOutput(StructuredKind.GRAMMAR, message.grammar)
        case "choice":
            return StructuredOutput(StructuredKind.CHOICE, json.dumps(list(message.choice.texts)))
        case _:
            raise InvalidField("structured", "one of json_schema, json_object, regex, grammar and choice must be set")


def _choices(request: pb.GenerateRequest, n: int) -> list[Choice]:
    if request.past and request.WhichOneof("prompt") != "token_ids":
        raise InvalidField("past", "needs the prompt as token_ids, as they were told in Started")
    pasts: dict[int, pb.ChoicePast] = {}
    for past in request.past:
        if past.index >= n:
            raise InvalidField("past", f"there is no choice {past.index} with n = {n}")
        if past.index in pasts:
            raise InvalidField("past", f"choice {past.index} is named twice")
        pasts[past.index] = past
    return [_choice(index, pasts.get(index)) for index in range(n)]


def _choice(index: int, past: pb.ChoicePast | None) -> Choice:
    if past is None:
        return Choice(index)
    if past.finished:
        return Choice(index, finished_at=len(past.past_token_ids))
    token_ids = checked_token_ids("past.past_token_ids", past.past_token_ids)
    if not token_ids and past.past_text_bytes:
        raise InvalidField("past.past_text_bytes", "there is no text without tokens")
    for name in ("past_text_bytes", "past_call_bytes"):
        if getattr(past, name) > MAX_TEXT_BYTES:
            raise InvalidField(f"past.{name}", f"must be at most {MAX_TEXT_BYTES}, got {getattr(past, name)}")
    unknown = None if token_ids else 0
    text_bytes = past.past_text_bytes if past.HasField("past_text_bytes") else unknown
    call_bytes = past.past_call_bytes if past.HasField("past_call_bytes") else unknown
    return Choice(index, token_ids, text_bytes, sent_call_bytes=call_bytes)


# --- responses ------------------------------------------------------------------------------------


def response_from(event: Event, client_request_id: str = "") -> pb.GenerateResponse:
    match event:
        case Chunk():
            return pb.GenerateResponse(chunk=_chunk(event))
        case Started():
            return pb.GenerateResponse(
                started=pb.Started(
                    request_id=f"{event.request_id:016x}",
                    prompt_token_ids=event.prompt_token_ids,
                    seed=event.seed,
                    client_request_id=client_request_id,
                )
            )
        case PromptChunk():
            entries = [
                pb.PromptLogprob(logprobs=None if entry is None else _logprobs(entry)) for entry in event.entries
            ]
            return pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(start=event.start, entries=entries))
        case Completed():
            usage = pb.Usage(
                prompt_tokens=event.prompt_tokens,
                completion_tokens=event.completion_tokens,
                cached_tokens=event.cached_tokens,
            )
            return pb.GenerateResponse(completion=pb.Completion(usage=usage))


def _chunk(event: Chunk) -> pb.Chunk:
    chunk = pb.Chunk(
        index=event.choice_index,
        start=event.start,
        token_ids=event.token_ids,
        text=event.text,
        next_index=event.start + len(event.token_ids),
    )
    if event.logprobs is not None:
        chunk.logprobs.extend(map(_logprobs, event.logprobs))
    for part in event.tool_calls:
        chunk.tool_calls.add(index=part.index, id=part.id, name=part.name, arguments=part.arguments)
    if event.finish_reason is not None:
        chunk.finished.reason = _FINISH_REASONS[event.finish_reason]
        if isinstance(event.stop_reason, str):
            chunk.finished.stop_string = event.stop_reason
        elif event.stop_reason is not None:
            chunk.finished.stop_token_id = event.stop_reason
    return chunk


def _logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    texts = iter(entry.text)
    return pb.TokenLogprobs(
        token=pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, text=next(texts, b"")),
        rank=entry.rank,
        top=[
            pb.TokenLogprob(token_id=token_id, logprob=logprob, text=next(texts, b""))
            for token_id, logprob in entry.top
        ],
    )


def status_message(error: StreamError) -> str:
    """The error's message with its field as this API calls it."""
    public = _PUBLIC_FIELDS.get(error.field)
    return error.message if public is None else public + error.message.removeprefix(error.field)


def model_info_from(model: ModelInfo, tokenizer_fingerprint: str) -> pb.GetModelInfoResponse:
    fields = {name: getattr(model, name) for name in model.__struct_fields__}
    return pb.GetModelInfoResponse(tokenizer_fingerprint=tokenizer_fingerprint, **fields)


def loads_from(loads: Loads) -> pb.GetLoadsResponse:
    fields = {name: getattr(loads, name) for name in loads.__struct_fields__ if name != "call_id"}
    return pb.GetLoadsResponse(**fields)
