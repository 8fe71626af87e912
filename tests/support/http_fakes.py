"""An HTTP face in the test's loop over a fake tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from support.gateway_fakes import AnsweringPeer
from support.http import Reply, parse_reply, request_bytes

from quartet.services.gateway.credentials import Credentials
from quartet.services.gateway.http.face import HttpFace
from quartet.services.gateway.settings import GatewaySettings
from quartet.services.gateway.stream_table import StreamTable, TableLimits


class Served(NamedTuple):
    address: str
    table: StreamTable
    peer: Any
    face: HttpFace

    async def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        return await self.raw(request_bytes(method, path, body, headers))

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        return await self.call("POST", path, body, headers)

    async def raw(self, data: bytes) -> Reply:
        """What comes back until the connection ends."""
        async with self.connect() as (reader, writer):
            writer.write(data)
            return parse_reply(await reader.read(), data.startswith(b"HEAD "))

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def http_gateway(
    words: tuple[str, ...] = ("a", "b", "c"), peer_type: type = AnsweringPeer, **settings: Any
) -> AsyncIterator[Served]:
    limits = {name: settings[name] for name in TableLimits._fields if name in settings}
    table = StreamTable(TableLimits(**limits))
    options = GatewaySettings(http_address="127.0.0.1:0", **settings)
    face = HttpFace(table, options, Credentials(options))
    face.bind()
    await face.start()
    peer = peer_type(table, words)
    table.on_up(peer)
    try:
        yield Served(f"127.0.0.1:{face.port}", table, peer, face)
    finally:
        await face.stop(1.0)
