"""Vocabularies go through to executors that keep outputs to grammars; others are not asked to."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_executor import model_info

from quartet.services.scheduler.core import EXECUTOR, SchedulerCore
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.services.scheduler.vocabularies import Vocabularies
from quartet.shared.messages import (
    ChoicePast,
    ErrorCode,
    Failed,
    Granted,
    NewRequest,
    StepPlan,
    Takeover,
    Vocabulary,
)
from quartet.shared.sampling_params import SamplingParams, StructuredKind, StructuredOutput

STRUCTURED = SamplingParams(max_tokens=4, structured=StructuredOutput(StructuredKind.REGEX, "a+"))


def parts(fingerprint: str = "v") -> list[Vocabulary]:
    return [Vocabulary(fingerprint, 3, 0, [b"a", b"b"]), Vocabulary(fingerprint, 3, 2, [b"<e>"], [2])]


def request(request_id: int = 1) -> NewRequest:
    return NewRequest(request_id, 1, [5, 6], STRUCTURED, [2], [ChoicePast(0)], vocabulary="v")


def core(**model: Any) -> SchedulerCore:
    core = SchedulerCore(SchedulerSettings(), 1, lambda: 0.0)
    core.owner_up("t")
    core.executor_up(model_info(**model))
    return core


def to_executor(effects: list[Any]) -> list[Any]:
    return [message for destination, message in effects if destination is EXECUTOR]


def test_a_vocabulary_goes_to_the_executor_once_it_is_whole_and_again_to_the_next() -> None:
    c = core(structured_output=True)
    first, second = parts()
    assert c.vocabulary(first) == [] and c.vocabulary(second) == []
    assert to_executor(c.granted(Granted(1, b"", b""))) == parts()
    assert to_executor(c.vocabulary(first)) == [] and to_executor(c.vocabulary(second)) == parts()
    c.executor_down()
    assert to_executor(c.executor_up(model_info(structured_output=True))) == [Takeover(1)]
    c.new_request("t", request())
    assert to_executor(c.granted(Granted(2, b"", b""))) == parts()
    (plan,) = [m for m in to_executor(c.schedule()) if isinstance(m, StepPlan) and m.new_rows]
    assert plan.new_rows[0].vocabulary == "v" and plan.new_rows[0].sampling.structured == STRUCTURED.structured


def test_an_executor_that_cannot_is_sent_nothing_and_its_requests_end() -> None:
    c = core()
    for part in parts():
        assert c.vocabulary(part) == []
    assert c.granted(Granted(1, b"", b"")) == []
    ((_, failed),) = c.new_request("t", request())
    assert isinstance(failed, Failed) and failed.code is ErrorCode.UNIMPLEMENTED and failed.field == "structured"


def test_a_request_that_waited_for_an_executor_ends_when_one_comes_that_cannot() -> None:
    c = SchedulerCore(SchedulerSettings(), 1, lambda: 0.0)
    c.owner_up("t")
    assert c.new_request("t", request()) == []
    failed = [m for _, m in c.executor_up(model_info()) if isinstance(m, Failed)]
    assert [f.code for f in failed] == [ErrorCode.UNIMPLEMENTED]


@pytest.mark.parametrize("broken", [[1], [0, 0], [0, 2]])
def test_parts_that_do_not_follow_are_dropped(broken: list[int]) -> None:
    vocabularies = Vocabularies()
    for start in broken:
        assert vocabularies.add(Vocabulary("v", 3, start, [b"a"])) == []
    assert list(vocabularies.parts()) == []
    assert vocabularies.add(Vocabulary("v", 3, 0, [b"a"] * 4)) == []
    for part in parts():
        vocabularies.add(part)
    assert list(vocabularies.parts()) == parts()


def test_the_last_four_are_kept() -> None:
    vocabularies = Vocabularies()
    for i in range(6):
        for part in parts(f"v{i}"):
            vocabularies.add(part)
    vocabularies.add(parts("v2")[0])
    assert vocabularies.add(parts("v2")[1]) == parts("v2")
    assert [p.fingerprint for p in vocabularies.parts()][::2] == ["v3", "v4", "v5", "v2"]
