"""How a client's connection is kept private, told by the address and by PEM files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio

PLAIN = ("http://", "grpc://")
SECURE = ("https://", "grpcs://")


class Target:
    """What to connect to. TLS is used with an address of https:// or grpcs://, or with any of the files; the server
    is trusted when one of `tls_ca` (the usual authorities where it is empty) has signed its certificate. `tls_cert`
    and `tls_key` are this client's own, where the server asks for them. Raises ValueError."""

    def __init__(self, address: str, tls_ca: str = "", tls_cert: str = "", tls_key: str = "") -> None:
        files = tls_ca or tls_cert or tls_key
        plain = next((scheme for scheme in PLAIN if address.startswith(scheme)), "")
        secure = next((scheme for scheme in SECURE if address.startswith(scheme)), "")
        if plain and files:
            raise ValueError(f"{address} is without TLS, for which files were given; say {SECURE[0]}")
        if bool(tls_cert) != bool(tls_key):
            raise ValueError("tls_cert and tls_key belong together")
        self.address = address.removeprefix(plain or secure).rstrip("/")
        self._credentials: Any = None
        if secure or files:
            self._credentials = grpc.ssl_channel_credentials(
                _read("tls_ca", tls_ca), _read("tls_key", tls_key), _read("tls_cert", tls_cert)
            )

    def channel(self, options: Any = None) -> Any:
        """For threads."""
        if self._credentials is None:
            return grpc.insecure_channel(self.address, options=options)
        return grpc.secure_channel(self.address, self._credentials, options=options)

    def async_channel(self, options: Any = None, interceptors: Any = None) -> Any:
        """For asyncio, in a running loop."""
        if self._credentials is None:
            return grpc.aio.insecure_channel(self.address, options=options, interceptors=interceptors)
        return grpc.aio.secure_channel(self.address, self._credentials, options=options, interceptors=interceptors)


def _read(name: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    if b"-----BEGIN " not in content:
        raise ValueError(f"{name}: {path} is no PEM file")
    return content
