"""The four services on a tiny model, for tests of what comes in by the two doors: HTTP and gRPC."""

from typing import Any, NamedTuple

import pytest
from support.client import Client
from support.stack import Stack
from support.tiny_model import make_tiny_llama

MAX_MODEL_LEN = 512


class Line(NamedTuple):
    stack: Stack
    client: Client
    model: Any  # transformers', in fp32
    name: str

    @property
    def http(self) -> str:
        return self.stack.http_address


@pytest.fixture(scope="session")
def line(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = make_tiny_llama(folder, MAX_MODEL_LEN)
    stack = Stack(
        tmp_path_factory.mktemp("line"),
        model=folder,
        tokenizer_tokenizer="byte",
        executor_dtype="float32",
        executor_num_blocks=512,
        gateway_attach_grace=1,
    ).start()
    client = Client(stack.address)
    try:
        client.wait_ready(120)
        yield Line(stack, client, model, folder.name)
    except AssertionError as error:
        pytest.fail(f"{error}\n{stack.tail()}")
    finally:
        client.close()
        codes = stack.stop()
    assert set(codes.values()) == {0}, f"{codes}\n{stack.tail()}"
