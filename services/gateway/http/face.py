"""The HTTP server in the gateway's loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from quartet.services.gateway.bind import tcp_sockets
from quartet.services.gateway.credentials import Credentials
from quartet.services.gateway.http.api import Api
from quartet.services.gateway.http.app import make_app
from quartet.services.gateway.http.connections import Connections
from quartet.services.gateway.http.protocol import connection_type
from quartet.services.gateway.settings import GatewaySettings
from quartet.services.gateway.stream_table import StreamTable
from quartet.shared.transport import until_beat


class _Server(uvicorn.Server):
    """Leaves signals to the gateway, and does not poll for its end."""

    def __init__(self, config: uvicorn.Config, tls_handshake_timeout: float) -> None:
        super().__init__(config)
        self._tls_handshake_timeout = tls_handshake_timeout
        self._ending = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ending.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def connection() -> asyncio.Protocol:
            kind: Any = self.config.http_protocol_class
            made: asyncio.Protocol = kind(config=self.config, server_state=self.server_state, app_state={})
            return made

        context = self.config.ssl
        self.servers = [
            await asyncio.get_running_loop().create_server(
                connection,
                sock=listener,
                ssl=context,
                ssl_handshake_timeout=None if context is None else self._tls_handshake_timeout,
                backlog=self.config.backlog,
            )
            for listener in sockets or ()
        ]
        self.started = True

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # sets the date that responses carry
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_beat(time.monotonic())):
                    await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns when all responses have ended."""
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.005)


class HttpFace:
    """`bind` takes the address before anything else is done."""

    def __init__(self, table: StreamTable, settings: GatewaySettings, credentials: Credentials) -> None:
        self._settings = settings
        self._credentials = credentials
        self.api = Api(table, settings, credentials.keys)
        self._app = make_app(self.api)
        self.connections = Connections(settings.max_connections)
        self._sockets: list[socket.socket] = []
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    def bind(self) -> None:
        """Raises BindError when another server has the address, or it is none."""
        if self._settings.http_address:
            self._sockets = tcp_sockets("http_address", self._settings.http_address, self._settings.send_timeout)
            self.port = int(self._sockets[0].getsockname()[1])

    async def start(self) -> None:
        if not self._sockets:
            return
        # What clients do wrong is told to them, not to the operator.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        context = self._credentials.ssl_context
        config = uvicorn.Config(
            self._app,
            ssl_context_factory=None if context is None else lambda _config, _default: context,
            http=connection_type(self._settings.header_timeout, self.connections),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(self._settings.keep_alive_timeout),
        )
        self._server = _Server(config, self._settings.tls_handshake_timeout)
        self._serving = asyncio.create_task(self._server.serve(self._sockets))

    async def stop(self, grace: float) -> None:
        """Lets responses end for `grace` seconds."""
        if self._server is None or self._serving is None:
            for listener in self._sockets:
                listener.close()
            return
        self._server.end()
        _, late = await asyncio.wait([self._serving], timeout=grace)
        if late:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.wait([self._serving], timeout=1.0)
