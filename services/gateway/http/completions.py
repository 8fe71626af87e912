"""/v1/completions: one or several prompts, each continued n times."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from quartet.services.gateway.events import Chunk, Completed, Event, PromptChunk, Started
from quartet.services.gateway.group import Group
from quartet.services.gateway.http.answers import FINISH_REASONS, ChoiceAnswer, PromptAnswer, UsageCounter, gather
from quartet.services.gateway.http.api import Api, head
from quartet.services.gateway.http.constraints import structured_output
from quartet.services.gateway.http.exchange import Exchange
from quartet.services.gateway.http.logprobs import CompletionLogprobsWriter, prompt_logprobs
from quartet.services.gateway.http.params import Params, completion_params
from quartet.services.gateway.http.prompts import completion_prompts
from quartet.services.gateway.http.requests import CompletionRequest
from quartet.services.gateway.http.responses import Completion, CompletionChoice
from quartet.services.gateway.http.sse import DONE, ChunkWriter
from quartet.shared.messages import Decode, Decoded, Prompt, TextPrompt, TokenLogprobs, TokensPrompt

_DECODER = msgspec.json.Decoder(CompletionRequest)


async def completions(api: Api, exchange: Exchange) -> None:
    body = await exchange.read_json(_DECODER, api.settings.max_body_bytes, api.settings.body_timeout)
    async with exchange.while_client_is_there():
        name, model = api.model(body.model)
        exchange.fields["structured"] = structured_output(body)[1]
        params = completion_params(body, api.limits, exchange.key.name)
        prompts = completion_prompts(
            body.prompt, body.add_special_tokens is not False, api.settings.max_prompts_per_request
        )
        if body.truncate_prompt_tokens is not None:
            prompts = [await api.truncate(prompt, body.truncate_prompt_tokens, params, model) for prompt in prompts]
        echoes = await asyncio.gather(*(_echo(api, prompt) for prompt in prompts)) if body.echo else []
        run = _Run(api, body, params, list(echoes), name, model.model_fingerprint)
        with api.generating(exchange, prompts, params) as group:
            if body.stream:
                await run.stream(exchange, group, len(prompts))
            else:
                await exchange.respond(200, msgspec.json.encode(await run.whole(group, len(prompts))))


async def _echo(api: Api, prompt: Prompt) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    assert isinstance(prompt, TokensPrompt)
    return (await api.ask(Decoded, lambda call_id: Decode(call_id, prompt.token_ids, True))).text


class _Run:
    """One request. `echoes` are the prompts' texts, or none."""

    def __init__(
        self, api: Api, body: CompletionRequest, params: Params, echoes: list[str], name: str, fingerprint: str
    ) -> None:
        self._api = api
        self._body = body
        self._n = params.n
        self._echoes = echoes
        self._name = name
        self._fingerprint = fingerprint
        self._first_texts: list[str] = []

    async def whole(self, group: Group, num_prompts: int) -> Completion:
        answers, usage = await gather(group, num_prompts, self._n)
        await self._find_first_texts([answer.prompt_token_ids for answer in answers])
        choices = [
            self._choice(i, answer, index, choice)
            for i, answer in enumerate(answers)
            for index, choice in enumerate(answer.choices)
        ]
        head = self._head(answers[0].request_id)
        return Completion(**head, choices=choices, usage=usage)

    async def stream(self, exchange: Exchange, group: Group, num_prompts: int) -> None:
        """The head is sent when all prompts are accepted: what is wrong with one is told by a status."""
        waiting = set(range(num_prompts))
        started: dict[int, Started] = {}
        early: list[tuple[int, Event]] = []
        while waiting:
            for i, event in await group.next():
                if isinstance(event, Started):
                    started[i] = event
                    waiting.discard(i)
                else:
                    early.append((i, event))
        await self._find_first_texts([started[i].prompt_token_ids for i in range(num_prompts)])
        stream = _Stream(self._body, self._n, self._head(started[0].request_id), started, self._echoes)
        stream.first_texts = self._first_texts
        await exchange.start_events()
        first = stream.begin() + stream.write(early)
        if first:
            await exchange.write(first)
        while events := await group.next():
            data = stream.write(events)
            if data:
                await exchange.write(data)
        await exchange.write(stream.end(), more=False)

    def _head(self, request_id: int) -> dict[str, Any]:
        return head(f"cmpl-{request_id:016x}", "text_completion", self._name, self._fingerprint)

    async def _find_first_texts(self, prompts: list[list[int]]) -> None:
        """The texts of prompts' first tokens, which have no log-probabilities and so come from nowhere else."""
        if self._echoes and self._body.logprobs is not None:
            decoded = await asyncio.gather(
                *(self._api.ask(Decoded, lambda call_id, ids=ids: Decode(call_id, ids[:1])) for ids in prompts)  # type: ignore[misc]
            )
            self._first_texts = [answer.text for answer in decoded]

    def _choice(self, i: int, answer: PromptAnswer, index: int, choice: ChoiceAnswer) -> CompletionChoice:
        body = self._body
        result = CompletionChoice(i * self._n + index, choice.text, None, choice.finish_reason, choice.stop_reason)
        entries: list[TokenLogprobs | None] = [*choice.logprobs]
        first_text = ""
        if self._echoes:
            result.text = self._echoes[i] + choice.text
            if body.logprobs is not None:
                entries = [*answer.prompt_logprobs, *entries]
                first_text = self._first_texts[i]
        if body.logprobs is not None:
            result.logprobs = CompletionLogprobsWriter(body.logprobs).write(entries, first_text)
        if body.return_token_ids:
            result.token_ids, result.prompt_token_ids = choice.token_ids, answer.prompt_token_ids
        if body.prompt_logprobs is not None:
            result.prompt_logprobs = prompt_logprobs(answer.prompt_logprobs, body.prompt_logprobs)
        return result


