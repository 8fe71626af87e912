"""What is refused before any model step, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from quartet.services.tokenizer import prompt_encoder
from quartet.services.tokenizer.chat_template import ChatTemplate
from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.services.tokenizer.prompt_encoder import PromptEncoder, Refusal, check_request
from quartet.shared.messages import ChatMessage, ChatPrompt, ErrorCode, ModelInfo, TextPrompt, TokensPrompt
from quartet.shared.sampling_params import InvalidField, SamplingParams

MakeModel = Callable[..., ModelInfo]
BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def encoder(loaded: LoadedTokenizer, template: str | None = BOS_TEMPLATE, max_bytes: int = 8 << 20) -> PromptEncoder:
    return PromptEncoder(loaded, ChatTemplate(template, loaded.special_tokens), max_bytes)


def test_a_chat_is_encoded_without_extra_specials(tiny_factory: Callable[..., LoadedTokenizer]) -> None:
    loaded = tiny_factory(add_bos=True)
    chat = ChatPrompt([ChatMessage("user", "a")])
    assert encoder(loaded).encode(chat, None) == [0, 100]
    assert encoder(loaded).encode(TextPrompt("<s>a"), None) == [0, 100]
    assert encoder(loaded).encode(TextPrompt("a"), None) == [0, 100]
    assert encoder(loaded).encode(TextPrompt("a", add_special_tokens=False), None) == [100]
    assert encoder(loaded).encode(TokensPrompt([5]), None) == [5]


def test_tokens_are_told_up_to_a_number(tiny: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_encoder, "MAX_TOLD_TOKENS", 3)
    assert len(encoder(tiny).encode_to_tell(TextPrompt("zqx"))) == 3
    with pytest.raises(Refusal, match="prompt: has 4 tokens, and at most 3") as caught:
        encoder(tiny).encode_to_tell(TextPrompt("zqxz"))
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, "prompt")
    assert len(encoder(tiny).encode(TextPrompt("zqxz"), None)) == 4


def test_errors_have_a_code_and_a_field(tiny: LoadedTokenizer) -> None:
    chat = ChatPrompt([ChatMessage("user", "a")])
    with pytest.raises(Refusal, match="--chat-template") as caught:
        encoder(tiny, None).encode(chat, None)
    assert (caught.value.code, caught.value.field) == (ErrorCode.FAILED_PRECONDITION, "messages")
    with pytest.raises(Refusal, match="no thanks") as caught:
        encoder(tiny, "{{ raise_exception('no thanks') }}").encode(chat, None)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, "messages")


def test_a_text_of_5_mb_is_refused_fast(smollm: LoadedTokenizer) -> None:
    text = "word " * 1_000_000
    start = time.process_time()
    with pytest.raises(Refusal, match=r"5000000 bytes.*at least \d+ tokens.*8192"):
        encoder(smollm).encode(TextPrompt(text), 8192)
    with pytest.raises(Refusal, match="8192") as caught:
        encoder(smollm).encode(ChatPrompt([ChatMessage("user", text)]), 8192)
    assert caught.value.field == "messages"
    with pytest.raises(Refusal, match=r"max_prompt_bytes \(1000\)"):
        encoder(smollm, max_bytes=1000).encode(TextPrompt(text), None)
    assert time.process_time() - start < 0.5


def test_the_quick_check_never_refuses_what_fits(tiny: LoadedTokenizer) -> None:
    text = "<tool>" * 8
    assert len(encoder(tiny).encode(TextPrompt(text), 8)) == 8
    with pytest.raises(Refusal):
        encoder(tiny).encode(TextPrompt(text + "a"), 8)


def check(tiny: LoadedTokenizer, model: ModelInfo, ids: list[int], **sampling: object) -> int:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return check_request("prompt_token_ids", ids, params, [], tiny, model)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "resolved"),
    [(127, 1, 1), (127, None, 1), (126, 2, 2), (1, None, 127), (128, 0, 0)],
)
def test_what_fits_the_context(
    tiny: LoadedTokenizer, model_info: MakeModel, prompt_len: int, max_tokens: int | None, resolved: int
) -> None:
    assert check(tiny, model_info(), [5] * prompt_len, max_tokens=max_tokens) == resolved


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens"), [(127, 2), (128, 1), (128, None), (129, 1), (129, None), (5, 10**12)]
)
def test_what_does_not_fit_is_refused_with_both_counts(
    tiny: LoadedTokenizer, model_info: MakeModel, prompt_len: int, max_tokens: int | None
) -> None:
    with pytest.raises(InvalidField, match=rf"prompt_token_ids.*\b{prompt_len} tokens.*\b128\b") as caught:
        check(tiny, model_info(), [5] * prompt_len, max_tokens=max_tokens)
    if max_tokens is not None:
        assert f"max_tokens is {max_tokens}" in str(caught.value)


@pytest.mark.parametrize("bad", [-1, 300, 2**31, 2**63])
def test_ids_outside_the_vocabulary_are_named(tiny: LoadedTokenizer, model_info: MakeModel, bad: int) -> None:
    """300 has a row in the model's padded embedding, but is no token."""
    with pytest.raises(InvalidField, match=rf"prompt_token_ids.*{bad}\b"):
        check(tiny, model_info(vocab_size=320), [5, bad])
    with pytest.raises(InvalidField, match="token id 400"):
        check_request("prompt", [5], SamplingParams(), [[400]], tiny, model_info(vocab_size=320))


def test_empty_prompts_and_foreign_ids_in_fields(tiny: LoadedTokenizer, model_info: MakeModel) -> None:
    with pytest.raises(InvalidField, match="at least one token"):
        check(tiny, model_info(), [])
    with pytest.raises(InvalidField, match=r"logit_bias.*1000"):
        check(tiny, model_info(), [5], logit_bias={1000: 1.0})
    with pytest.raises(InvalidField, match=r"stop_token_ids.*1000"):
        check(tiny, model_info(), [5], stop_token_ids=[1000])
