"""What a line of log carries, and that libraries' lines look the same."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from quartet.shared.log import configure_logging, get_logger

log = get_logger(component="made at import")


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_line_says_who_when_and_which_request() -> None:
    stream = io.StringIO()
    configure_logging("scheduler", log_format="json", name="s1", stream=stream)
    log.bind(request_id=255).warning("slow", seconds=1.5)
    (line,) = lines(stream)
    timestamp = line.pop("timestamp")
    assert isinstance(timestamp, str) and timestamp.endswith("Z")
    assert line == {
        "service": "scheduler",
        "name": "s1",
        "level": "warning",
        "event": "slow",
        "request_id": "00000000000000ff",
        "seconds": 1.5,
        "component": "made at import",
    }


def test_the_standard_library_is_routed_through_it() -> None:
    stream = io.StringIO()
    configure_logging("gateway", log_format="json", stream=stream)
    logging.getLogger("grpc").warning("lost %s", "it")
    logging.getLogger("grpc").info("chatter")
    (line,) = lines(stream)
    assert (line["event"], line["logger"], line["service"]) == ("lost it", "grpc", "gateway")


def test_levels_hold_and_tracebacks_stay_on_their_line() -> None:
    stream = io.StringIO()
    configure_logging("executor", level="warning", log_format="json", stream=stream)
    log.info("not shown")
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        log.exception("failed")
    (line,) = lines(stream)
    assert "RuntimeError: broken" in str(line["exception"])


def test_console_lines_off_a_terminal_have_no_colour() -> None:
    stream = io.StringIO()
    configure_logging("executor", log_format="console", stream=stream)
    log.info("hello", answer=42)
    assert "\x1b" not in stream.getvalue()
    assert "hello" in stream.getvalue() and "service=executor" in stream.getvalue()


def test_auto_is_json_off_a_terminal() -> None:
    stream = io.StringIO()
    configure_logging("executor", stream=stream)
    log.info("hello", odd={1, 2}.__class__)
    assert lines(stream)[0]["event"] == "hello"
