"""Bodies of responses, in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: Annotated[int, Meta(description="prompt tokens that were found in the prefix cache")] = 0


class Usage(msgspec.Struct):
    """Of all prompts and choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


# By token id; null where nothing comes before.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


# --- completions ----------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct):
    """One entry for each token. A token that is no whole text is written as `bytes:\\xNN`."""

    tokens: list[str]
    token_logprobs: Annotated[list[float | None], Meta(description="at least -9999; null for the first of a prompt")]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Annotated[str | None, Meta(description="stop or length")] = None
    stop_reason: Annotated[int | str | None, Meta(description="the stop string or token id that was met")] = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    """As a chunk of a stream, `usage` is in the last one only, where it was asked for."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Annotated[list[int] | UnsetType, Meta(description="in the first chunk")] = UNSET


# --- chat -----------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Annotated[str, Meta(description="stop, length or tool_calls")] = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET


# --- the rest -------------------------------------------------------------------------------------


class Model(msgspec.Struct):
    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "quartet"
    root: str | None = None
    parent: None = None
    max_model_len: Annotated[int, Meta(description="the most tokens of prompt and output together")] = 0


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


class CacheReset(msgspec.Struct):
    num_blocks: Annotated[int, Meta(description="blocks that held a known prefix")]


class Version(msgspec.Struct):
    version: str


class Health(msgspec.Struct):
    status: Literal["ok"] = "ok"


class Readiness(msgspec.Struct):
    ready: bool
    reason: Annotated[str, Meta(description="what is away; empty when ready")] = ""
