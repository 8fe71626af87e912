"""Bodies of requests. null means the same as leaving a field out; a field that is not here is refused."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Scalar = str | int | float | bool | None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: Annotated[
        bool | None, Meta(description="one more chunk, with the usage and without choices, before [DONE]")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="the usage so far in every chunk; with include_usage")
    ] = None
    include_obfuscation: Annotated[bool | None, Meta(description="accepted; nothing is ever padded")] = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, Meta(description="text, json_object or json_schema")]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """One of them, as in vLLM."""

    json: Annotated[dict[str, Any] | str | None, Meta(description="a JSON schema")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str | None, Meta(description="Lark or GBNF")] = None
    json_object: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every way to generate takes under these names, whichever API it is of."""

    temperature: Annotated[float | None, Meta(description="0 is greedy; in [0, 100], default 1")] = None
    top_p: Annotated[float | None, Meta(description="in (0, 1], default 1")] = None
    top_k: Annotated[int | None, Meta(description="0 and -1 are off, the default")] = None
    min_p: Annotated[float | None, Meta(description="in [0, 1], default 0")] = None
    presence_penalty: Annotated[float | None, Meta(description="in [-2, 2], default 0")] = None
    frequency_penalty: Annotated[float | None, Meta(description="in [-2, 2], default 0")] = None
    repetition_penalty: Annotated[
        float | None, Meta(description="in [0.01, 100], default 1; counts the prompt too")
    ] = None
    logit_bias: Annotated[dict[str, float] | None, Meta(description="by token id; in [-100, 100]")] = None
    seed: Annotated[int | None, Meta(description="the same seed and request give the same output; in [0, 2^63)")] = None
    stop_token_ids: Annotated[list[int] | None, Meta(description="ids that end a choice")] = None
    min_tokens: Annotated[int | None, Meta(description="no end before so many tokens; default 0")] = None
    ignore_eos: Annotated[bool | None, Meta(description="goes on past the end-of-sequence token")] = None
    include_stop_str_in_output: Annotated[bool | None, Meta(description="the text ends after the stop string")] = None
    skip_special_tokens: Annotated[
        bool | None, Meta(description="leaves special tokens out of the text; default true")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, Meta(description="keeps the prompt's last tokens; -1: as many as leave room for max_tokens")
    ] = None
    priority: Annotated[int | None, Meta(description="lower goes first where the scheduler runs by priority")] = None
    cache_salt: Annotated[str | None, Meta(description="prefixes are shared under the same salt only")] = None
    read_prefix_cache: Annotated[
        bool | None, Meta(description="whether prefixes in the cache are used; default true")
    ] = None
    write_prefix_cache: Annotated[
        bool | None, Meta(description="whether others may find what this request computes; default true")
    ] = None
    structured_outputs: Annotated[StructuredOutputs | None, Meta(description="what the output must be")] = None


class GenerationFields(SamplingFields, kw_only=True):
    """What completions and chats have in common."""

    model: Annotated[str | None, Meta(description="one of /v1/models; left out: the model that is served")] = None
    n: Annotated[int | None, Meta(description="choices for each prompt; default 1")] = None
    stream: Annotated[bool | None, Meta(description="server-sent events instead of one object")] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="only with stream")] = None
    max_tokens: Annotated[
        int | None, Meta(description="the most tokens to generate; left out: until the context is full")
    ] = None
    stop: Annotated[str | list[str] | None, Meta(description="strings that end a choice")] = None
    prompt_logprobs: Annotated[
        int | None, Meta(description="log-probabilities of the prompt's tokens; not with stream")
    ] = None
    return_token_ids: Annotated[bool | None, Meta(description="token_ids beside each text")] = None
    user: Annotated[str | None, Meta(description="whom the request is accounted to, for fair scheduling")] = None
    response_format: Annotated[ResponseFormat | None, Meta(description="what the output must be")] = None


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: Annotated[
        str | list[str | int | list[int]] | None, Meta(description="a text, texts, token ids, or lists of them")
    ] = None
    echo: Annotated[bool | None, Meta(description="the text begins with the prompt")] = None
    logprobs: Annotated[int | None, Meta(description="log-probabilities of so many most likely tokens")] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="whether the tokenizer adds what it adds by itself, such as BOS; default true")
    ] = None
    best_of: Annotated[int | None, Meta(description="only the value of n")] = None
    suffix: Annotated[str | None, Meta(description="not supported")] = None


class ContentPart(msgspec.Struct):
    type: Annotated[str, Meta(description="text")]
    text: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: Annotated[str, Meta(description="a JSON object")] = ""


class MessageToolCall(msgspec.Struct):
    function: FunctionCall
    id: str = ""
    type: str = "function"


class Message(msgspec.Struct):
    """Fields that answers have and requests do not need are ignored, so that an answer can be sent back."""

    role: Annotated[str, Meta(description="system, developer (the same), user, assistant, or tool")]
    content: Annotated[
        str | list[ContentPart] | None, Meta(description="a text, or text parts, which are joined by a line feed")
    ] = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="a JSON schema")] = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, forbid_unknown_fields=True):
    function: FunctionDefinition
    type: str = "function"


class ToolName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    function: ToolName
    type: str = "function"


class ChatCompletionRequest(GenerationFields, kw_only=True):
    messages: list[Message]
    add_generation_prompt: Annotated[
        bool | None, Meta(description="whether the template opens the answer; default true")
    ] = None
    continue_final_message: Annotated[bool | None, Meta(description="the model goes on with the last message")] = None
    chat_template_kwargs: Annotated[dict[str, Scalar] | None, Meta(description="variables for the template")] = None
    reasoning_effort: Annotated[
        str | None, Meta(description="a variable for the template, as is enable_thinking: false where this is none")
    ] = None
    tools: list[ToolDefinition] | None = None
    max_completion_tokens: Annotated[int | None, Meta(description="the same as max_tokens")] = None
    logprobs: Annotated[bool | None, Meta(description="log-probabilities of the generated tokens")] = None
    top_logprobs: Annotated[int | None, Meta(description="and of so many most likely ones; needs logprobs")] = None
    tool_choice: Annotated[
        str | NamedToolChoice | None, Meta(description="auto, none, required, or the name of a function")
    ] = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[str] | None, Meta(description="text only")] = None
    store: Annotated[bool | None, Meta(description="false only: nothing is stored")] = None
    metadata: Annotated[dict[str, str] | None, Meta(description="accepted; has no effect")] = None
    service_tier: Annotated[str | None, Meta(description="accepted; has no effect")] = None
    safety_identifier: Annotated[str | None, Meta(description="accepted; has no effect")] = None
    prompt_cache_key: Annotated[str | None, Meta(description="accepted; prefixes are found without it")] = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="only with prompt; default true")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None
    tools: list[ToolDefinition] | None = None
    return_token_strs: Annotated[bool | None, Meta(description="each token's text too")] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: Annotated[bool | None, Meta(description="default false")] = None
