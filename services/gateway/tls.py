"""One certificate for both protocols, and whose certificates clients must show."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, NamedTuple


class Tls(NamedTuple):
    """PEM texts; an empty `client_ca` asks clients for no certificate."""

    cert: bytes
    key: bytes
    client_ca: bytes
    context: ssl.SSLContext


class LatestContext(ssl.SSLContext):
    """Stands for `latest` in a server, whose context cannot be replaced: each handshake is under the one that is there
    when it begins."""

    latest: ssl.SSLContext

    def __new__(cls, latest: ssl.SSLContext) -> LatestContext:
        context = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        context.latest = latest
        return context

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self.latest.wrap_bio(*args, **options)


def read_tls(cert_path: str, key_path: str, client_ca_path: str) -> Tls | None:
    """None without a certificate. Raises ValueError that names the setting."""
    if not cert_path:
        for flag, path in (("--tls-key", key_path), ("--tls-client-ca", client_ca_path)):
            if path:
                raise ValueError(f"{flag} needs --tls-cert")
        return None
    if not key_path:
        raise ValueError("--tls-cert needs --tls-key")
    cert, key = _read("--tls-cert", cert_path), _read("--tls-key", key_path)
    client_ca = _read("--tls-client-ca", client_ca_path) if client_ca_path else b""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_pair(context, cert_path, key_path, key)
    if client_ca:
        _load_client_ca(context, client_ca_path)
    return Tls(cert, key, client_ca, context)


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{flag}: cannot read {path}: {(error.strerror or str(error)).lower()}") from None


def _load_pair(context: ssl.SSLContext, cert_path: str, key_path: str, key: bytes) -> None:
    if b"ENCRYPTED" in key:  # OpenSSL would ask the terminal
        raise ValueError(f"--tls-key: {key_path} is encrypted; the gateway reads keys without a password only")
    if b"PRIVATE KEY-----" not in key:
        raise ValueError(f"--tls-key: there is no PEM private key in {key_path}")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert_path)
    except ssl.SSLError as error:
        raise ValueError(f"--tls-cert: there is no PEM certificate in {cert_path} ({error.reason})") from None
    try:
        context.load_cert_chain(cert_path, key_path)
    except ssl.SSLError as error:
        mismatch = f"it is not the key of the certificate in {cert_path}"
        reason = mismatch if error.reason == "KEY_VALUES_MISMATCH" else error.reason or str(error)
        raise ValueError(f"--tls-key: {key_path} cannot be used: {reason}") from None


def _load_client_ca(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError(f"--tls-client-ca: there is no PEM certificate in {path} ({error.reason})") from None
    context.verify_mode = ssl.CERT_REQUIRED
