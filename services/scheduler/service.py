"""The scheduler's process: two links around the core. Events drive it; idle, it only beats."""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from collections.abc import Hashable

from quartet.services.scheduler import metrics
from quartet.services.scheduler.core import EXECUTOR, Effect, SchedulerCore
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.shared.config import default_name, version
from quartet.shared.link import Link, Peer
from quartet.shared.liveness import StatusFile, status_path
from quartet.shared.log import get_logger
from quartet.shared.messages import (
    Abort,
    AnyMessage,
    Finish,
    GetLoads,
    Granted,
    Hello,
    ModelInfo,
    NewRequest,
    PlanRefused,
    Release,
    ResetPrefixCache,
    Role,
    StepFailed,
    StepResult,
    StepTimed,
    Vocabulary,
    Watch,
    WatchedService,
)
from quartet.shared.metrics import Collector, MetricsServer, service_source
from quartet.shared.signals import stop_on_signals
from quartet.shared.tracing import make_tracer
from quartet.shared.transport import AddressInUse, Binder, Identity, Status

# Outputs are made and dropped by the thousand and hold no cycles; the default wakes the collector for each few.
GC_THRESHOLD = 50_000
DRAIN_DECISION = 0.3
HAND_OVER_TIMEOUT = 1.0

_log = get_logger()


