"""A generation's events gathered into whole answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from quartet.services.gateway.events import Chunk, Completed, Event, PromptChunk, Started
from quartet.services.gateway.group import Group
from quartet.services.gateway.http.responses import PromptTokensDetails, Usage
from quartet.shared.messages import FinishReason, TokenLogprobs, ToolCallDelta

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


@dataclass
class ChoiceAnswer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None
    tool_calls: dict[int, ToolCallDelta] = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        for part in chunk.tool_calls:
            call = self.tool_calls.setdefault(part.index, ToolCallDelta(part.index))
            call.id, call.name = call.id or part.id, call.name or part.name
            call.arguments += part.arguments
        self.pieces.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        if chunk.logprobs is not None:
            self.logprobs += chunk.logprobs
        if chunk.finish_reason is not None:
            self.finish_reason = FINISH_REASONS[chunk.finish_reason]
            self.stop_reason = chunk.stop_reason
            self.text = "".join(self.pieces)


@dataclass
class PromptAnswer:
    """All that came of one prompt."""

    request_id: int = 0
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    choices: list[ChoiceAnswer] = field(default_factory=list)

    def add(self, event: Event) -> None:
        match event:
            case Chunk():
                self.choices[event.choice_index].add(event)
            case Started():
                self.request_id, self.prompt_token_ids = event.request_id, event.prompt_token_ids
            case PromptChunk():
                self.prompt_logprobs += event.entries


class UsageCounter:
    """Sums up what each stream of a group says at its end."""

    def __init__(self) -> None:
        self._prompt = self._completion = self._cached = 0
        self._prompt_so_far = self._completion_so_far = 0

    def add(self, completed: Completed) -> None:
        self._prompt += completed.prompt_tokens
        self._completion += completed.completion_tokens
        self._cached += completed.cached_tokens

    def count_prompt(self, started: Started) -> None:
        """For `so_far`, of a stream that has begun."""
        self._prompt_so_far += len(started.prompt_token_ids)

    def so_far(self, chunk: Chunk | None = None) -> Usage:
        """With the tokens of this chunk. What was in the cache is known at the end."""
        self._completion_so_far += 0 if chunk is None else len(chunk.token_ids)
        total = self._prompt_so_far + self._completion_so_far
        return Usage(self._prompt_so_far, self._completion_so_far, total, PromptTokensDetails(0))

    def usage(self) -> Usage:
        total = self._prompt + self._completion
        return Usage(self._prompt, self._completion, total, PromptTokensDetails(self._cached))


async def gather(group: Group, num_prompts: int, n: int) -> tuple[list[PromptAnswer], Usage]:
    """Waits for all of it. Raises StreamError."""
    answers = [PromptAnswer(choices=[ChoiceAnswer() for _ in range(n)]) for _ in range(num_prompts)]
    counter = UsageCounter()
    while events := await group.next():
        for i, event in events:
            if isinstance(event, Completed):
                counter.add(event)
            else:
                answers[i].add(event)
    return answers, counter.usage()
