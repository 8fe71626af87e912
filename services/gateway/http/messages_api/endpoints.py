"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import re

import msgspec

from quartet.services.gateway.events import Started
from quartet.services.gateway.group import Group
from quartet.services.gateway.http.api import Api
from quartet.services.gateway.http.errors import ApiError
from quartet.services.gateway.http.exchange import Exchange
from quartet.services.gateway.http.messages_api.answer import Answer
from quartet.services.gateway.http.messages_api.bodies import CountTokensRequest, MessagesRequest, TokenCount
from quartet.services.gateway.http.messages_api.convert import fields_of, params_of, prompt_of, tools_of
from quartet.shared.messages import Encode, Encoded, Prompt

# Since this version of the API a message and its events have had the form that they have here.
OLDEST_VERSION = b"2023-06-01"
_VERSION = re.compile(rb"\d{4}-\d\d-\d\d")

_DECODER = msgspec.json.Decoder(MessagesRequest)
_COUNT_DECODER = msgspec.json.Decoder(CountTokensRequest)


async def messages(api: Api, exchange: Exchange) -> None:
    _check_version(exchange)
    body = await exchange.read_json(_DECODER, api.settings.max_body_bytes, api.settings.body_timeout)
    async with exchange.while_client_is_there():
        name, model = api.model(body.model)
        exchange.fields |= fields_of(body)
        params = params_of(body, api.limits, exchange.key.name)
        tools = tools_of(body, api.limits)
        prompt: Prompt = prompt_of(body, api.settings.max_messages)
        if body.truncate_prompt_tokens is not None:
            prompt = await api.truncate(prompt, body.truncate_prompt_tokens, params, model, tools)
        with api.generating(exchange, [prompt], params, tools) as group:
            await _answer(exchange, group, body, name)


async def count_tokens(api: Api, exchange: Exchange) -> None:
    """As many as the same request's prompt has."""
    _check_version(exchange)
    body = await exchange.read_json(_COUNT_DECODER, api.settings.max_body_bytes, api.settings.body_timeout)
    async with exchange.while_client_is_there():
        api.model(body.model)
        exchange.fields["prompt_token_ids"] = "messages"
        tools = tools_of(body, api.limits)
        prompt = prompt_of(body, api.settings.max_messages)
        encoded = await api.ask(Encoded, lambda call_id: Encode(call_id, prompt, tools))
        await exchange.respond(200, msgspec.json.encode(TokenCount(len(encoded.token_ids))))


async def _answer(exchange: Exchange, group: Group, body: MessagesRequest, name: str) -> None:
    """A stream's head is sent when the prompt is accepted: what is wrong with it is told by a status."""
    events = await group.next()
    _, started = events[0]
    assert isinstance(started, Started)
    answer = Answer(started.request_id, name, len(started.prompt_token_ids), bool(body.tools))
    if body.stream:
        await exchange.start_events()
        await exchange.write(answer.begin())
    while events:
        changes = [change for _, event in events for change in answer.add(event)]
        if body.stream and changes:
            await exchange.write(answer.write(changes))
        events = await group.next()
    if body.stream:
        await exchange.write(answer.end(), more=False)
    else:
        await exchange.respond(200, msgspec.json.encode(answer.message()))


def _check_version(exchange: Exchange) -> None:
    version = exchange.header(b"anthropic-version")
    if version is not None and not (_VERSION.fullmatch(version) and version >= OLDEST_VERSION):
        given = version.decode("latin-1")[:40]
        raise ApiError(400, f"anthropic-version: must be {OLDEST_VERSION.decode()} or later, got {given!r}")
