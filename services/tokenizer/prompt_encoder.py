"""A prompt in any form to token ids, and the checks that need no model step."""

from __future__ import annotations

from quartet.services.tokenizer.chat_template import ChatTemplate, NoChatTemplate
from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.shared.messages import ChatPrompt, ErrorCode, ModelInfo, Prompt, TextPrompt
from quartet.shared.sampling_params import InvalidField, SamplingParams, ToolParams, validate_token_ids

# Of more than this nobody is told the tokens one by one: the answer would hold up the gateway, and who waits there.
MAX_TOLD_TOKENS = 2**18


class Refusal(Exception):
    """Why a request or call is not served, as it is told to the client."""

    def __init__(self, code: ErrorCode, message: str, field: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.field = field


def prompt_field(prompt: Prompt) -> str:
    """The public name of the field that this form of prompt comes in."""
    return (
        "prompt"
        if isinstance(prompt, TextPrompt)
        else "messages"
        if isinstance(prompt, ChatPrompt)
        else "prompt_token_ids"
    )


class PromptEncoder:
    """Thread-safe; `encode` takes long for long texts and belongs off the event loop."""

    def __init__(self, loaded: LoadedTokenizer, template: ChatTemplate, max_prompt_bytes: int) -> None:
        self._loaded = loaded
        self._template = template
        self._max_prompt_bytes = max_prompt_bytes

    def size(self, prompt: Prompt) -> int:
        """Bytes of text to be encoded, about."""
        if isinstance(prompt, TextPrompt):
            return len(prompt.text)
        return sum(len(m.content) + 16 for m in prompt.messages) if isinstance(prompt, ChatPrompt) else 0

    def encode(self, prompt: Prompt, max_model_len: int | None, tools: ToolParams | None = None) -> list[int]:
        """Token ids; `max_model_len` lets hopelessly long texts be refused unread. Raises Refusal."""
        try:
            if isinstance(prompt, TextPrompt):
                self._check_size(prompt.text, "prompt", max_model_len)
                return self._loaded.encode(prompt.text, prompt.add_special_tokens)
            if isinstance(prompt, ChatPrompt):
                texts = [m.content for m in prompt.messages]
                texts += [call.arguments for m in prompt.messages for call in m.tool_calls]
                self._check_bytes(sum(len(text.encode("utf-8", errors="surrogatepass")) for text in texts), "messages")
                text = self._template.render(prompt, tools)
                self._check_size(text, "messages", max_model_len)
                # The template has written BOS and the like itself.
                return self._loaded.encode(text, add_special_tokens=False)
            return prompt.token_ids
        except InvalidField as error:
            raise Refusal(ErrorCode.INVALID_ARGUMENT, str(error), error.field) from error
        except NoChatTemplate as error:
            raise Refusal(ErrorCode.FAILED_PRECONDITION, str(error), "messages") from error

    def encode_to_tell(self, prompt: Prompt, tools: ToolParams | None = None) -> list[int]:
        """As `encode`, for a client that wants to see the tokens. Raises Refusal."""
        token_ids = self.encode(prompt, None, tools)
        if len(token_ids) > MAX_TOLD_TOKENS:
            field = prompt_field(prompt)
            text = f"{field}: has {len(token_ids)} tokens, and at most {MAX_TOLD_TOKENS} are told"
            raise Refusal(ErrorCode.INVALID_ARGUMENT, text, field)
        return token_ids

    def _check_bytes(self, num_bytes: int, field: str) -> None:
        if num_bytes > self._max_prompt_bytes:
            raise InvalidField(field, f"has {num_bytes} bytes, more than max_prompt_bytes ({self._max_prompt_bytes})")

    def _check_size(self, text: str, field: str, max_model_len: int | None) -> None:
        num_bytes = len(text.encode("utf-8", errors="surrogatepass"))
        self._check_bytes(num_bytes, field)
        longest = self._loaded.max_bytes_per_token
        if max_model_len is not None and longest is not None and num_bytes > max_model_len * longest:
            least = -(-num_bytes // longest)
            raise InvalidField(
                field,
                f"has {num_bytes} bytes, which are at least {least} tokens; the model's context is {max_model_len}",
            )


def check_request(
    field: str,
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    pasts: list[list[int]],
    loaded: LoadedTokenizer,
    model: ModelInfo,
) -> int:
    """The resolved max_tokens. Raises InvalidField when the model cannot serve this."""
    if not prompt_token_ids:
        raise InvalidField(field, "must have at least one token")
    # A model's embedding may be padded past the tokenizer's vocabulary: those rows mean nothing.
    vocab_size = min(model.vocab_size, loaded.vocab_size)
    validate_token_ids(field, prompt_token_ids, vocab_size)
    validate_token_ids("logit_bias", list(sampling.logit_bias), model.vocab_size)
    validate_token_ids("stop_token_ids", sampling.stop_token_ids, model.vocab_size)
    for past in pasts:
        validate_token_ids("past_token_ids", past, model.vocab_size)
    num_prompt, limit = len(prompt_token_ids), model.max_model_len
    max_tokens = sampling.max_tokens
    if max_tokens is None:
        if num_prompt >= limit:
            raise InvalidField(
                field, f"has {num_prompt} tokens, which leave no room for output in the model's context of {limit}"
            )
        return limit - num_prompt
    if num_prompt + max_tokens > limit:
        raise InvalidField(
            field,
            f"has {num_prompt} tokens and max_tokens is {max_tokens}: {num_prompt + max_tokens} together, "
            f"more than the model's context of {limit}",
        )
    return max_tokens
