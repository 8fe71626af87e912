"""The ledger's entries: a request in a form that can be submitted again, and the state of its choices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import msgspec

from quartet.services.tokenizer.loaded import LoadedTokenizer
from quartet.services.tokenizer.stream import OutputStream
from quartet.services.tokenizer.tool_calls import ToolCallParser, call_ids
from quartet.services.tokenizer.tool_formats import ToolFormat
from quartet.shared.messages import (
    ChoicePast,
    Delta,
    Failed,
    FinishReason,
    NewRequest,
    Submit,
    TokenLogprobs,
    TokensPrompt,
)
from quartet.shared.sampling_params import StructuredOutput, ToolChoice
from quartet.shared.trace_context import checked

GatewayKey = Hashable

# Rough sizes in memory, for bounding what is retained.
_TOKEN_BYTES = 40
_LOGPROB_BYTES = 120


@dataclass(slots=True)
class Choice:
    """`token_ids` are all output tokens so far. `logprobs`, where asked for, are of those from `logprobs_from` on."""

    index: int
    token_ids: list[int]
    stream: OutputStream
    logprobs: list[TokenLogprobs] | None
    logprobs_from: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True)
class Request:
    """`submit` is complete: its prompt is TokensPrompt and max_tokens is resolved. Its choices' pasts are
    those it came with; what came since is in `choices`. `structured`: what the executor is to keep the output to,
    which may come of the tools too. `owner` None: its gateway is gone, since `orphaned_at`."""

    submit: Submit
    owner: GatewayKey | None
    choices: dict[int, Choice]
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    orphaned_at: float | None = None
    finished_at: float | None = None
    failure: Failed | None = None
    adding_again: bool = False
    was_added: bool = False
    structured: StructuredOutput | None = None

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    @property
    def attempt(self) -> int:
        return self.submit.attempt

    @property
    def prompt_token_ids(self) -> list[int]:
        assert isinstance(self.submit.prompt, TokensPrompt)
        return self.submit.prompt.token_ids

    @property
    def unfinished(self) -> list[Choice]:
        return [] if self.failure else [c for c in self.choices.values() if c.finish_reason is None]

    @property
    def next_prompt_logprob(self) -> int:
        return self.submit.prompt_logprobs_start + len(self.prompt_logprobs)

    def retained_bytes(self) -> int:
        """About what the request takes in memory."""
        tokens = len(self.prompt_token_ids) + sum(len(c.token_ids) for c in self.choices.values())
        size = _TOKEN_BYTES * tokens
        told: list[Sequence[TokenLogprobs | None]] = [self.prompt_logprobs]
        told += [c.logprobs for c in self.choices.values() if c.logprobs]
        for entries in told:
            last = entries[-1] if entries else None
            size += len(entries) * _LOGPROB_BYTES * (1 + (len(last.top) if last else 0))
        return size

    def new_request(self, eos_token_ids: list[int], fingerprint: str) -> NewRequest:
        """For a scheduler that may know it already, or have forgotten it. `fingerprint` of the tokenizer."""
        submit, sampling = self.submit, self.submit.sampling
        if sampling.structured != self.structured:
            sampling = msgspec.structs.replace(sampling, structured=self.structured)
        return NewRequest(
            request_id=submit.request_id,
            attempt=submit.attempt,
            prompt_token_ids=self.prompt_token_ids,
            sampling=sampling,
            eos_token_ids=eos_token_ids,
            choices=[ChoicePast(c.index, c.token_ids) for c in self.unfinished],
            priority=submit.priority,
            cache_salt=submit.cache_salt,
            tenant=submit.tenant,
            prompt_logprobs_start=self.next_prompt_logprob,
            read_prefix_cache=submit.read_prefix_cache,
            write_prefix_cache=submit.write_prefix_cache,
            vocabulary=fingerprint if self.structured is not None else "",
            trace_context=checked(submit.trace_context),
        )


def open_request(
    submit: Submit,
    owner: GatewayKey | None,
    loaded: LoadedTokenizer,
    tool_format: ToolFormat | None = None,
    structured: StructuredOutput | None = None,
) -> Request:
    """The pasts are replayed, so that each choice's text goes on where its client is."""
    choices: dict[int, Choice] = {}
    tools = submit.tools if submit.tools is not None and submit.tools.choice is not ToolChoice.NONE else None
    for past in submit.choices:
        if tools is not None and tool_format is not None:
            parser = ToolCallParser(tool_format, tools, call_ids(tool_format, submit.request_id, past.index))
            stream = OutputStream(loaded, submit.sampling, submit.text, parser, tool_format.marker_ids(loaded))
        else:
            stream = OutputStream(loaded, submit.sampling, submit.text)
        stream.resume(past.output_token_ids, past.sent_bytes, past.sent_call_bytes)
        ids = list(past.output_token_ids)
        logprobs: list[TokenLogprobs] | None = [] if submit.sampling.logprobs is not None else None
        choices[past.index] = Choice(past.index, ids, stream, logprobs, len(ids))
    return Request(submit, owner, choices, structured=structured)


