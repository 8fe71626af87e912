"""The importable client: what it gives, and how it goes on when the gateway goes."""

import asyncio
import subprocess
import sys

import grpc
import pytest
from support.gateway_fakes import gateway, in_loop, until

from quartet.services.gateway.stream_table import StreamTable, TableLimits
from quartet.shared import messages as m
from quartet.shared.client import AsyncClient, Client, InferenceError, Usage
from quartet.shared.client.request import build_request
from quartet.shared.client.state import State
from quartet.shared.pb import inference_pb2 as pb

WORDS = ["Hé", "llo", " ", "wor", "ld"]


def first_words(peer, count):
    """Has a silent tokenizer say the first words of the request that came last."""
    submit = peer.last(m.Submit)
    peer.speak(submit, upto=count)


@in_loop
async def test_chunks_and_usage():
    async with gateway(words=WORDS) as (address, _, peer), AsyncClient(address) as client:
        generation = client.generate(messages=[{"role": "user", "content": "hi"}], seed=3, stop="x", tenant="acme")
        chunks = [chunk async for chunk in generation]
        assert "".join(chunk.text for chunk in chunks) == "Héllo world"
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
        assert generation.usage == Usage(3, 5, 0) and generation.seed == 3
        assert generation.prompt_token_ids == [5, 6, 7] and len(generation.request_id) == 16
        submit = peer.last(m.Submit)
        assert submit.prompt == m.ChatPrompt([m.ChatMessage("user", "hi")]) and submit.text.stop == ["x"]
        assert submit.tenant == "acme"


@in_loop
async def test_the_client_for_threads():
    async with gateway(words=WORDS) as (address, _, _):

        def use():
            with Client(address) as client:
                client.wait_ready(5)
                assert client.generate("hi").text() == "Héllo world"
                assert client.generate(token_ids=[1, 2], n=2).text() == "Héllo world"
                assert client.model_info().name == "tiny"
                assert client.tokenize("x") == [1, 2] and client.detokenize([3]) == "3"
                assert client.loads().num_running == 1 and client.server_info().version == "1.2.3"

        await asyncio.to_thread(use)


@in_loop
async def test_refusals_are_plain():
    async with gateway() as (address, _, _), AsyncClient(address) as client:
        with pytest.raises(InferenceError, match=r"INVALID_ARGUMENT: temperature: must be in \[0, 100\]") as caught:
            await client.generate("x", temperature=-1).text()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and isinstance(caught.value, grpc.RpcError)


def test_requests_that_cannot_be_said():
    with pytest.raises(TypeError, match="temprature"):
        build_request("x", temprature=1)
    with pytest.raises(ValueError, match="exactly one"):
        build_request("x", token_ids=[1])
    with pytest.raises(ValueError, match="image_url"):
        build_request(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])


def test_no_server_is_told_at_once():
    with Client("127.0.0.1:1") as client:
        with pytest.raises(InferenceError) as caught:
            client.generate("x").text()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        with pytest.raises(TimeoutError, match="not ready"):
            client.wait_ready(0.1)


@in_loop
async def test_leaving_a_generation_ends_its_work():
    async with gateway() as (address, table, peer), AsyncClient(address) as client:
        peer.silent = True
        generation = client.generate("x")
        waiting = asyncio.ensure_future(anext(generation))
        await until(lambda: generation.request_id)
        first_words(peer, 1)
        await waiting
        await generation.aclose()
        await until(lambda: peer.all(m.Abort))
        assert table.num_open_streams == 0


async def interrupted(address, client, memory):
    """Runs a generation whose gateway dies after two words; `memory` of the tokenizer survives or not.
    Returns the generation, its text, and the tokenizer that came back."""
    text = ""
    generation = client.generate("x", n=1)

    async def read():
        nonlocal text
        async for chunk in generation:
            text += chunk.text

    async with gateway(address, words=WORDS) as (_, _, peer):
        peer.silent = True
        reading = asyncio.ensure_future(read())
        await until(lambda: peer.remembered)
        first_words(peer, 2)
        await until(lambda: text == "Héllo")
        remembered = dict(peer.remembered)
        peer.alive = False
    table = StreamTable(TableLimits(attach_timeout=0.1))
    async with gateway(address, words=WORDS, table=table) as (_, _, peer):
        if memory:
            peer.remembered = remembered
        ticking = asyncio.ensure_future(tick(table))
        await asyncio.wait_for(reading, 10)
        ticking.cancel()
        return generation, text, peer


