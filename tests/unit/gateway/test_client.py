"""The importable client: what it gives, and how it goes on when the gateway goes."""

import asyncio

import grpc
import pytest
from support.gateway_fakes import gateway, in_loop, until

from quartet.services.gateway.stream_table import StreamTable, TableLimits
from quartet.shared import messages as m
from quartet.shared.client import AsyncClient, Client, InferenceError, Usage
from quartet.shared.client.request import build_request

WORDS = ["Hé", "llo", " ", "wor", "ld"]


def first_words(peer, count):
    """Has a silent tokenizer say the first words of the request that came last."""
    submit = peer.last(m.Submit)
    peer.speak(submit, upto=count)


@in_loop
async def test_chunks_and_usage():
    async with gateway(words=WORDS) as (address, _, peer), AsyncClient(address) as client:
        generation = client.generate(messages=[{"role": "user", "content": "hi"}], seed=3, stop="x")
        chunks = [chunk async for chunk in generation]
        assert "".join(chunk.text for chunk in chunks) == "Héllo world"
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
        assert generation.usage == Usage(3, 5, 0) and generation.seed == 3
        assert generation.prompt_token_ids == [5, 6, 7] and len(generation.request_id) == 16
        submit = peer.last(m.Submit)
        assert submit.prompt == m.ChatPrompt([m.ChatMessage("user", "hi")]) and submit.text.stop == ["x"]


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
    assert submit.choices == [m.ChoicePast(0, [100, 101], len("Héllo".encode()))]


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
