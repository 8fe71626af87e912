"""/v1/responses."""

from __future__ import annotations

import msgspec

from quartet.services.gateway.events import Started
from quartet.services.gateway.group import Group
from quartet.services.gateway.http.api import Api
from quartet.services.gateway.http.exchange import Exchange
from quartet.services.gateway.http.responses_api.answer import Answer
from quartet.services.gateway.http.responses_api.bodies import ResponsesRequest
from quartet.services.gateway.http.responses_api.convert import check, fields_of, params_of, prompt_of, tools_of
from quartet.shared.messages import Prompt

_DECODER = msgspec.json.Decoder(ResponsesRequest)


async def responses(api: Api, exchange: Exchange) -> None:
    body = await exchange.read_json(_DECODER, api.settings.max_body_bytes, api.settings.body_timeout)
    async with exchange.while_client_is_there():
        name, model = api.model(body.model)
        exchange.fields |= fields_of(body)
        check(body)
        params = params_of(body, api.limits, exchange.key.name)
        tools = tools_of(body, api.limits)
        prompt: Prompt = prompt_of(body, api.settings.max_messages)
        if body.truncate_prompt_tokens is not None:
            prompt = await api.truncate(prompt, body.truncate_prompt_tokens, params, model, tools)
        with api.generating(exchange, [prompt], params, tools) as group:
            await _answer(exchange, group, body, name)


async def _answer(exchange: Exchange, group: Group, body: ResponsesRequest, name: str) -> None:
    """A stream's head is sent when the prompt is accepted: what is wrong with it is told by a status."""
    events = await group.next()
    _, started = events[0]
    assert isinstance(started, Started)
    answer = Answer(body, started.request_id, name)
    if body.stream:
        exchange.error_form = exchange.error_form._replace(event=answer.failed)
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
        await exchange.respond(200, msgspec.json.encode(answer.response()))
