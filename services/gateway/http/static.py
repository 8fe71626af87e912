"""The page at the root: files that come with this package, and nothing from elsewhere."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from typing import NamedTuple

from quartet.services.gateway.http.api import Api
from quartet.services.gateway.http.errors import ApiError
from quartet.services.gateway.http.exchange import Exchange

INDEX = "index.html"
CONTENT_TYPES = {
    "css": b"text/css; charset=utf-8",
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
# The page may load and call this server only, and no other page may show it in a frame.
_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
_HEADERS = (
    ("cache-control", "no-cache"),  # kept, but asked for again: an upgraded gateway's page is seen at once
    ("content-security-policy", _POLICY),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
)


class PageFile(NamedTuple):
    body: bytes
    content_type: bytes
    etag: str


async def page(api: Api, exchange: Exchange) -> None:
    """`/` and `/page/{name}`."""
    name = exchange.scope["path_params"].get("name", INDEX)
    file = page_files().get(name)
    if file is None:
        raise ApiError(404, f"page/{name[:200]}: not found")
    headers = (*_HEADERS, ("etag", file.etag))
    if file.etag in [given.strip().removeprefix("W/") for given in _if_none_match(exchange).split(",")]:
        await exchange.respond(304, b"", headers, file.content_type)
    else:
        await exchange.respond(200, file.body, headers, file.content_type)


@functools.cache
def page_files() -> dict[str, PageFile]:
    """By name. Read when the page is first asked for."""
    folder = resources.files("quartet.services.gateway.http").joinpath("page")
    files = {}
    for entry in folder.iterdir():
        content_type = CONTENT_TYPES.get(entry.name.rpartition(".")[2])
        if content_type is not None:
            body = entry.read_bytes()
            files[entry.name] = PageFile(body, content_type, f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return files


def _if_none_match(exchange: Exchange) -> str:
    return (exchange.header(b"if-none-match") or b"").decode("latin-1")
