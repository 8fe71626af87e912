"""What a request may ask of sampling and of its text, with the limits checked in one place."""

from __future__ import annotations

import math

import msgspec

MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1


class InvalidField(ValueError):
    """A request's field is out of its limits. `field` is its public name; the message says the limit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """How tokens are drawn and when generation ends; travels to the executor with each new row.

    A temperature of 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. Presence and frequency
    penalties count output tokens only; the repetition penalty counts prompt and output tokens.
    `max_tokens` None means until the context is full. The noise of output token i of choice c is
    drawn from (seed, c, i) alone, so batch neighbours never change it. `logprobs` is the number of
    top alternatives returned beside the sampled token (0: only the sampled one, None: off), taken
    after logit_bias and penalties and before temperature and truncation. `prompt_logprobs` likewise
    for prompt tokens.
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


class TextParams(msgspec.Struct, array_like=True, frozen=True):
    """How output text is cut; stays in the tokenizer."""

    stop: list[str] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


class RequestLimits(msgspec.Struct, frozen=True):
    """Caps that an operator may set."""

    max_n: int = 16
    max_logprobs: int = 20
    max_stop: int = 16
    max_stop_bytes: int = 1024
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024


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
    if len(text.stop) > limits.max_stop:
        raise InvalidField("stop", f"at most {limits.max_stop} strings, got {len(text.stop)}")
    for item in text.stop:
        if not item:
            raise InvalidField("stop", "an empty string would match everywhere")
        if len(item.encode()) > limits.max_stop_bytes:
            raise InvalidField("stop", f"each string has at most {limits.max_stop_bytes} bytes")


def validate_token_ids(field: str, token_ids: list[int], vocab_size: int) -> None:
    """Every id must be one that the model has a row for."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        bad = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidField(field, f"token id {bad} is outside the vocabulary of {vocab_size}")