class _Stream:
    """Events to chunks. A prompt that is echoed with log-probabilities is written when it has all of them, and
    what its choices say meanwhile after it."""

    def __init__(
        self,
        body: CompletionRequest,
        n: int,
        head: dict[str, Any],
        started: dict[int, Started],
        echoes: list[str],
    ) -> None:
        self._body = body
        self._n = n
        self._started = started
        self._echoes = echoes
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._tells_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self._writer = ChunkWriter(head, len(started) * n, b'"text":', b"", self._include_usage)
        self._counter = UsageCounter()
        for each in started.values():
            self._counter.count_prompt(each)
        # Choices whose first chunk is still to come, where it tells the prompt's ids.
        self._to_begin = set(range(len(started) * n)) if body.return_token_ids else set()
        # Whether a chunk is no more than its text.
        self._plain = body.logprobs is None and not body.return_token_ids and not self._tells_usage
        self._scored: dict[int, list[TokenLogprobs | None]] = {}
        self._held: dict[int, list[Chunk]] = {}
        if echoes and body.logprobs is not None:
            self._scored = {i: [] for i in started}
            self._held = {i: [] for i in started}
        self._logprobs = [CompletionLogprobsWriter(body.logprobs or 0) for _ in range(len(started) * n)]
        self.first_texts: list[str] = []

    def begin(self) -> bytes:
        if not self._echoes or self._held:
            return b""
        return b"".join(self._echo(i, None) for i in self._started)

    def write(self, events: list[tuple[int, Event]]) -> bytes:
        parts: list[bytes] = []
        for i, event in events:
            match event:
                case Chunk():
                    if i in self._held:
                        self._held[i].append(event)
                    else:
                        parts.append(self._chunk(i, event))
                case PromptChunk() if i in self._scored:
                    entries = self._scored[i]
                    entries += event.entries
                    if len(entries) == len(self._started[i].prompt_token_ids):
                        parts.append(self._echo(i, self._scored.pop(i)))
                        parts += [self._chunk(i, chunk) for chunk in self._held.pop(i)]
                case Completed():
                    self._counter.add(event)
        return b"".join(parts)

    def end(self) -> bytes:
        return (self._writer.usage(self._counter.usage()) if self._include_usage else b"") + DONE

    def _chunk(self, i: int, chunk: Chunk) -> bytes:
        index = i * self._n + chunk.choice_index
        reason = chunk.finish_reason
        if reason is None and self._plain:
            return self._writer.text(index, chunk.text) if chunk.text else b""
        if reason is None and not chunk.text and not chunk.token_ids:
            return b""
        logprobs = None if chunk.logprobs is None else self._logprobs[index].write(chunk.logprobs)
        return self._writer.full(
            index,
            chunk.text,
            logprobs=logprobs,
            finish_reason=None if reason is None else FINISH_REASONS[reason],
            stop_reason=chunk.stop_reason,
            token_ids=chunk.token_ids if self._body.return_token_ids else None,
            extra=self._first(i, index),
            beside={"usage": self._counter.so_far(chunk)} if self._tells_usage else None,
        )

    def _first(self, i: int, index: int) -> dict[str, Any] | None:
        if index not in self._to_begin:
            return None
        self._to_begin.discard(index)
        return {"prompt_token_ids": self._started[i].prompt_token_ids}

    def _echo(self, i: int, entries: list[TokenLogprobs | None] | None) -> bytes:
        """The prompt, in front of each of its choices."""
        parts = []
        for index in range(i * self._n, (i + 1) * self._n):
            logprobs = None if entries is None else self._logprobs[index].write(entries, self.first_texts[i])
            beside = {"usage": self._counter.so_far()} if self._tells_usage else None
            text, extra = self._echoes[i], self._first(i, index)
            parts.append(self._writer.full(index, text, logprobs=logprobs, extra=extra, beside=beside))
        return b"".join(parts)
