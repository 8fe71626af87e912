"""Real processes on the real model."""

import pytest
from support import oracle
from support.client import Client
from support.stack import Stack
from support.tiny_model import make_tiny_llama

from quartet.shared.model_files import resolve_model

MAX_MODEL_LEN = 2048


@pytest.fixture(scope="session")
def model_path():
    return resolve_model("smollm2-135m-instruct").path


@pytest.fixture(scope="session")
def reference(model_path):
    return oracle.smollm2(model_path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """(folder, transformers' model in fp32): for what does not need the real one, many times as fast."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, make_tiny_llama(folder)


def run_stack(tmp_path_factory, **settings):
    stack = Stack(tmp_path_factory.mktemp("stack"), **settings).start()
    client = Client(stack.address)
    try:
        client.wait_ready()
    except AssertionError as error:
        stack.stop()
        pytest.fail(f"{error}\n{stack.tail()}")
    return stack, client


@pytest.fixture(scope="session")
def stack(tmp_path_factory):
    """The four services, in fp32 so that greedy output has an oracle. Tests leave it at rest and running."""
    running, client = run_stack(
        tmp_path_factory, executor_dtype="float32", executor_max_model_len=MAX_MODEL_LEN, executor_num_blocks=1024
    )
    running.client = client
    yield running
    client.close()
    codes = running.stop()
    assert set(codes.values()) == {0}, f"{codes}\n{running.tail()}"


@pytest.fixture
def client(stack):
    return stack.client


@pytest.fixture
def small(tmp_path, tmp_path_factory):
    """A stack of one test's own, which it may break: `small(setting=...)`."""
    stacks = []

    def start(**settings):
        settings = {"executor_dtype": "float32", "executor_max_model_len": 512, "executor_num_blocks": 256} | settings
        running, client = run_stack(tmp_path_factory, **settings)
        running.client = client
        stacks.append(running)
        return running

    yield start
    for running in stacks:
        running.client.close()
        running.stop()
