"""A running line over a folder's tiny model, with every door to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.client import Client
from support.doors import doors
from support.stack import Stack


@contextlib.contextmanager
def line_of(folder: Path, model: Path, **settings: Any) -> Iterator[Any]:
    """A Stack in fp32 with `client` and `doors`; all four have to exit with 0."""
    stack: Any = Stack(folder, model=model, executor_dtype="float32", **settings).start()
    stack.client = Client(stack.address)
    try:
        stack.client.wait_ready()
    except AssertionError as error:
        stack.stop()
        pytest.fail(f"{error}\n{stack.tail()}")
    stack.doors = doors(stack.client, stack.http_address)
    yield stack
    stack.client.close()
    codes = stack.stop()
    assert set(codes.values()) == {0}, f"{codes}\n{stack.tail()}"