class SchedulerService:
    """Glue between the links and the core. `drained` is set when nothing is left to run."""

    def __init__(self, settings: SchedulerSettings) -> None:
        name = settings.name or default_name("scheduler")
        self.identity = Identity(Role.SCHEDULER, name, version=version())
        self.core = SchedulerCore(settings, self.identity.incarnation, time.monotonic, services=self._services)
        self.executor: Peer | None = None
        self.drained = asyncio.Event()
        self.leaving = False
        self.handing_over = False
        self._model: ModelInfo | None = None
        self._progress = 0
        self._was_ready = False
        self._scheduling = False
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_at: float | None = None
        self._status_file = StatusFile(status_path(settings.run_dir, "scheduler"))
        self._executors = _ExecutorSide(self)
        self.executor_link = Binder(
            settings.executor_address,
            self.identity,
            self._executors,
            self.status,
            accept=self._refuse_executor,
            curve_keys=settings.curve_keys,
        )
        self.tokenizer_link = Binder(
            settings.tokenizer_address,
            self.identity,
            _TokenizerSide(self),
            self.status,
            accept=self._refuse_tokenizer,
            status_file=self._status_file,
            curve_keys=settings.curve_keys,
        )

    async def start(self) -> None:
        """Waits while a scheduler that leaves still holds a socket; raises OSError when a port is taken."""
        self._loop = asyncio.get_running_loop()
        for link in (self.executor_link, self.tokenizer_link):
            try:
                link.start()
            except AddressInUse as error:
                if not link.address.startswith("ipc://"):
                    raise
                _log.warning("waiting for the other scheduler to leave", reason=str(error))
                await link.start_when_free()

    def close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.tokenizer_link.close()
        self.executor_link.close()
        self._status_file.remove()

    def status(self) -> Status:
        # With plans in flight it is the executor that owes progress.
        owes = self.ready and not self.core.num_in_flight
        return Status(self._progress, self.core.num_unfinished if owes else 0, self.ready, self.leaving)

    def _services(self) -> list[WatchedService]:
        identity, peer = self.identity, self.executor
        found = [
            WatchedService(
                identity.role, identity.name, identity.incarnation, identity.version, self.ready, self.leaving, False
            )
        ]
        if peer is not None:
            found.append(
                WatchedService(
                    peer.role, peer.name, peer.incarnation, peer.version, peer.ready, peer.draining, peer.stalled
                )
            )
        return found

    @property
    def ready(self) -> bool:
        executor = self.executor
        return self.core.granted_epoch is not None and executor is not None and not executor.stalled

    def drain(self) -> None:
        """Sets `drained` when this process may end. The tokenizers hold all that is held here, so it leaves
        as soon as the plans in flight have returned, and its successor goes on. Only where every tokenizer
        is draining too, the line is being stopped: then the running requests end first."""
        self.leaving = True
        self.tokenizer_link.announce()
        self.executor_link.announce()
        # Who was stopped together with this process has said so by then.
        self._loop.call_later(DRAIN_DECISION, self._decide_drain)

    def _decide_drain(self) -> None:
        tokenizers = [peer for peer in self.tokenizer_link.peers.values() if peer.alive]
        self.core.draining = bool(tokenizers) and all(peer.draining for peer in tokenizers)
        self.handing_over = not self.core.draining
        if self.handing_over:
            self._loop.call_later(HAND_OVER_TIMEOUT, self.drained.set)
        self.apply([])

    # --- events -----------------------------------------------------------------------------------

    def apply(self, effects: list[Effect]) -> None:
        """Sends what an event brought, and has plans made once all that has arrived is taken in."""
        self._progress += 1
        self._send(effects)
        if not self._scheduling:
            self._scheduling = True
            self._loop.call_soon(self._schedule)

    def _schedule(self) -> None:
        self._scheduling = False
        # An executor that leaves still answers what it has; with a line that is being stopped it stays.
        resting = self.handing_over or (self.executor is not None and self.executor.draining and not self.core.draining)
        if not resting:
            self._send(self.core.schedule())
        if self.ready != self._was_ready:
            self._was_ready = self.ready
            _log.info("ready" if self.ready else "not ready")
            self.tokenizer_link.announce()
        if self.handing_over and not self.core.num_in_flight:
            self.drained.set()
        if self.core.draining and not self.core.num_owed:
            self.drained.set()
        self._arm_deadline()

    def _send(self, effects: list[Effect]) -> None:
        for destination, message in effects:
            peer = self.executor if destination is EXECUTOR else destination
            # A send that fails is followed by on_down, and the other side adds again what it lacks.
            if isinstance(peer, Peer):
                peer.send(message)

    def owner_down(self, owner: Hashable) -> None:
        self.apply(self.core.owner_down(owner))

    def _arm_deadline(self) -> None:
        deadline = self.core.next_deadline()
        if deadline == self._deadline_at:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._deadline_at = deadline
        if deadline is not None:
            # A little late, so that the deadline has passed by the core's clock too.
            self._deadline = self._loop.call_later(max(0.0, deadline - time.monotonic()) + 0.01, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline = self._deadline_at = None
        self.apply(self.core.tick())

    def use_executor(self, peer: Peer | None) -> None:
        """Turns to another executor, or to none; None for the one in use means that it has changed."""
        if self.executor is not None:
            planned, self.executor = self.executor.draining, None
            self.apply(self.core.executor_down(planned=planned))
        if peer is not None and peer.model is not None:
            self.executor = peer
            model = peer.model
            _log.info("executor up", executor=peer.name, model=model.name, num_blocks=model.num_blocks)
            self.apply(self.core.executor_up(model, peer.incarnation))
            self._model = model
            if self.identity.model != model:
                self.identity.model = model
                self.tokenizer_link.announce_model()

    # --- who may come -----------------------------------------------------------------------------

    def _refuse_executor(self, hello: Hello) -> str | None:
        return None if hello.role is Role.EXECUTOR else f"this link is for executors, not for a {_role(hello)}"

    def _refuse_tokenizer(self, hello: Hello) -> str | None:
        if hello.role is not Role.TOKENIZER:
            return f"this link is for tokenizers, not for a {_role(hello)}"
        ours, theirs = self.identity.model, hello.model
        if ours is not None and theirs is not None and ours.model_fingerprint != theirs.model_fingerprint:
            return f"the tokenizer is for model {theirs.name}, the executor serves {ours.name} from other files"
        return None


class _TokenizerSide:
    """Each session of a tokenizer is an owner."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service

    def on_up(self, peer: Peer) -> None:
        self._service.apply(self._service.core.owner_up(peer))

    def on_down(self, peer: Peer, reason: str) -> None:
        self._service.owner_down(peer)

    def on_status(self, peer: Peer) -> None:
        pass

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        core = self._service.core
        match message:
            case NewRequest():
                effects = core.new_request(peer, message)
            case Finish():
                effects = core.finish(message)
            case Release():
                effects = core.release(message)
            case Abort():
                effects = core.abort(message)
            case GetLoads():
                effects = core.get_loads(peer, message)
            case ResetPrefixCache():
                effects = core.reset_prefix_cache(peer, message)
            case Vocabulary():
                effects = core.vocabulary(message)
            case Watch():
                effects = core.watch(peer, message)
            case _:
                _log.warning("unexpected message from a tokenizer", message=type(message).__name__)
                return
        self._service.apply(effects)


class _ExecutorSide:
    """One executor is used at a time; a second one waits until the first is gone or stands still."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service
        self._waiting: list[Peer] = []

    def on_up(self, peer: Peer) -> None:
        self._waiting.append(peer)
        self._choose()
        if peer is not self._service.executor and self._service.executor is not None:
            _log.warning("a second executor is ignored", executor=peer.name, used=self._service.executor.name)

    def on_down(self, peer: Peer, reason: str) -> None:
        if peer is self._service.executor:
            _log.warning("executor down", executor=peer.name, reason=reason)
            self._service.use_executor(None)
        else:
            self._waiting.remove(peer)
        self._choose()

    def on_status(self, peer: Peer) -> None:
        service = self._service
        if peer is service.executor:
            if peer.model is None:
                service.use_executor(None)
                self._waiting.append(peer)
            elif peer.model != service.identity.model:
                service.use_executor(peer)
            elif peer.stalled:
                _log.warning("executor stands still", executor=peer.name)
            if service.core.granted_epoch is not None:
                service.core.executor_stands_still(peer.stalled)
        self._choose()
        service.apply([])

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        service = self._service
        if peer is not service.executor:
            return
        match message:
            case StepResult():
                effects = service.core.step_result(message)
            case StepTimed():
                service.core.step_timed(message)
                return
            case Granted():
                effects = service.core.granted(message)
            case PlanRefused():
                effects = service.core.plan_refused(message)
            case StepFailed():
                effects = service.core.step_failed(message)
            case _:
                _log.warning("unexpected message from the executor", message=type(message).__name__)
                return
        service.apply(effects)

    def _choose(self) -> None:
        service = self._service
        current = service.executor
        if current is not None and not current.stalled and not current.draining:
            return
        for peer in self._waiting:
            if peer.alive and peer.model is not None and not peer.stalled and not peer.draining:
                self._waiting.remove(peer)
                if current is not None:
                    self._waiting.append(current)
                service.use_executor(peer)
                return


def _role(hello: Hello) -> str:
    return hello.role.name.lower()


def _metrics_server(settings: SchedulerSettings, service: SchedulerService) -> MetricsServer:
    core = service.core

    def links() -> list[tuple[str, Link]]:
        return [("tokenizer", service.tokenizer_link.link), ("executor", service.executor_link.link)]

    def num_retained() -> int:
        return max(0, sum(len(group.choices) for group in list(core.ledger.groups.values())) - core.num_unfinished)

    sources = (service_source(service.identity, links), functools.partial(metrics.tell, core.state, num_retained))
    collector = Collector(sources, lambda: core.state.model.name if core.state.model is not None else settings.model)
    return MetricsServer(settings.metrics_address, collector)


async def serve(settings: SchedulerSettings) -> int:
    """Runs until SIGTERM or SIGINT, then until the running requests have ended; returns the exit code.
    A second signal ends the process at once."""
    stop = stop_on_signals()
    service = SchedulerService(settings)
    tracer = service.core.state.tracer = make_tracer("scheduler", settings.name, settings.otlp_endpoint)
    metrics_server = _metrics_server(settings, service)
    stopping = asyncio.ensure_future(stop.wait())
    starting = asyncio.ensure_future(service.start())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return 0
        await starting
        # Not before: the port is the other scheduler's until it has left.
        metrics_server.start()
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        _log.info(
            "serving",
            policy=settings.policy,
            tokenizer_link=service.tokenizer_link.address,
            executor_link=service.executor_link.address,
        )
        await stopping
        _log.info("draining", num_unfinished=service.core.num_unfinished)
        service.drain()
        try:
            await asyncio.wait_for(service.drained.wait(), settings.drain_timeout)
        except TimeoutError:
            _log.warning(
                "drain timeout: streams are left to the next scheduler", num_unfinished=service.core.num_unfinished
            )
        return 0
    except OSError as error:
        _log.error("cannot start", reason=str(error))
        return 1
    finally:
        stopping.cancel()
        metrics_server.close()
        service.close()
        if tracer is not None:
            tracer.close()
