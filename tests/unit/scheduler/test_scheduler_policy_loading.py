"""From the setting to the policy, and what is said when it cannot be had."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from quartet.services.scheduler.policies.fair import FairPolicy
from quartet.services.scheduler.policies.load import POLICIES, load_policy
from quartet.shared.config import SettingsError


@pytest.mark.parametrize("name", POLICIES)
def test_a_built_in_one_is_had_by_its_name(name: str) -> None:
    assert type(load_policy(name)) is POLICIES[name]


def test_options_are_numbers_by_name() -> None:
    policy = load_policy("fair", ["output_cost=3", "weight.a=b=0.5"])
    assert isinstance(policy, FairPolicy)
    assert (policy._input_cost, policy._output_cost, policy._weights) == (1, 3, {"a=b": 0.5})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fifo", [], "policy: must be one of fcfs, priority, fair, srf or package.module:Class, got 'fifo'"),
        ("", [], "package.module:Class"),
        ("nowhere.to.be:Found", [], "cannot load nowhere.to.be:Found: ModuleNotFoundError: No module named 'nowhere'"),
        ("support.policies:Nobody", [], "has no attribute 'Nobody'"),
        ("pathlib:Path", [], "pathlib:Path is not a subclass of quartet.services.scheduler.policies.Policy"),
        ("pathlib:os.sep", [], "is not a subclass"),
        ("fcfs", ["x=1"], "fcfs takes no options"),
        ("srf", ["aging=1"], "srf takes the options ageing: 'float' = 100.0"),
        ("srf", ["ageing"], "policy_options: must be like name=number, got 'ageing'"),
        ("srf", ["ageing=fast"], "must be like name=number, got 'ageing=fast'"),
        ("srf", ["ageing=nan"], "must be like name=number"),
        ("srf", ["=1"], "must be like name=number"),
        ("srf", ["ageing=0"], "ageing must be above 0"),
        ("fair", ["wait.a=1"], "there is no option wait.a; options are input_cost, output_cost, weight.<tenant>"),
        ("fair", ["weight.a=0"], "weight.a must be above 0"),
        ("fair", ["output_cost=-1"], "output_cost above 0"),
    ],
)
def test_what_is_wrong_is_told(name: str, options: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_policy(name, options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def key(self, request): return request.group.deadline", "no attribute 'deadline'"),
        ("def key(self, request): return None if request.group.priority == 1 else 1", "not supported between"),
        ("def key(self, request): return float('nan')", "have no order"),
        ("def key(self): return 1", "takes 1 positional argument"),
        ("def rank(self, flow): return flow", "rank gave '', which is no number"),
        ("def served(self, requests): requests.append(1 / 0)", "ZeroDivisionError"),
        ("def __init__(self): raise OSError('no file')", "policy_options: no file"),
    ],
)
def test_one_that_does_not_fit_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str, request: Any
) -> None:
    module = f"own_{abs(hash(request.node.name))}"
    source = (
        f"from quartet.services.scheduler.policies import Policy\nclass Own(Policy):\n{textwrap.indent(body, '  ')}"
    )
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingsError) as caught:
        load_policy(f"{module}:Own")
    assert message in str(caught.value)


def test_the_process_says_so_in_one_line(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quartet.services.scheduler", "--run-dir", str(tmp_path), "--policy", "my:Own"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == ("quartet scheduler: policy: cannot load my:Own: ModuleNotFoundError: No module named 'my'\n")
