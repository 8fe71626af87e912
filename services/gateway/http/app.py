"""The application: routes, and around them keys, request ids and the form of errors."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quartet.services.gateway.events import StreamError
from quartet.services.gateway.http import about, openapi, static, tokens
from quartet.services.gateway.http.api import Api
from quartet.services.gateway.http.auth import find_key, is_forged, unauthorized
from quartet.services.gateway.http.chat import chat_completions
from quartet.services.gateway.http.completions import completions
from quartet.services.gateway.http.error_forms import error_form, is_anthropic
from quartet.services.gateway.http.errors import ApiError, ClientLeft, api_error
from quartet.services.gateway.http.exchange import Exchange
from quartet.services.gateway.http.live import live
from quartet.services.gateway.http.messages_api.endpoints import count_tokens, messages
from quartet.services.gateway.http.responses_api.endpoint import responses
from quartet.shared.log import get_logger
from quartet.shared.sampling_params import InvalidField
from quartet.shared.trace_context import checked, client_trace

# What needs no key: whether the process lives, and nothing else.
OPEN_PATHS = ("/health",)
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

_log = get_logger()

Run = Callable[[Api, Exchange], Awaitable[None]]


ROUTES: tuple[tuple[str, str, Run], ...] = (
    ("GET", "/v1/models", about.models),
    ("GET", "/v1/models/{name:path}", about.model),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/responses", responses),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("POST", "/reset_prefix_cache", about.reset_prefix_cache),
    ("GET", "/version", about.version),
    ("GET", "/health", about.health),
    ("GET", "/ready", about.ready),
    ("GET", "/metrics", about.metrics),
    ("GET", "/live", live),
    ("GET", "/openapi.json", openapi.document),
    ("GET", "/docs", openapi.page),
    ("GET", "/", static.page),
    ("GET", "/page/{name}", static.page),
)

_PLAIN = frozenset(path for _, path, _ in ROUTES)
_PREFIXES = [(path.partition("{")[0], path) for _, path, _ in ROUTES if "{" in path]


def make_app(api: Api) -> ASGIApp:
    routes = [Route(path, Endpoint(api, run), methods=[method]) for method, path, run in ROUTES]
    starlette = Starlette(routes=routes, exception_handlers={HTTPException: _tell, Exception: _tell})
    # An alias of a route would be one more door to guard.
    starlette.router.redirect_slashes = False
    app: ASGIApp = Front(starlette, api)
    if api.settings.cors_allow_origins:
        app = CORSMiddleware(
            app,
            allow_origins=api.settings.cors_allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def handler(path: str) -> str:
    """What a path counts as: one of the routes, or "other"."""
    if path in _PLAIN:
        return path
    return next((route for prefix, route in _PREFIXES if path.startswith(prefix)), "other")


class Front:
    """Lets in only who has a key, but to see whether the server lives, and no other site's pages; gives each response
    its request id."""

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self._app = app
        self._keys = api.keys
        self._origins = frozenset(api.settings.cors_allow_origins)
        self._responses = api.table.metrics.http_responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        client_trace.set(checked(headers.get(b"traceparent")))
        given = headers.get(b"x-request-id", b"")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()

        anthropic = is_anthropic(scope["path"], b"anthropic-version" in headers)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = (b"x-request-id", b"request-id") if anthropic else (b"x-request-id",)
                message["headers"] = [*message["headers"], *((name, request_id) for name in names)]
                self._responses[scope["method"], handler(scope["path"]), message["status"]] += 1
            await send(message)

        exchange = Exchange(scope, receive, send_with_id)
        if is_forged(scope["method"], headers, self._origins):
            message = "pages of other origins may ask only where cors_allow_origins names them"
            await _respond(exchange, ApiError(403, message, code="foreign_origin"))
            return
        key = find_key(self._keys, headers)
        if key is None and scope["path"] not in OPEN_PATHS:
            await _respond(exchange, unauthorized(scope["method"], headers))
            return
        scope["state"]["api_key"] = key
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            _log.exception("request failed", path=scope["path"], http_request_id=request_id.decode())


class Endpoint:
    """A route. An error in a stream that has begun is its last event; any other one is a status."""

    def __init__(self, api: Api, run: Run) -> None:
        self._api = api
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._api.settings.sse_keep_alive_interval)
        try:
            await self._run(self._api, exchange)
        except ClientLeft:
            _log.debug("the client has left", path=scope["path"])
        except Exception as error:
            if not isinstance(error, ApiError | InvalidField | StreamError):
                _log.exception("request failed", path=scope["path"])
            answer = api_error(error, exchange.fields)
            if exchange.started:
                await exchange.write(exchange.error_form.event(answer), more=False)
            else:
                await _respond(exchange, answer)


async def _tell(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses, and in its words: a path or a method that is not there."""
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path[:200]}: {error.detail.lower()}"
        answer = ApiError(error.status_code, message, headers=tuple((error.headers or {}).items()))
    else:
        answer = api_error(error)
    anthropic = is_anthropic(request.url.path, "anthropic-version" in request.headers)
    body = error_form(anthropic).body(answer)
    return Response(body, answer.status, dict(answer.headers), "application/json")


async def _respond(exchange: Exchange, error: ApiError) -> None:
    await exchange.respond(error.status, exchange.error_form.body(error), error.headers)
