"""What a request may ask of sampling and of its text, with the limits checked in one place."""

from __future__ import annotations

import enum
import math
import re
from typing import Any

import msgspec

MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class InvalidField(ValueError):
    """A request's field is out of its limits. `field` is its public name; the message says the limit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class StructuredKind(enum.IntEnum):
    """What StructuredOutput.text is."""

    JSON_SCHEMA = 1  # a JSON schema: the output is a value of it
    JSON_OBJECT = 2  # nothing: the output is any JSON object
    REGEX = 3  # the output is one match of it
    GRAMMAR = 4  # in Lark's or GBNF's notation
    CHOICE = 5  # a JSON array of strings: the output is one of them


class StructuredOutput(msgspec.Struct, array_like=True, frozen=True):
    """What the whole output must be. Once it is complete, only an end-of-sequence or stop token can follow."""

    kind: StructuredKind
    text: str = ""


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """How tokens are drawn and when generation ends; travels to the executor with each new row.

    A temperature of 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. Presence and frequency
    penalties count output tokens only; the repetition penalty counts prompt and output tokens.
    `max_tokens` None means until the context is full. The noise of output token i of choice c is
    drawn from (seed, c, i) alone, so batch neighbours never change it. `logprobs` is the number of
    top alternatives returned beside the sampled token (0: only the sampled one, None: off), taken
    after logit_bias, penalties and what `structured` allows, and before temperature and truncation.
    `prompt_logprobs` likewise for prompt tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    max_tokens: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None


class TextParams(msgspec.Struct, array_like=True, frozen=True):
    """How output text is cut; stays in the tokenizer."""

    stop: list[str] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


class Tool(msgspec.Struct, array_like=True, frozen=True):
    """A function that the model may call. `parameters` is a JSON schema, or empty where there are none. `strict`
    is told to the chat template, no more."""

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool = False


class ToolChoice(enum.IntEnum):
    AUTO = 1  # the model calls tools or answers
    NONE = 2  # the model is told of no tools
    REQUIRED = 3  # the output is one call or more, by grammar


class ToolParams(msgspec.Struct, array_like=True, frozen=True):
    """What tools are offered, and how calls are looked for in the output; stays in the tokenizer.

    `name`, with REQUIRED, is the only tool that may be called. Without `parallel` there is one call at most.
    """

    tools: list[Tool]
    choice: ToolChoice = ToolChoice.AUTO
    name: str = ""
    parallel: bool = True


class RequestLimits(msgspec.Struct, frozen=True):
    """Caps that an operator may set."""

    max_n: int = 16
    max_logprobs: int = 20
    max_stop: int = 16
    max_stop_bytes: int = 1024
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_structured_bytes: int = 128 << 10
    max_tools: int = 128
    max_tools_bytes: int = 256 << 10


# For whoever stands behind the gateway, whose caps they are: only what no service could do is refused.
NO_CAPS = RequestLimits(*[MAX_TOKEN_ID] * len(RequestLimits.__struct_fields__))


