"""API keys on HTTP: where one may stand in a request, and what is answered without one; and which requests another
site's page makes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Mapping

from quartet.services.gateway.api_keys import ApiKey, ApiKeys
from quartet.services.gateway.http.errors import ApiError

_SAFE = ("GET", "HEAD", "OPTIONS")
_FOREIGN = (b"cross-site", b"same-site")


def find_key(keys: ApiKeys, headers: Mapping[bytes, bytes]) -> ApiKey | None:
    """The key of `Authorization: Bearer KEY`, `x-api-key: KEY` or `Authorization: Basic` with it as the password."""
    given = _given(headers) or [""]
    return next((found for key in given if (found := keys.find(key)) is not None), None)


def unauthorized(method: str, headers: Mapping[bytes, bytes]) -> ApiError:
    """401. Only who opens a page is offered Basic, at which browsers ask for a password."""
    if _given(headers):
        message = "the API key is not known"
    else:
        message = "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
    opens_page = method in ("GET", "HEAD") and b"text/html" in headers.get(b"accept", b"").lower()
    scheme = 'Basic realm="Quartet: the API key is the password", charset="UTF-8"' if opens_page else "Bearer"
    return ApiError(401, message, code="invalid_api_key", headers=(("www-authenticate", scheme),))


def is_forged(method: str, headers: Mapping[bytes, bytes], origins: Collection[str]) -> bool:
    """Whether a page that is none of `origins` asks for more than it may. A browser lets any page send to where it
    cannot read, with what the browser itself has to show: a password, a certificate, or its place in the network. What
    a browser never adds by itself, a bearer or x-api-key, some program has been given."""
    scheme = headers.get(b"authorization", b"").partition(b" ")[0].lower()
    basic = scheme == b"basic"
    if (scheme and not basic) or headers.get(b"x-api-key") or not _foreign(headers):
        return False
    # "*" is no trust in everybody who makes a browser send its user's password.
    if headers.get(b"origin", b"").decode("latin-1") in origins or ("*" in origins and not basic):
        return False
    if method not in _SAFE:
        return True
    return basic and not _follows_link(headers)


def _follows_link(headers: Mapping[bytes, bytes]) -> bool:
    dest = headers.get(b"sec-fetch-dest", b"document")
    return headers.get(b"sec-fetch-mode") == b"navigate" and dest == b"document"


def _given(headers: Mapping[bytes, bytes]) -> list[str]:
    """As "Bearer KEY" each."""
    found = []
    scheme, _, rest = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "basic":
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
