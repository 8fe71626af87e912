"""The import law finds what breaks it, in each disguise."""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def lint() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("lint_imports", ROOT / "tools" / "lint_imports.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("owner", "source", "problem"),
    [
        ("gateway", "from quartet.services.tokenizer import loaders", "quartet.services.tokenizer"),
        ("gateway", "from quartet.services import tokenizer", "quartet.services.tokenizer"),
        ("gateway", "import quartet.services.scheduler.core", "quartet.services.scheduler"),
        ("gateway", "from ..scheduler import core", "quartet.services.scheduler"),
        ("gateway", "from .. import executor", "quartet.services.executor"),
        ("gateway", "def f():\n    import torch", "torch"),
        ("gateway", "import torch.nn.functional as F", "torch"),
        ("gateway", "import numpy as np", "numpy"),
        ("scheduler", "from numpy.typing import NDArray", "numpy"),
        ("scheduler", "import importlib\nimportlib.import_module('torch')", "torch"),
        ("scheduler", "__import__('numpy')", "numpy"),
        ("scheduler", "from importlib import import_module\nimport_module(name)", "computed"),
        ("tokenizer", "if True:\n    import torch", "torch"),
        ("tokenizer", "import triton", "triton"),
        ("cli", "from quartet.services.gateway.settings import GatewaySettings", "quartet.services.gateway"),
        ("shared", "from quartet.services.cli import main", "quartet.services.cli"),
        ("shared", "import quartet.services", "quartet.services"),
        ("shared", "import torch", "torch"),
        ("executor", "from services.executor import loop", "quartet.services"),
    ],
)
def test_breaches_are_found(lint: types.ModuleType, owner: str, source: str, problem: str) -> None:
    package = "quartet.shared" if owner == "shared" else f"quartet.services.{owner}"
    found = lint.problems(source, owner, package)
    assert found and problem in found[0][1]


@pytest.mark.parametrize(
    ("owner", "source"),
    [
        ("executor", "import torch\nimport triton\nimport numpy"),
        ("executor", "from quartet.services.executor.models import decoder\nfrom quartet.shared import messages"),
        ("executor", "from .models import decoder\nfrom . import loop"),
        ("scheduler", "import zmq, msgspec\nfrom quartet.shared.messages import StepPlan"),
        ("gateway", "import grpc\nimport torchless"),
        ("shared", "from quartet.shared import codec"),
    ],
)
def test_the_lawful_passes(lint: types.ModuleType, owner: str, source: str) -> None:
    package = "quartet.shared" if owner == "shared" else f"quartet.services.{owner}"
    assert lint.problems(source, owner, package) == []


def test_files_are_found_with_their_package(lint: types.ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "services" / "executor" / "models"
    folder.mkdir(parents=True)
    (folder / "bad.py").write_text("from ...gateway import stream\n")
    (folder / "good.py").write_text("from ..attention import interface\n")
    assert lint.check(tmp_path) == [
        "services/executor/models/bad.py:1: executor must not import quartet.services.gateway"
    ]
