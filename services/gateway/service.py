"""The gateway's process: the stream table between the tokenizers' link and the clients' server."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import resource
import signal
import time

from quartet.services.gateway import metrics
from quartet.services.gateway.bind import BindError, is_reached_from_elsewhere
from quartet.services.gateway.credentials import Credentials
from quartet.services.gateway.grpc_face import GrpcFace
from quartet.services.gateway.http.face import HttpFace
from quartet.services.gateway.settings import GatewaySettings
from quartet.services.gateway.stream_table import StreamTable, TableLimits
from quartet.shared.config import default_name, version
from quartet.shared.link import Peer
from quartet.shared.liveness import StatusFile, status_path
from quartet.shared.log import get_logger
from quartet.shared.messages import AnyMessage, Role, WatchedService
from quartet.shared.metrics import Collector, MetricsServer, service_source
from quartet.shared.signals import stop_on_signals
from quartet.shared.tracing import make_tracer
from quartet.shared.transport import Binder, Identity, Status, ipc_address, until_beat

TICK = 0.2
FILES_TICK = 2.0
STOP_GRACE = 1.0

_log = get_logger()


class Gateway:
    """Glue: link events go to the table, and health follows it."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self.table = StreamTable(
            TableLimits(
                max_concurrent_requests=settings.max_concurrent_requests,
                max_unread_bytes=settings.max_unread_bytes,
                attach_grace=settings.attach_grace,
                max_retained_bytes=settings.max_retained_bytes,
                attach_timeout=settings.attach_timeout,
                recovery_deadline=settings.recovery_deadline,
            )
        )
        self.credentials = Credentials(settings)
        self.face = GrpcFace(self.table, settings, version(), self.credentials)
        self.http = HttpFace(self.table, settings, self.credentials)
        identity = Identity(Role.GATEWAY, settings.name or default_name("gateway"), version=version())
        address = settings.tokenizer_link or ipc_address(settings.run_dir, "gateway")
        self._status_file = StatusFile(status_path(settings.run_dir, "gateway"))
        self.link = Binder(
            address,
            identity,
            self,
            self._status,
            accept=self.table.refuse,
            status_file=self._status_file,
            curve_keys=settings.curve_keys,
        )
        self._health_changed = asyncio.Event()
        sources = (
            service_source(identity, lambda: [("tokenizer", self.link.link)]),
            functools.partial(metrics.tell, self.table),
        )
        collector = Collector(sources, self._model_name)
        self.table.metrics.model_name = self._model_name
        self.http.api.collector = collector if importlib.util.find_spec("prometheus_client") else None
        self._metrics_server = MetricsServer(settings.metrics_address, collector)
        self.table.live.gateway = lambda: WatchedService(
            identity.role,
            identity.name,
            identity.incarnation,
            identity.version,
            self.table.ready,
            self.table.draining,
            False,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then lets running streams end. Raises OSError when an address
        is taken."""
        try:
            self.http.bind()
            await self.face.bind()
            self.link.start()
            await self.face.start()
            await self.http.start()
            self._metrics_server.start()
            _log.info(
                "serving",
                grpc_address=self._settings.grpc_address,
                http_address=self._settings.http_address,
                tokenizer_link=self.link.address,
            )
            self._warn_of_strangers()
            async with asyncio.TaskGroup() as tasks:
                loops = [tasks.create_task(run()) for run in (self._tick, self._follow_health, self._follow_files)]
                await stop.wait()
                await self._drain()
                for loop in loops:
                    loop.cancel()
        finally:
            await asyncio.gather(self.face.stop(STOP_GRACE), self.http.stop(STOP_GRACE))
            self._metrics_server.close()
            self.link.close()
            self._status_file.remove()
            if self.table.metrics.tracer is not None:
                self.table.metrics.tracer.close()

    # --- the link's handler ---

    def on_up(self, peer: Peer) -> None:
        self.table.on_up(peer)
        self._health_changed.set()

    def on_down(self, peer: Peer, reason: str) -> None:
        self.table.on_down(peer, reason)
        self._health_changed.set()

    def on_status(self, peer: Peer) -> None:
        self.table.on_status(peer)
        self._health_changed.set()

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        self.table.on_message(peer, message)

    # --- inside ---

    def _warn_of_strangers(self) -> None:
        settings = self._settings
        if self.credentials.keys.required or settings.tls_client_ca:
            return
        given = [address for address in (settings.grpc_address, settings.http_address) if address]
        reached = [address for address in given if is_reached_from_elsewhere(address)]
        if reached:
            _log.warning(
                "everybody who can reach these addresses may use this server: "
                "give it API keys (--api-key-file; quartet keys api makes them) or --tls-client-ca",
                addresses=reached,
            )

    def _model_name(self) -> str:
        """As HTTP clients call it."""
        if self._settings.served_model_names:
            return self._settings.served_model_names[0]
        models = (tokenizer.peer.model for tokenizer in list(self.table.tokenizers.values()))
        return next((model.name for model in models if model is not None), self._settings.model)

    def _status(self) -> Status:
        # A gateway asks and owes its tokenizers nothing, so nothing is outstanding.
        return Status(self.table.progress, 0, self.table.ready, self.table.draining)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK if self.table.is_waiting else until_beat(time.monotonic()))
            self.table.tick()

    async def _follow_health(self) -> None:
        while True:
            await self._health_changed.wait()
            self._health_changed.clear()
            await self.face.update_health()

    async def _follow_files(self) -> None:
        while self.credentials.files:
            await asyncio.sleep(FILES_TICK)
            self.credentials.reload_if_changed()

    async def _drain(self) -> None:
        self.table.draining = True
        self.table.live.end_all()
        self._health_changed.set()
        self.link.announce()
        deadline = asyncio.get_running_loop().time() + self._settings.drain_timeout
        _log.info("draining", streams=self.table.num_attached_streams)
        while self.table.num_attached_streams and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self.table.end_all("the gateway has been stopped; attach again to go on")


async def serve(settings: GatewaySettings) -> int:
    """Runs the gateway until SIGTERM or SIGINT; returns the exit code. A second signal ends it at once."""
    stop = stop_on_signals()
    _allow_files(2 * settings.max_connections + 1024)
    tracer = make_tracer("gateway", settings.name, settings.otlp_endpoint)
    gateway = Gateway(settings)
    gateway.table.metrics.tracer = tracer
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateway.credentials.reload)
    try:
        await gateway.run(stop)
    except BindError as error:
        _log.error(str(error))
        return 1
    except OSError as error:
        _log.error(f"tokenizer_link: {error}")
        return 1
    return 0


def _allow_files(wanted: int) -> None:
    """Each connection is an open file, of which a process may have 1,024 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
