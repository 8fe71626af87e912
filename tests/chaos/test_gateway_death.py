"""The gateway dies: its clients attach and get the rest, or, with the tokenizer gone too, submit the rest again."""

from typing import Any

import pytest
from support.client import Client
from support.stack import eventually


@pytest.mark.slow
@pytest.mark.parametrize("victims", [("gateway",), ("gateway", "tokenizer")])
def test_the_shipped_client_goes_on(line: Any, streams: Any, victims: tuple[str, ...]) -> None:
    stack = line()
    running = streams(stack, 5, max_tokens=150).begun(10)
    for name in victims:
        stack.kill(name)
    stack.start(*victims)
    running.check()
    reconnects = [s.generation._state for s in running.all]
    assert all(state.num_attached for state in reconnects)
    assert all(bool(state.num_resumed) == ("tokenizer" in victims) for state in reconnects)


@pytest.mark.slow
def test_a_request_that_nobody_attaches_to_ends_and_its_blocks_are_freed(line: Any) -> None:
    stack = line(tokenizer_attach_grace=1.0, gateway_attach_grace=1.0)
    stream = stack.client.stream("Once upon a time", temperature=0.0, max_tokens=900, ignore_eos=True)
    for _ in range(5):
        next(stream)
    stack.restart("gateway")
    client = Client(stack.address)
    client.wait_ready()
    assert client.loads().num_running == 1, "it ended before the grace"
    eventually(client.at_rest, 15, "its blocks were not freed")
    client.close()
