"""API keys on HTTP: where one may stand in a request, and what is answered without one."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from quartet.services.gateway.api_keys import ApiKey, ApiKeys
from quartet.services.gateway.http.errors import ApiError

_SAFE = ("GET", "HEAD", "OPTIONS")
# A browser sends a password that it knows with every request, so also with one that another site's page makes.
_FOREIGN = (b"cross-site", b"same-site")


def find_key(keys: ApiKeys, method: str, headers: Mapping[bytes, bytes]) -> ApiKey | None:
    """The key of `Authorization: Bearer KEY`, `x-api-key: KEY` or `Authorization: Basic` with it as the password."""
    given = _given(method, headers) or [""]
    return next((found for key in given if (found := keys.find(key)) is not None), None)


def unauthorized(method: str, headers: Mapping[bytes, bytes]) -> ApiError:
    """401. Only who opens a page is offered Basic, at which browsers ask for a password."""
    if _given(method, headers):
        message = "the API key is not known"
    else:
        message = "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
    opens_page = method in ("GET", "HEAD") and b"text/html" in headers.get(b"accept", b"").lower()
    scheme = 'Basic realm="Quartet: the API key is the password", charset="UTF-8"' if opens_page else "Bearer"
    return ApiError(401, message, code="invalid_api_key", headers=(("www-authenticate", scheme),))


def _given(method: str, headers: Mapping[bytes, bytes]) -> list[str]:
    """As "Bearer KEY" each."""
    found = []
    scheme, _, rest = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "basic":
        if method in _SAFE or not _foreign(headers):
            found.append(f"Bearer {_password(rest)}")
    elif scheme:
        found.append(f"{scheme} {rest}")
    if headers.get(b"x-api-key"):
        found.append("Bearer " + headers[b"x-api-key"].decode("latin-1"))
    return found


def _password(credentials: str) -> str:
    try:
        decoded = base64.b64decode(credentials.strip(), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return decoded.partition(":")[2]


def _foreign(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a page of another origin asks, as its browser tells."""
    if b"sec-fetch-site" in headers:
        return headers[b"sec-fetch-site"] in _FOREIGN
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")