async def tick(table):
    while True:
        table.tick()
        await asyncio.sleep(0.02)


async def free_address():
    async with gateway() as (address, _, _):
        return address


@in_loop
async def test_it_attaches_to_a_restarted_gateway():
    address = await free_address()
    async with AsyncClient(address) as client:
        generation, text, peer = await interrupted(address, client, memory=True)
    assert text == "Héllo world" and generation.usage == Usage(3, 5, 0)
    assert peer.last(m.Attach).next_index == {0: 2}
    assert not peer.all(m.Submit), "nothing was computed again"


@in_loop
async def test_it_submits_the_rest_when_nobody_remembers():
    address = await free_address()
    async with AsyncClient(address) as client:
        generation, text, peer = await interrupted(address, client, memory=False)
    assert text == "Héllo world" and generation.usage == Usage(3, 5, 0)
    submit = peer.last(m.Submit)
    assert submit.prompt == m.TokensPrompt([5, 6, 7]) and submit.sampling.seed == generation.seed
    assert submit.choices == [m.ChoicePast(0, [100, 101], len("Héllo".encode()), 0)]


@in_loop
async def test_a_gateway_that_stays_away_is_given_up():
    address = await free_address()
    async with AsyncClient(address, reconnect_timeout=0.2) as client:
        generation = client.generate("x")
        async with gateway(address) as (_, _, peer):
            peer.silent = True
            waiting = asyncio.ensure_future(anext(generation))
            await until(lambda: generation.request_id)
        with pytest.raises(InferenceError) as caught:
            await waiting
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def response(**event):
    return pb.GenerateResponse(**event)


def test_what_is_sent_again_when_nobody_remembers():
    state = State(build_request("x", n=3, prompt_logprobs=0, max_tokens=9), 60.0, None)
    state.receive(response(started=pb.Started(request_id="0" * 16, prompt_token_ids=[1, 2], seed=4)))
    state.receive(response(prompt_logprobs=pb.PromptLogprobs(start=0, entries=[pb.PromptLogprob()] * 2)))
    state.receive(response(chunk=pb.Chunk(index=0, token_ids=[7, 8], text="é", next_index=2)))
    state.receive(response(chunk=pb.Chunk(index=1, token_ids=[9], finished=pb.Finished(reason=1), next_index=1)))
    attach = state.attach_request()
    assert attach.request_id == "0" * 16 and attach.prompt_logprobs_start == 2
    assert [(p.index, p.next_index, p.finished) for p in attach.positions] == [(0, 2, False), (1, 1, True)]
    again = state.resume_request()
    assert list(again.token_ids.ids) == [1, 2] and again.sampling.seed == 4 and again.sampling.max_tokens == 9
    assert again.n == 3 and again.prompt_logprobs_start == 2
    assert [(p.index, list(p.past_token_ids), p.past_text_bytes, p.finished) for p in again.past] == [
        (0, [7, 8], 2, False),
        (1, [9], 0, True),
    ]
    # The resumed stream is interrupted too.
    later = State(again, 60.0, None)
    later.receive(response(started=pb.Started(request_id="1" * 16, prompt_token_ids=[1, 2], seed=4)))
    later.receive(response(chunk=pb.Chunk(index=0, start=2, token_ids=[3], text="f", next_index=3)))
    assert [(p.index, p.next_index, p.finished) for p in later.attach_request().positions] == [
        (0, 3, False),
        (1, 1, True),
    ]


def test_a_server_that_repeats_or_skips_is_found_out():
    state = State(build_request("x"), 60.0, None)
    with pytest.raises(InferenceError, match="went on at token 2 instead of 0"):
        state.receive(response(chunk=pb.Chunk(index=0, start=2, token_ids=[1])))


def test_it_needs_grpcio_and_protobuf_only():
    code = (
        "import sys, quartet.shared.client;"
        "print([name for name in ('msgspec', 'zmq', 'structlog', 'torch') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
