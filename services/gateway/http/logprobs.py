"""Log-probabilities in OpenAI's and vLLM's forms. What comes from behind is finite: its floor is -9999."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.services.gateway.http.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from quartet.shared.messages import TokenLogprobs


def token_text(data: bytes) -> str:
    """A token as text; as OpenAI writes it where it is no whole text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(entries: Sequence[TokenLogprobs], count: int) -> ChatLogprobs:
    return ChatLogprobs([_chat_token(entry, count) for entry in entries])


class CompletionLogprobsWriter:
    """For one choice, whose tokens are given in order: `text_offset` counts characters through all of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._offset = 0

    def write(self, entries: Sequence[TokenLogprobs | None], first_text: str = "") -> CompletionLogprobs:
        """An entry that is None is the first token of a prompt, whose text is `first_text`."""
        logprobs = CompletionLogprobs([], [], [], [])
        for entry in entries:
            texts = [first_text] if entry is None else [token_text(data) for data in _texts(entry)]
            logprobs.tokens.append(texts[0])
            logprobs.token_logprobs.append(None if entry is None else entry.logprob)
            logprobs.top_logprobs.append(None if entry is None else self._top(entry, texts))
            logprobs.text_offset.append(self._offset)
            self._offset += len(texts[0])
        return logprobs

    def _top(self, entry: TokenLogprobs, texts: list[str]) -> dict[str, float]:
        """The most likely first; the token itself is always there."""
        top: dict[str, float] = {}
        for text, (_, logprob) in list(zip(texts[1:], entry.top, strict=False))[: self._count]:
            top.setdefault(text, logprob)
        top.setdefault(texts[0], entry.logprob)
        return top


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], count: int) -> PromptLogprobs:
    return [None if entry is None else _prompt_entry(entry, count) for entry in entries]


def _prompt_entry(entry: TokenLogprobs, count: int) -> dict[str, PromptLogprob]:
    texts = [token_text(data) for data in _texts(entry)]
    result: dict[str, PromptLogprob] = {}
    for rank, (token_id, logprob) in enumerate(entry.top[:count], 1):
        result[str(token_id)] = PromptLogprob(logprob, rank, texts[rank])
    result.setdefault(str(entry.token_id), PromptLogprob(entry.logprob, entry.rank, texts[0]))
    return result


def _chat_token(entry: TokenLogprobs, count: int) -> ChatTokenLogprob:
    data = _texts(entry)
    top = [
        TopLogprob(token_text(data[i]), logprob, list(data[i])) for i, (_, logprob) in enumerate(entry.top[:count], 1)
    ]
    return ChatTokenLogprob(token_text(data[0]), entry.logprob, list(data[0]), top)


def _texts(entry: TokenLogprobs) -> list[bytes]:
    """The token's bytes and those of each of `top`, whatever a tokenizer left out."""
    missing = 1 + len(entry.top) - len(entry.text)
    return entry.text + [b""] * missing if missing > 0 else entry.text
