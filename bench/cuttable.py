"""A TCP connection between two services that can be cut and healed, as a network is."""

from __future__ import annotations

import asyncio
import contextlib
import socket

CHUNK = 1 << 16


class CuttableLink:
    """Forwards connections from a port of its own to `target` (host, port). While cut it moves nothing and
    closes nothing: what was on its way waits, and both ends see silence."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.port = 0
        self._target = target
        self._whole = asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    def reset(self) -> None:
        """Breaks every connection; new ones may come."""
        for task in self._connections:
            task.cancel()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        connections = list(self._connections)
        self.reset()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writers = [writer]
        try:
            await self._whole.wait()
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            writers.append(far_writer)
            for each in writers:
                each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pumps = [
                asyncio.ensure_future(self._pump(reader, far_writer)),
                asyncio.ensure_future(self._pump(far_reader, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            for each in writers:
                with contextlib.suppress(OSError, RuntimeError):
                    each.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            await self._whole.wait()
            writer.write(data)
            await writer.drain()
        await self._whole.wait()
