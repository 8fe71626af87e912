"""From a body's fields to what is sampled and how text is cut."""

from __future__ import annotations

import secrets

import msgspec

from quartet.services.gateway.convert import MAX_LABEL_BYTES, SEED_BITS
from quartet.services.gateway.http.constraints import structured_output
from quartet.services.gateway.http.errors import invalid
from quartet.services.gateway.http.requests import ChatCompletionRequest, CompletionRequest, GenerationFields
from quartet.shared.sampling_params import MAX_TOKEN_ID, RequestLimits, SamplingParams, TextParams, validate

# Fields that are called and mean the same here and there.
_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "max_tokens",
    "stop_token_ids",
    "ignore_eos",
    "prompt_logprobs",
)
_TEXT = ("include_stop_str_in_output", "skip_special_tokens")


class Params(msgspec.Struct, frozen=True):
    """`sampling.seed` is a placeholder where `seeded` is false: each prompt draws its own."""

    sampling: SamplingParams
    text: TextParams
    n: int
    seeded: bool
    priority: int
    cache_salt: str
    tenant: str
    read_prefix_cache: bool
    write_prefix_cache: bool

    def seed(self) -> SamplingParams:
        if self.seeded:
            return self.sampling
        return msgspec.structs.replace(self.sampling, seed=secrets.randbits(SEED_BITS))


def completion_params(body: CompletionRequest, limits: RequestLimits, tenant: str) -> Params:
    """Raises ApiError and InvalidField."""
    if body.suffix:
        raise invalid("suffix", "is not supported")
    n = 1 if body.n is None else body.n
    if body.best_of not in (None, n):
        raise invalid("best_of", f"must be n, which is {n}, got {body.best_of}: choices are not ranked")
    extra: dict[str, object] = {}
    if body.logprobs is not None:
        extra["logprobs"] = body.logprobs
    if body.echo:
        if body.logprobs is not None:
            extra["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
        elif body.max_tokens == 0 and body.prompt_logprobs is None:
            extra["prompt_logprobs"] = 0  # generates nothing, and so has to score
    elif body.max_tokens == 0 and body.prompt_logprobs is None:
        raise invalid("max_tokens", "must be at least 1, got 0; 0 is for echo and prompt_logprobs")
    return _params(body, limits, tenant, extra)


def chat_params(body: ChatCompletionRequest, limits: RequestLimits, tenant: str) -> Params:
    """Raises ApiError and InvalidField."""
    extra: dict[str, object] = {}
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise invalid("max_completion_tokens", f"differs from max_tokens ({body.max_tokens}); give one of them")
        extra["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        extra["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    if body.modalities not in (None, ["text"]):
        raise invalid("modalities", "only text is supported")
    if body.store:
        raise invalid("store", "is not supported: nothing is stored")
    return _params(body, limits, tenant, extra)


def _params(body: GenerationFields, limits: RequestLimits, tenant: str, extra: dict[str, object]) -> Params:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream to be true")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "are not sent in streams; leave stream out")
    for name in ("cache_salt", "user"):
        if len((getattr(body, name) or "").encode()) > MAX_LABEL_BYTES:
            raise invalid(name, f"has at most {MAX_LABEL_BYTES} bytes")
    priority = body.priority or 0
    if abs(priority) > MAX_TOKEN_ID:
        raise invalid("priority", f"must be between {-MAX_TOKEN_ID} and {MAX_TOKEN_ID}, got {priority}")
    values = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        values["top_k"] = 0 if body.top_k == -1 else body.top_k
    if body.logit_bias:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    if body.seed is not None:
        values["seed"] = body.seed
    values["structured"], _ = structured_output(body)
    sampling = SamplingParams(**(values | extra))
    text = TextParams(
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or [],
        **{name: value for name in _TEXT if (value := getattr(body, name)) is not None},
    )
    n = 1 if body.n is None else body.n
    validate(sampling, text, n, limits)
    return Params(
        sampling,
        text,
        n,
        seeded=body.seed is not None,
        priority=priority,
        cache_salt=body.cache_salt or "",
        tenant=body.user or tenant,
        read_prefix_cache=body.read_prefix_cache is not False,
        write_prefix_cache=body.write_prefix_cache is not False,
    )


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        # At most what a token id has: int() takes long over very many digits.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise invalid("logit_bias", f"keys are token ids, got {key[:20]!r}")
        bias[int(key)] = value
    return bias
