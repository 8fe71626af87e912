import json
import threading
from pathlib import Path
from typing import Any

import pytest

from bench.steps import StepReports, Totals

BEFORE = Totals(
    1, 10, 1, {"idle": 1.0, "host": 0.5, "forward": 2.0, "logits": 0.0, "sampling": 0.0}, {"attention": 0.5}
)
AFTER = Totals(
    5,
    50,
    5,
    {"idle": 1.5, "host": 1.0, "forward": 8.0, "logits": 1.0, "sampling": 0.5},
    {"attention": 2.5, "products": 3},
)


def line(totals: Totals, service: str = "executor", event: str = "steps") -> bytes:
    return json.dumps({"service": service, "event": event, **vars(totals)}).encode() + b"\n"


def test_the_mean_step_between_two_reports() -> None:
    done = AFTER - BEFORE
    assert done.wall == 8.5
    found = done.breakdown()
    assert found.pop("mean_ms") == pytest.approx(1e3 * 8.5 / 4)
    assert found.pop("mean_tokens") == 10
    expected = {
        "forward": 6.0,
        "products": 3.0,
        "attention": 2.0,
        "logits": 1.0,
        "idle": 0.5,
        "host": 0.5,
        "sampling": 0.5,
        "outside": 1.5,
    }
    assert found == {name: pytest.approx(seconds / 8.5, abs=1e-4) for name, seconds in expected.items()}
    assert Totals().breakdown() == {}


def test_sums_of_nothing_and_something() -> None:
    assert sum([BEFORE, AFTER - BEFORE], Totals()) == AFTER


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    pids: list[int] = []
    monkeypatch.setattr("bench.steps.os.kill", lambda pid, signum: pids.append(pid))
    return pids


def test_reports_are_found_among_other_lines_and_waited_for(tmp_path: Path, asked: list[int]) -> None:
    log = tmp_path / "log"
    log.write_bytes(line(BEFORE))  # before it was asked
    reports = StepReports(7, log)
    reports.ask()
    reports.ask()
    assert asked == [7, 7]

    def write(part: bytes) -> None:
        with log.open("ab") as file:
            file.write(part)

    write(
        b"no json\n" + line(AFTER, service="scheduler") + line(AFTER, event="stopped") + line(BEFORE) + line(AFTER)[:20]
    )
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(reports.read()))
    reader.start()
    write(line(AFTER)[20:])
    reader.join(20)
    assert found == [BEFORE, AFTER]


def test_an_executor_that_says_nothing_is_given_up(
    tmp_path: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.steps.TIMEOUT", 0.01)
    (tmp_path / "log").touch()
    with pytest.raises(TimeoutError, match="has not reported"):
        StepReports(7, tmp_path / "log").now()
