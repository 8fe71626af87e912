"""The API's description, made from the types of its bodies: for programs and for people."""

from __future__ import annotations

from quartet.services.gateway.http.api import Api
from quartet.services.gateway.http.exchange import Exchange


async def document(api: Api, exchange: Exchange) -> None:
    await exchange.respond(200, b"{}")


async def page(api: Api, exchange: Exchange) -> None:
    await exchange.respond(200, b"{}")