def _number(field: str, value: float, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidField(field, f"must be a finite number, got {value!r}")
    if not (low < value if low_open else low <= value) or value > high:
        raise InvalidField(field, f"must be in {'(' if low_open else '['}{low:g}, {high:g}], got {value!r}")


def _integer(field: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidField(field, f"must be an integer, got {value!r}")
    if not low <= value <= high:
        raise InvalidField(field, f"must be between {low} and {high}, got {value}")


def validate(sampling: SamplingParams, text: TextParams, n: int, limits: RequestLimits) -> None:
    """Checks everything that needs no model; raises InvalidField naming the field and the limit."""
    _integer("n", n, 1, limits.max_n)
    _number("temperature", sampling.temperature, 0.0, 100.0)
    _integer("top_k", sampling.top_k, 0, MAX_TOKEN_ID)
    _number("top_p", sampling.top_p, 0.0, 1.0, low_open=True)
    _number("min_p", sampling.min_p, 0.0, 1.0)
    _number("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _number("repetition_penalty", sampling.repetition_penalty, 0.01, 100.0)
    if len(sampling.logit_bias) > limits.max_logit_bias:
        raise InvalidField("logit_bias", f"at most {limits.max_logit_bias} entries, got {len(sampling.logit_bias)}")
    for token_id, bias in sampling.logit_bias.items():
        _integer("logit_bias", token_id, 0, MAX_TOKEN_ID)
        _number("logit_bias", bias, -100.0, 100.0)
    _integer("min_tokens", sampling.min_tokens, 0, MAX_TOKEN_ID)
    if sampling.max_tokens is not None:
        # 0 scores a prompt: it is only meaningful when the prompt's log-probabilities are asked for.
        lowest = 0 if sampling.prompt_logprobs is not None else 1
        _integer("max_tokens", sampling.max_tokens, lowest, MAX_TOKEN_ID)
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidField(
                "min_tokens", f"must not exceed max_tokens ({sampling.max_tokens}), got {sampling.min_tokens}"
            )
    if len(sampling.stop_token_ids) > limits.max_stop_token_ids:
        raise InvalidField(
            "stop_token_ids", f"at most {limits.max_stop_token_ids} ids, got {len(sampling.stop_token_ids)}"
        )
    for token_id in sampling.stop_token_ids:
        _integer("stop_token_ids", token_id, 0, MAX_TOKEN_ID)
    _integer("seed", sampling.seed, 0, MAX_SEED)
    if sampling.logprobs is not None:
        _integer("logprobs", sampling.logprobs, 0, limits.max_logprobs)
    if sampling.prompt_logprobs is not None:
        _integer("prompt_logprobs", sampling.prompt_logprobs, 0, limits.max_logprobs)
    if sampling.structured is not None:
        _validate_structured(sampling.structured, sampling, limits)
    if len(text.stop) > limits.max_stop:
        raise InvalidField("stop", f"at most {limits.max_stop} strings, got {len(text.stop)}")
    for item in text.stop:
        if not item:
            raise InvalidField("stop", "an empty string would match everywhere")
        if len(item.encode()) > limits.max_stop_bytes:
            raise InvalidField("stop", f"each string has at most {limits.max_stop_bytes} bytes")


def _validate_structured(structured: StructuredOutput, sampling: SamplingParams, limits: RequestLimits) -> None:
    """All but whether it compiles."""
    size = len(structured.text.encode("utf-8", "surrogatepass"))
    if size > limits.max_structured_bytes:
        raise InvalidField("structured", f"has at most {limits.max_structured_bytes} bytes, got {size}")
    for name in ("ignore_eos", "min_tokens"):
        if getattr(sampling, name):
            raise InvalidField(name, "goes not together with structured, which says by itself when the output ends")
    if structured.kind is StructuredKind.CHOICE:
        choices = _json("structured", structured.text)
        if not (isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices)):
            raise InvalidField("structured", "choice must be one string or more")
        if not all(choices):
            raise InvalidField("structured", "an empty string is no choice")
    elif structured.kind is StructuredKind.JSON_SCHEMA:
        if not isinstance(_json("structured", structured.text), (dict, bool)):
            raise InvalidField("structured", "a JSON schema must be an object")
    elif structured.kind is not StructuredKind.JSON_OBJECT and not structured.text:
        raise InvalidField("structured", f"the {structured.kind.name.lower()} must not be empty")


def validate_tools(params: ToolParams, limits: RequestLimits) -> None:
    """Checks everything that needs no model; raises InvalidField."""
    if not 1 <= len(params.tools) <= limits.max_tools:
        raise InvalidField("tools", f"between 1 and {limits.max_tools} tools, got {len(params.tools)}")
    size = sum(
        len(text.encode("utf-8", "surrogatepass")) for t in params.tools for text in (t.description, t.parameters)
    )
    if size > limits.max_tools_bytes:
        raise InvalidField("tools", f"have at most {limits.max_tools_bytes} bytes together, got {size}")
    names: set[str] = set()
    for tool in params.tools:
        if not _TOOL_NAME.fullmatch(tool.name):
            raise InvalidField("tools", f"a name has 1 to 64 of A-Z a-z 0-9 _ - and ., got {tool.name[:80]!r}")
        if tool.name in names:
            raise InvalidField("tools", f"{tool.name} is named twice")
        names.add(tool.name)
        if tool.parameters and not isinstance(_json("tools", tool.parameters), dict):
            raise InvalidField("tools", f"the parameters of {tool.name} must be a JSON schema, which is an object")
    if params.name and params.choice is not ToolChoice.REQUIRED:
        raise InvalidField("tool_choice", "a tool is named only where a call is required")
    if params.name and params.name not in names:
        raise InvalidField("tool_choice", f"there is no tool {params.name[:80]!r}")


def _json(field: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidField(field, f"is not JSON: {error}") from error


def validate_token_ids(field: str, token_ids: list[int], vocab_size: int) -> None:
    """Every id must be one that the model has a row for."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        bad = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidField(field, f"token id {bad} is outside the vocabulary of {vocab_size}")
