"""What is refused at the door, each refusal naming its limit."""

from __future__ import annotations

from quartet.services.scheduler.state import SchedulerState
from quartet.shared.messages import ErrorCode, Failed, ModelInfo, NewRequest
from quartet.shared.sampling_params import (
    MAX_TOKEN_ID,
    NO_CAPS,
    InvalidField,
    TextParams,
    validate,
    validate_token_ids,
)

RETRY_AFTER_MS = 1000


def refusal(state: SchedulerState, message: NewRequest, *, draining: bool) -> Failed | None:
    """Why a request that is not known cannot be had; None when it can."""
    failed = invalid(state, message)
    if failed is not None or _was_accepted_before(message):
        return failed
    if draining:
        return _failed(message, ErrorCode.UNAVAILABLE, "the scheduler is shutting down", retry_after_ms=RETRY_AFTER_MS)
    # Counted with those running, so that a new scheduler takes everything that the old one had.
    num_taken, limit = state.num_unfinished, state.settings.max_waiting
    if num_taken + len(message.choices) > limit + state.max_num_seqs:
        return _failed(
            message,
            ErrorCode.RESOURCE_EXHAUSTED,
            f"{num_taken} requests are running or waiting; max_waiting is {limit} beside {state.max_num_seqs} running",
            retry_after_ms=RETRY_AFTER_MS,
        )
    return None


def invalid(state: SchedulerState, message: NewRequest) -> Failed | None:
    """What is wrong with a request, whoever sends it and however often."""
    failed = malformed(message)
    if failed is None and state.model is not None:
        failed = never_fits(state.model, message)
    return failed


def malformed(message: NewRequest) -> Failed | None:
    if not message.prompt_token_ids:
        return _failed(message, ErrorCode.INVALID_ARGUMENT, "the prompt has no tokens", "prompt")
    if not message.choices:
        return _failed(message, ErrorCode.INVALID_ARGUMENT, "no choice is asked for", "n")
    for choice in message.choices:
        if not 0 <= choice.index <= MAX_TOKEN_ID:
            return _failed(message, ErrorCode.INVALID_ARGUMENT, f"choice index {choice.index} is out of range", "n")
    num_prompt_tokens, start = len(message.prompt_token_ids), message.prompt_logprobs_start
    if not 0 <= start <= num_prompt_tokens:
        text = f"prompt_logprobs_start is {start}, the prompt has {num_prompt_tokens} tokens"
        return _failed(message, ErrorCode.INVALID_ARGUMENT, text, "prompt_logprobs_start")
    try:
        validate(message.sampling, TextParams(), 1, NO_CAPS)
        validate_token_ids("prompt", message.prompt_token_ids, MAX_TOKEN_ID + 1)
        for choice in message.choices:
            validate_token_ids("past_token_ids", choice.output_token_ids, MAX_TOKEN_ID + 1)
    except InvalidField as error:
        return _failed(message, ErrorCode.INVALID_ARGUMENT, str(error), error.field)
    return None


def never_fits(model: ModelInfo, message: NewRequest) -> Failed | None:
    """Against what the executor can; asked again when another executor comes."""
    if message.sampling.structured is not None and not model.structured_output:
        text = "structured: the executor cannot keep an output to a grammar"
        return _failed(message, ErrorCode.UNIMPLEMENTED, text, "structured")
    try:
        validate_token_ids("prompt", message.prompt_token_ids, model.vocab_size)
        for choice in message.choices:
            validate_token_ids("past_token_ids", choice.output_token_ids, model.vocab_size)
    except InvalidField as error:
        return _failed(message, ErrorCode.INVALID_ARGUMENT, str(error), error.field)
    num_prompt_tokens, max_tokens = len(message.prompt_token_ids), message.sampling.max_tokens
    if max_tokens is None:
        max_tokens = model.max_model_len - num_prompt_tokens
    if num_prompt_tokens + max(max_tokens, 0) > model.max_model_len:
        return _failed(
            message,
            ErrorCode.INVALID_ARGUMENT,
            f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} are "
            f"{num_prompt_tokens + max_tokens} tokens; max_model_len is {model.max_model_len}",
            "max_tokens" if num_prompt_tokens < model.max_model_len else "prompt",
        )
    num_blocks = -(-max(num_prompt_tokens, num_prompt_tokens + max_tokens - 1) // model.block_size)
    if num_blocks > model.num_blocks:
        return _failed(
            message,
            ErrorCode.INVALID_ARGUMENT,
            f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} need {num_blocks} KV blocks; "
            f"there are {model.num_blocks}",
            "max_tokens",
        )
    return None


def _was_accepted_before(message: NewRequest) -> bool:
    """It comes from a ledger: one with outputs has been let in already."""
    return any(choice.output_token_ids for choice in message.choices)


def _failed(message: NewRequest, code: ErrorCode, text: str, field: str = "", retry_after_ms: int = 0) -> Failed:
    return Failed(message.request_id, message.attempt, code, text, field, retry_after_ms)
