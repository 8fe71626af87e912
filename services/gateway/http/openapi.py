"""The API's description, made from the types of its bodies: for programs at /openapi.json, for people at /docs."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import msgspec

from quartet.services.gateway.http import requests, responses
from quartet.services.gateway.http.api import Api
from quartet.services.gateway.http.docs import render
from quartet.services.gateway.http.errors import ErrorBody
from quartet.services.gateway.http.exchange import Exchange
from quartet.services.gateway.http.messages_api.bodies import (
    CountTokensRequest,
    MessagesAnswer,
    MessagesEvent,
    MessagesRequest,
    TokenCount,
)
from quartet.services.gateway.http.messages_api.errors import MessagesError
from quartet.services.gateway.http.responses_api.bodies import Response, ResponsesRequest
from quartet.services.gateway.http.responses_api.events import ResponsesEvent
from quartet.shared.config import version

_REFERENCE = "#/components/schemas/{name}"
HTML = b"text/html; charset=utf-8"


class Operation(NamedTuple):
    """`events`: what the chunks of a stream are, where there is one. `error`: the body of its errors."""

    method: str
    path: str
    summary: str
    answer: type
    request: type | None = None
    events: Any = None
    statuses: tuple[int, ...] = ()
    error: type = ErrorBody


_ANY_BODY = (400, 413, 415)
_GENERATION = (*_ANY_BODY, 404, 429, 500, 503)

OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answers a conversation, put into one prompt by the model's chat template.",
        responses.ChatCompletion,
        requests.ChatCompletionRequest,
        responses.ChatCompletionChunk,
        _GENERATION,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continues texts or token ids, or scores them (max_tokens 0 with echo and logprobs).",
        responses.Completion,
        requests.CompletionRequest,
        responses.Completion,
        _GENERATION,
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answers a text or a conversation, as OpenAI's newer API has it. Nothing is stored.",
        Response,
        ResponsesRequest,
        ResponsesEvent,
        _GENERATION,
    ),
    Operation(
        "post",
        "/v1/messages",
        "Answers a conversation, as Anthropic's API has it. The key may come as x-api-key.",
        MessagesAnswer,
        MessagesRequest,
        MessagesEvent,
        _GENERATION,
        MessagesError,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "How many tokens the prompt of a message request has.",
        TokenCount,
        CountTokensRequest,
        statuses=(*_ANY_BODY, 404, 503),
        error=MessagesError,
    ),
    Operation("get", "/v1/models", "What is served.", responses.ModelList, statuses=(503,)),
    Operation("get", "/v1/models/{name}", "One of them.", responses.Model, statuses=(404, 503)),
    Operation(
        "post",
        "/tokenize",
        "Text or messages to the ids that a request would use.",
        responses.Tokenized,
        requests.TokenizeRequest,
        statuses=(*_ANY_BODY, 404, 503),
    ),
    Operation(
        "post",
        "/detokenize",
        "Ids to text.",
        responses.Detokenized,
        requests.DetokenizeRequest,
        statuses=(*_ANY_BODY, 404, 503),
    ),
    Operation(
        "post", "/reset_prefix_cache", "Forgets all cached prefixes; for operators.", responses.CacheReset,
        statuses=(503,),
    ),
    Operation("get", "/version", "The server's version.", responses.Version),
    Operation("get", "/health", "Whether the process lives. Needs no key.", responses.Health),
    Operation("get", "/ready", "Whether requests can be answered now; 503 with the reason if not.",
              responses.Readiness),
)  # fmt: skip

_STATUSES = {
    400: "A field is wrong; `param` names it.",
    401: "The API key is missing or not known.",
    403: "A page of another origin asks, and `cors_allow_origins` does not name it.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too much is being worked on; Retry-After tells when to try again.",
    500: "The server's fault.",
    503: "A service is away; Retry-After tells when to try again.",
}


async def document(api: Api, exchange: Exchange) -> None:
    await exchange.respond(200, msgspec.json.encode(describe(api.keys.required)))


async def page(api: Api, exchange: Exchange) -> None:
    await exchange.respond(200, render(describe(api.keys.required)), content_type=HTML)


@functools.cache
def describe(keys: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document. `keys`: whether one is needed."""
    types = [t for op in OPERATIONS for t in (op.request, op.answer, op.events) if t is not None]
    types = [*dict.fromkeys([*types, *(op.error for op in OPERATIONS)])]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, by_type, keys)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Quartet",
            "version": version(),
            "description": "OpenAI's API for completions, chats and responses, and Anthropic's for messages; both with "
            "the further sampling fields of vLLM.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if keys:
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"key": []}, {"header": []}]
    return document


def _operation(operation: Operation, schemas: dict[type, dict[str, Any]], keys: bool) -> dict[str, Any]:
    good: dict[str, Any] = {"application/json": {"schema": schemas[operation.answer]}}
    if operation.events is not None:
        good["text/event-stream"] = {"schema": schemas[operation.events]}
    result: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}_{operation.path.strip('/').replace('/', '_').replace('{name}', 'name')}",
        "responses": {"200": {"description": "OK", "content": good}},
    }
    if operation.request is not None:
        body = {"application/json": {"schema": schemas[operation.request]}}
        result["requestBody"] = {"required": True, "content": body}
    if "{name}" in operation.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        result["parameters"] = [name]
    statuses = operation.statuses if operation.method == "get" else (*operation.statuses, 403)
    if operation.path == "/health":
        result["security"] = []
    elif keys:
        statuses = (*statuses, 401)
    error = {"application/json": {"schema": schemas[operation.error]}}
    for status in sorted(statuses):
        result["responses"][str(status)] = {"description": _STATUSES[status], "content": error}
    if operation.path == "/ready":
        result["responses"]["503"] = {"description": "Not ready.", "content": good}
    return result
