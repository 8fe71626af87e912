"""What the gateway knows clients by and shows them: API keys and the certificate, as their files are now."""

from __future__ import annotations

import os

import grpc

from quartet.services.gateway.settings import GatewaySettings
from quartet.services.gateway.tls import LatestContext
from quartet.shared.log import get_logger

_log = get_logger()


class Credentials:
    """`keys` are the same object throughout, and so is `ssl_context`, None without TLS. Connections and requests
    that are open when something is replaced go on under what they began with."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises ValueError, as the settings do."""
        self._settings = settings
        self._seen = self._signature()
        self.keys = settings.read_api_keys()
        self._tls = settings.read_tls()
        self.ssl_context = None if self._tls is None else LatestContext(self._tls.context)
        self._fetched = self._tls

    @property
    def files(self) -> list[str]:
        settings = self._settings
        paths = (settings.tls_cert, settings.tls_key, settings.tls_client_ca, settings.api_key_file)
        return [path for path in paths if path]

    def reload_if_changed(self) -> None:
        if self._signature() != self._seen:
            self.reload()

    def reload(self) -> None:
        """Reads the files again. What cannot be used is told in the log, and the former stays; so does a certificate
        whose key has not been written yet. Keys come and go whatever is the matter with the certificate."""
        self._seen = self._signature()
        try:
            entries = self._settings.read_key_entries()
        except (ValueError, OSError) as error:  # also one that is taken away while it is read
            _log.error("API keys not reloaded", error=str(error))
        else:
            self.keys.replace(entries)
            _log.info("API keys reloaded", api_keys=len(entries))
        try:
            tls = self._settings.read_tls()
        except (ValueError, OSError) as error:
            _log.error("certificate not reloaded", error=str(error))
            return
        if tls is not None and self.ssl_context is not None:
            self._tls, self.ssl_context.latest = tls, tls.context
            _log.info("certificate reloaded")

    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        """None without TLS."""
        if self._tls is None:
            return None
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._tls.key, self._tls.cert, self._tls.client_ca),
            self._fetch,
            require_client_authentication=bool(self._tls.client_ca),
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC's threads before each handshake; None: as before."""
        tls = self._tls
        if tls is None or tls is self._fetched:
            return None
        self._fetched = tls
        return _configuration(tls.key, tls.cert, tls.client_ca)

    def _signature(self) -> list[tuple[int, int, int] | None]:
        """Changes when a file is written or replaced, also through a link."""
        return [_stat(path) for path in self.files]


def _configuration(key: bytes, cert: bytes, client_ca: bytes) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca or None)


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
