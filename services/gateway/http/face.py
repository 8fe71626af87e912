"""The HTTP server in the gateway's loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from quartet.services.gateway.api_keys import ApiKeys
from quartet.services.gateway.bind import tcp_sockets
from quartet.services.gateway.http.api import Api
from quartet.services.gateway.http.app import make_app
from quartet.services.gateway.http.protocol import connection_type
from quartet.services.gateway.settings import GatewaySettings
from quartet.services.gateway.stream_table import StreamTable


class _Server(uvicorn.Server):
    """Leaves signals to the gateway, and does not poll for its end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ending.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # sets the date that responses carry
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
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

    def __init__(self, table: StreamTable, settings: GatewaySettings, keys: ApiKeys) -> None:
        self._settings = settings
        self._app = make_app(Api(table, settings, keys))
        self._sockets: list[socket.socket] = []
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    def bind(self) -> None:
        """Raises BindError when another server has the address, or it is none."""
        if self._settings.http_address:
            self._sockets = tcp_sockets("http_address", self._settings.http_address)
            self.port = int(self._sockets[0].getsockname()[1])

    async def start(self) -> None:
        if not self._sockets:
            return
        # What clients do wrong is told to them, not to the operator.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        tls = self._settings.read_tls()
        config = uvicorn.Config(
            self._app,
            ssl_context_factory=None if tls is None else lambda _config, _default: tls.context,
            http=connection_type(self._settings.header_timeout),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(self._settings.keep_alive_timeout),
        )
        self._server = _Server(config)
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
