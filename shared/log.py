"""Structured logs: every line has a timestamp, a level and the service, and request_id where there is one."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logging(
    service: str,
    level: str = "info",
    log_format: str = "auto",
    name: str = "",
    stream: TextIO | None = None,
) -> None:
    """Sends structlog's and the standard library's lines to `stream` (stderr) in one format.

    `log_format` auto is console on a terminal and json elsewhere. `name` tells replicas of one
    service apart. May be called again; the last call wins.
    """
    stream = sys.stderr if stream is None else stream
    tty = stream.isatty()
    as_json = log_format == "json" or (log_format == "auto" and not tty)

    def add_service(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        if name:
            event.setdefault("name", name)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        add_service,
        _hex_request_id,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    finish: list[Processor]
    if as_json:
        finish = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    else:
        plain = structlog.dev.plain_traceback
        finish = [structlog.dev.ConsoleRenderer(colors=tty, exception_formatter=plain, pad_event_to=0)]

    structlog.configure(
        processors=[*shared, *finish],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(), _add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *finish],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries' chatter below warnings is only of use to someone who asks for everything.
    root.setLevel(LEVELS[level] if level == "debug" else max(LEVELS[level], logging.WARNING))
    logging.captureWarnings(True)


def get_logger(**bound: Any) -> Any:
    """A logger with `bound` on each line. May be called at import, before configure_logging.

    A `request_id` given as an int is written as 16 hex digits.
    """
    return structlog.get_logger(**bound)


def _hex_request_id(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    request_id = event.get("request_id")
    if isinstance(request_id, int):
        event["request_id"] = f"{request_id:016x}"
    return event


def _add_logger_name(logger: logging.Logger | None, _: str, event: EventDict) -> EventDict:
    record = event.get("_record")
    if record is not None:
        event.setdefault("logger", record.name)
    return event
