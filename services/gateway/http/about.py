"""What is served and whether it can be used: /v1/models, /version, /health, /ready."""

from __future__ import annotations

import asyncio

import msgspec

from quartet.services.gateway.http.api import Api
from quartet.services.gateway.http.errors import ApiError
from quartet.services.gateway.http.exchange import Exchange
from quartet.services.gateway.http.messages_api import models as models_api
from quartet.services.gateway.http.responses import CacheReset, Health, Model, ModelList, Readiness, Version
from quartet.services.gateway.stream_table import StreamTable
from quartet.shared.config import version as installed_version
from quartet.shared.messages import PrefixCacheReset, ResetPrefixCache
from quartet.shared.metrics import exposition

RETRY_AFTER = (("retry-after", "1"),)


async def models(api: Api, exchange: Exchange) -> None:
    found = _models(api)
    body = models_api.list_body(found) if exchange.anthropic else msgspec.json.encode(ModelList(found))
    await exchange.respond(200, body)


async def model(api: Api, exchange: Exchange) -> None:
    wanted = exchange.scope["path_params"]["name"]
    if not wanted:
        raise ApiError(404, "model: the path ends without a name", param="model", code="model_not_found")
    name, _ = api.model(wanted)
    (found,) = (entry for entry in _models(api) if entry.id == name)
    await exchange.respond(200, models_api.model_body(found) if exchange.anthropic else msgspec.json.encode(found))


async def version(api: Api, exchange: Exchange) -> None:
    await exchange.respond(200, msgspec.json.encode(Version(installed_version())))


async def health(api: Api, exchange: Exchange) -> None:
    """The process lives."""
    await exchange.respond(200, msgspec.json.encode(Health()))


async def ready(api: Api, exchange: Exchange) -> None:
    """Requests can be answered now: every service is there and makes progress."""
    reason = why_not_ready(api.table)
    status, headers = (503, RETRY_AFTER) if reason else (200, ())
    await exchange.respond(status, msgspec.json.encode(Readiness(not reason, reason)), headers)


async def reset_prefix_cache(api: Api, exchange: Exchange) -> None:
    """For operators: no prompt finds anything of what has been computed so far."""
    reset = await api.ask(PrefixCacheReset, ResetPrefixCache)
    await exchange.respond(200, msgspec.json.encode(CacheReset(reset.num_blocks)))


async def metrics(api: Api, exchange: Exchange) -> None:
    """For Prometheus. In a thread, since to write it all takes a moment."""
    if api.collector is None:
        raise ApiError(404, "there are no metrics: prometheus-client is not installed")
    body, content_type = await asyncio.to_thread(exposition, api.collector)
    await exchange.respond(200, body, content_type=content_type.encode())


def why_not_ready(table: StreamTable) -> str:
    """Empty when it is."""
    if table.draining:
        return "the gateway is shutting down"
    if table.ready:
        return ""
    peers = [tokenizer.peer for tokenizer in table.tokenizers.values() if tokenizer.peer.alive]
    if not peers:
        return "no tokenizer is connected"
    if all(peer.draining for peer in peers):
        return "every tokenizer is shutting down"
    if any(peer.ready and peer.stalled for peer in peers):
        return "a service makes no progress"
    return "the scheduler or the executor is not there, or not ready yet"


def _models(api: Api) -> list[Model]:
    served, _ = api.table.model()
    return [
        Model(name, api.started_at, root=served.name, max_model_len=served.max_model_len)
        for name in api.model_names(served)
    ]
