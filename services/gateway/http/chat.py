"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from quartet.services.gateway.events import Chunk, Completed, Event, Started
from quartet.services.gateway.group import Group
from quartet.services.gateway.http.answers import FINISH_REASONS, ChoiceAnswer, UsageCounter, gather
from quartet.services.gateway.http.api import Api, head
from quartet.services.gateway.http.constraints import chat_tools, structured_output
from quartet.services.gateway.http.exchange import Exchange
from quartet.services.gateway.http.logprobs import chat_logprobs, prompt_logprobs
from quartet.services.gateway.http.params import chat_params
from quartet.services.gateway.http.prompts import chat_prompt
from quartet.services.gateway.http.requests import ChatCompletionRequest
from quartet.services.gateway.http.responses import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatDelta,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from quartet.services.gateway.http.sse import DONE, ChunkWriter
from quartet.shared.messages import FinishReason, Prompt
from quartet.shared.messages import ToolCallDelta as CallPart

_DECODER = msgspec.json.Decoder(ChatCompletionRequest)
_FIRST = ChatDelta(role="assistant", content="")


async def chat_completions(api: Api, exchange: Exchange) -> None:
    body = await exchange.read_json(_DECODER, api.settings.max_body_bytes, api.settings.body_timeout)
    async with exchange.while_client_is_there():
        name, model = api.model(body.model)
        structured_field = structured_output(body)[1]
        exchange.fields |= {"logprobs": "top_logprobs", "prompt_token_ids": "messages", "structured": structured_field}
        params = chat_params(body, api.limits, exchange.key.name)
        tools = chat_tools(body, api.limits)
        prompt: Prompt = chat_prompt(body, body.messages, api.settings.max_messages)
        if body.truncate_prompt_tokens is not None:
            prompt = await api.truncate(prompt, body.truncate_prompt_tokens, params, model, tools)
        run = _Run(body, params.n, name, model.model_fingerprint)
        with api.generating(exchange, [prompt], params, tools) as group:
            if body.stream:
                await run.stream(exchange, group)
            else:
                await exchange.respond(200, msgspec.json.encode(await run.whole(group)))


class _Run:
    """One request."""

    def __init__(self, body: ChatCompletionRequest, n: int, name: str, fingerprint: str) -> None:
        self._body = body
        self._n = n
        self._name = name
        self._fingerprint = fingerprint

    async def whole(self, group: Group) -> ChatCompletion:
        (answer,), usage = await gather(group, 1, self._n)
        choices = [self._choice(index, choice) for index, choice in enumerate(answer.choices)]
        result = ChatCompletion(**self._head(answer.request_id, "chat.completion"), choices=choices, usage=usage)
        if self._body.prompt_logprobs is not None:
            result.prompt_logprobs = prompt_logprobs(answer.prompt_logprobs, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            result.prompt_token_ids = answer.prompt_token_ids
        return result

    async def stream(self, exchange: Exchange, group: Group) -> None:
        """The head is sent when the prompt is accepted: what is wrong with it is told by a status."""
        events = await group.next()
        _, started = events[0]
        assert isinstance(started, Started)
        stream = _Stream(self._body, self._n, self._head(started.request_id, "chat.completion.chunk"), started)
        await exchange.start_events()
        await exchange.write(stream.begin() + stream.write(events[1:]))
        while events := await group.next():
            data = stream.write(events)
            if data:
                await exchange.write(data)
        await exchange.write(stream.end(), more=False)

    def _head(self, request_id: int, kind: str) -> dict[str, Any]:
        return head(f"chatcmpl-{request_id:016x}", kind, self._name, self._fingerprint)

    def _choice(self, index: int, choice: ChoiceAnswer) -> ChatChoice:
        message = AnswerMessage("assistant", choice.text)
        reason = choice.finish_reason
        if choice.tool_calls:
            calls = choice.tool_calls.values()
            message.content = choice.text or None
            message.tool_calls = [ToolCall(call.id, CalledFunction(call.name, call.arguments)) for call in calls]
            reason = "tool_calls" if reason == "stop" else reason
        result = ChatChoice(index, message, None, reason, choice.stop_reason)
        if self._body.logprobs:
            result.logprobs = chat_logprobs(choice.logprobs, self._body.top_logprobs or 0)
        if self._body.return_token_ids:
            result.token_ids = choice.token_ids
        return result


class _Stream:
    """Events to chunks."""

    def __init__(self, body: ChatCompletionRequest, n: int, head: dict[str, Any], started: Started) -> None:
        self._body = body
        self._n = n
        self._started = started
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._tells_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self._writer = ChunkWriter(head, n, b'"delta":{"content":', b"}", self._include_usage)
        self._counter = UsageCounter()
        self._counter.count_prompt(started)
        self._called: set[int] = set()
        # Whether a chunk is no more than its text.
        self._plain = not body.logprobs and not body.return_token_ids and not self._tells_usage

    def begin(self) -> bytes:
        beside: dict[str, Any] = {"usage": self._counter.so_far()} if self._tells_usage else {}
        if self._body.return_token_ids:
            beside["prompt_token_ids"] = self._started.prompt_token_ids
        return b"".join(self._writer.full(index, "", delta=_FIRST, beside=beside) for index in range(self._n))

    def write(self, events: list[tuple[int, Event]]) -> bytes:
        parts: list[bytes] = []
        for _, event in events:
            match event:
                case Chunk():
                    parts.append(self._chunk(event))
                case Completed():
                    self._counter.add(event)
        return b"".join(parts)

    def end(self) -> bytes:
        return (self._writer.usage(self._counter.usage()) if self._include_usage else b"") + DONE

    def _chunk(self, chunk: Chunk) -> bytes:
        index, reason = chunk.choice_index, chunk.finish_reason
        if reason is None and self._plain and not chunk.tool_calls:
            return self._writer.text(index, chunk.text) if chunk.text else b""
        if reason is None and not chunk.text and not chunk.token_ids and not chunk.tool_calls:
            return b""
        logprobs = None if chunk.logprobs is None else chat_logprobs(chunk.logprobs, self._body.top_logprobs or 0)
        return self._writer.full(
            index,
            chunk.text,
            logprobs=logprobs,
            finish_reason=self._finish_reason(index, chunk),
            stop_reason=chunk.stop_reason,
            token_ids=chunk.token_ids if self._body.return_token_ids else None,
            delta=self._delta(chunk),
            beside={"usage": self._counter.so_far(chunk)} if self._tells_usage else None,
        )

    def _delta(self, chunk: Chunk) -> ChatDelta | None:
        """None when it is the text alone."""
        if chunk.tool_calls:
            return ChatDelta(content=chunk.text or None, tool_calls=[_call_delta(part) for part in chunk.tool_calls])
        return None if chunk.text or chunk.finish_reason is None else ChatDelta()

    def _finish_reason(self, index: int, chunk: Chunk) -> str | None:
        if chunk.tool_calls:
            self._called.add(index)
        if chunk.finish_reason is FinishReason.STOP and index in self._called:
            return "tool_calls"
        return None if chunk.finish_reason is None else FINISH_REASONS[chunk.finish_reason]


def _call_delta(part: CallPart) -> ToolCallDelta:
    """A call's first part says what is called."""
    if part.name:
        return ToolCallDelta(part.index, FunctionDelta(part.name, part.arguments), part.id, "function")
    return ToolCallDelta(part.index, FunctionDelta(arguments=part.arguments))
