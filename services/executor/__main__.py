"""`python -m quartet.services.executor`: runs the executor."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from types import FrameType

from quartet.services.executor.native.library import detect_isa
from quartet.services.executor.settings import ExecutorSettings
from quartet.shared.config import EXIT_SETTINGS_ERROR, SettingsError, default_name, load_settings, version
from quartet.shared.log import configure_logging, get_logger


def main() -> None:
    settings = load_settings(
        ExecutorSettings,
        section="executor",
        argv=sys.argv[1:],
        description="Runs the model, a step for each plan of the scheduler.",
    )
    configure_logging("executor", settings.log_level, settings.log_format, settings.name)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _exit_at_once)
    # It asks for figures that there are none of yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    _calm_openmp()
    # torch takes seconds to import; help, settings errors and signals do not wait for it. Nothing of it is ever
    # garbage: to look for some takes a sixth of the import, and later 80 ms of a step now and then.
    gc.disable()
    from quartet.services.executor import metrics
    from quartet.services.executor.loop import ExecutorLoop
    from quartet.services.executor.models.config import ModelError as UnsupportedModel
    from quartet.services.executor.resources import NotEnoughMemory
    from quartet.services.executor.row_spans import RowSpans
    from quartet.services.executor.service import ExecutorService, first_epoch
    from quartet.services.executor.startup import load_runner
    from quartet.shared.link import Identity
    from quartet.shared.liveness import StatusFile, status_path
    from quartet.shared.messages import Role
    from quartet.shared.metrics import Collector, MetricsServer, service_source
    from quartet.shared.model_files import ModelError
    from quartet.shared.tracing import make_tracer

    gc.freeze()
    gc.enable()
    try:
        tracer = make_tracer("executor", settings.name, settings.otlp_endpoint)
    except SettingsError as error:
        get_logger().error("cannot start", reason=str(error))
        raise SystemExit(EXIT_SETTINGS_ERROR) from None
    try:
        runner, model = load_runner(settings)
    except (ModelError, UnsupportedModel, NotEnoughMemory) as error:
        get_logger().error("cannot start", reason=str(error))
        raise SystemExit(EXIT_SETTINGS_ERROR) from None
    name = settings.name or default_name("executor")
    identity = Identity(Role.EXECUTOR, name, model=model, version=version())
    status_file = StatusFile(status_path(settings.run_dir, "executor"))
    loop = ExecutorLoop(runner, first_epoch(), RowSpans(tracer) if tracer is not None else None)
    service = ExecutorService(
        loop,
        settings.scheduler_address,
        identity,
        status_file,
        settings.curve_keys,
        settings.drain_timeout,
        runner.times,
        runner.use_idle_time,
    )
    sources = (
        service_source(identity, lambda: [("scheduler", service.link)]),
        functools.partial(metrics.tell, loop, runner.times, model),
    )
    metrics_server = MetricsServer(settings.metrics_address, Collector(sources, lambda: model.name))
    metrics_server.start()
    service.run()
    metrics_server.close()
    if tracer is not None:
        tracer.close()


def _calm_openmp() -> None:
    """Must come before torch is imported. Beside the kernels torch has little to do, and its threads spinning
    for more of it, as they do by default, would only keep cores from the kernels and the other services."""
    if detect_isa():
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _exit_at_once(signum: int, frame: FrameType | None) -> None:
    """While loading: as an exception, so that a download under way cleans up after itself."""
    signal.signal(signum, signal.SIG_DFL)
    raise SystemExit(0)


if __name__ == "__main__":
    main()