def advance(
    request: Request,
    choice: Choice,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs] | None = None,
    finish_reason: FinishReason | None = None,
    stop_reason: int | str | None = None,
) -> Delta:
    """Further tokens of a choice; what they mean for its client. Tokens past a stop string are dropped."""
    start = len(choice.token_ids)
    text, used, tool_calls = choice.stream.feed(token_ids)
    if finish_reason is not None:
        rest = choice.stream.finish()
        text, tool_calls = text + rest.text, tool_calls + rest.tool_calls
    if choice.stream.stop is not None:
        finish_reason, stop_reason = FinishReason.STOP, choice.stream.stop
    choice.finish_reason, choice.stop_reason = finish_reason, stop_reason
    choice.token_ids.extend(token_ids[:used])
    told = list(logprobs[:used]) if logprobs is not None and choice.logprobs is not None else None
    if choice.logprobs is not None:
        if told is None and used:  # these came without, so what is known begins after them
            choice.logprobs, choice.logprobs_from = [], len(choice.token_ids)
        else:
            choice.logprobs.extend(told or ())
    return Delta(
        request_id=request.request_id,
        attempt=request.attempt,
        index=choice.index,
        start=start,
        token_ids=list(token_ids[:used]),
        text=text,
        num_text_bytes=choice.stream.num_text_bytes,
        logprobs=told,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=choice.num_cached_tokens,
        tool_calls=tool_calls,
        num_call_bytes=choice.stream.num_call_bytes,
    )


def adopt(request: Request, choice: Choice, known: Choice) -> list[Delta]:
    """Brings a choice up to where it was `known` to be; the deltas are what its client lacks."""
    past = len(choice.token_ids)
    choice.num_cached_tokens = known.num_cached_tokens
    rest = known.token_ids[past:]
    bare = len(rest)
    if known.logprobs is not None:
        bare = min(max(0, known.logprobs_from - past), len(rest))
    deltas: list[Delta] = []
    if bare:
        last = bare == len(rest)
        finish = (known.finish_reason, known.stop_reason) if last else (None, None)
        deltas.append(advance(request, choice, rest[:bare], None, *finish))
    if bare < len(rest):
        entries = known.logprobs[past + bare - known.logprobs_from :] if known.logprobs is not None else None
        deltas.append(advance(request, choice, rest[bare:], entries, known.finish_reason, known.stop_reason))
    if not rest and known.finish_reason is not None:
        deltas.append(advance(request, choice, [], None, known.finish_reason, known.stop_reason))
    return deltas


def cut_to(request: Request, attempt: int, next_index: dict[int, int]) -> Submit:
    """The request as it could be submitted by a gateway whose client has `next_index[c]` tokens of each choice."""
    pasts = [ChoicePast(c.index, c.token_ids[: next_index.get(c.index, 0)]) for c in request.choices.values()]
    return msgspec.structs.replace(request.submit, attempt=attempt, choices=pasts)
