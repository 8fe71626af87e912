"""Where there is no GPU: Triton's interpreter, as the tests have mended it."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path


def prepare() -> None:
    """In a process that is to run kernels; does nothing but under the interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.path.append(str(Path(__file__).parents[2] / "tests"))
        importlib.import_module("support.triton_interpreter")
