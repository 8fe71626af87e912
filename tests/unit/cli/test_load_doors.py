"""What is counted of an answer, through both doors."""

import asyncio

import pytest
from aiohttp import web
from support import openai_scripted as scripted
from support.gateway_fakes import gateway, in_loop
from support.http_fakes import http_gateway

from quartet.services.cli.bench.grpc_door import GrpcDoor
from quartet.services.cli.bench.http_door import Events, HttpDoor, openai_body, refusal_text, session
from quartet.shared.client import AsyncClient


def ask(answer, endpoint="completions", timeout=30.0, keep=True):
    """The record of one request to a scripted server, and what was posted."""

    async def run(url):
        async with session("k", timeout) as connections:
            path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
            body = openai_body(endpoint, "m", {"temperature": 0.0})
            return await HttpDoor(connections, url + path, body).send("Hi", 9, keep)

    with scripted.scripted_server(answer, "k") as server:
        return asyncio.run(run(server.url)), server


def test_a_completion():
    pieces = [scripted.piece(" a"), scripted.piece(" b") + scripted.piece(" c"), scripted.usage(7, 5, 4)]
    record, server = ask(scripted.says(*pieces, scripted.DONE))
    assert not record.error and record.answer_text == " a b c"
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 5, 4)
    assert len(record.times) == 3 and record.started < record.times[0] <= record.times[-1] <= record.ended
    assert server.bodies == [
        {
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "prompt": "Hi",
            "max_tokens": 9,
        }
    ]


def test_a_chats_first_chunk_with_a_role_is_no_token():
    parts = [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    record, server = ask(scripted.says(*(scripted.chat_piece(**part) for part in parts), scripted.DONE), "chat")
    assert len(record.times) == record.output_tokens == 2 and record.answer_text == "Hello"
    assert server.bodies[0]["messages"] == "Hi" and "prompt" not in server.bodies[0]


@pytest.mark.parametrize("delta", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}])
def test_thoughts_and_calls_are_output(delta):
    pieces = [scripted.chat_piece(role="assistant"), scripted.chat_piece(**delta)]
    record, _ = ask(scripted.says(*pieces, scripted.DONE), "chat")
    assert len(record.times) == 1 and not record.error


def test_token_ids_are_counted_where_there_is_no_usage():
    pieces = [scripted.piece("", token_ids=[1, 2]), scripted.piece("x", token_ids=[3])]
    record, _ = ask(scripted.says(*pieces, scripted.DONE))
    assert record.output_tokens == 3 and len(record.times) == 2


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (scripted.refuses(429, '{"error": {"message": "slow down", "type": "x"}}'), "HTTP 429", "slow down"),
        (scripted.refuses(500, "<h1>oops</h1>"), "HTTP 500", "<h1>oops</h1>"),
        (scripted.says(scripted.piece("a"), scripted.event(error={"message": "it broke"})), "stream error", "it broke"),
        (scripted.says(scripted.piece("a")), "stream cut", "before its last event"),
        (scripted.says(scripted.DONE), "empty answer", "without a token"),
        (scripted.says(b"data: {nonsense\n\n"), "bad event", ""),
    ],
)
def test_kinds_of_errors(answer, error, message):
    record, _ = ask(answer)
    assert record.error == error and message in record.message
    assert record.ended >= record.started


def test_an_answer_without_done_but_with_a_finish_is_whole():
    record, _ = ask(scripted.says(scripted.piece("a", finish_reason="length")))
    assert not record.error


def test_a_connection_that_breaks():
    async def breaks(_, request):
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(scripted.piece("a"))
        request.transport.abort()
        return response

    record, _ = ask(breaks)
    assert record.error == "connection broken" and len(record.times) == 1


def test_a_timeout():
    async def hangs(_, request):
        await asyncio.sleep(30)
        return web.Response()

    assert ask(hangs, timeout=0.2)[0].error == "timeout"


@in_loop
async def test_nobody_there():
    async with session() as connections:
        body = openai_body("completions", "", {})
        record = await HttpDoor(connections, "http://127.0.0.1:1/v1/completions", body).send("x", 1)
    assert record.error == "connection refused"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_the_stream_is_cut(size):
    stream = b': comment\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\n'
    events = Events()
    found = [data for i in range(0, len(stream), size) for data in events.feed(stream[i : i + size])]
    assert found == [b'{"a": 1}', b'{"b": 2}'] and events.done


@pytest.mark.parametrize(
    "body",
    [b'{"error": {"message": "no"}}', b'{"error": "no"}', b'{"message": "no"}', b'{"detail": "no"}', b"no"],
)
def test_a_refusal_in_any_form(body):
    assert refusal_text(body) == "no"


@in_loop
async def test_quartets_own_doors_say_the_same():
    async with gateway(words=(" a", " b", " c")) as (address, _, _), AsyncClient(address) as client:
        record = await GrpcDoor(client, {"seed": 1}).send([4, 5], 3, True)
        told = await GrpcDoor(client, {}).send("text", 3)
        chat = await GrpcDoor(client, {}).send([{"role": "user", "content": "Hi"}], 3)
        refused = await GrpcDoor(client, {"temperature": -1.0}).send([4, 5], 3)
    assert record.answer_ids == [100, 101, 102] and record.answer_text == " a b c"
    # Tokens that were there together may come in one chunk.
    assert 1 <= len(record.times) <= record.output_tokens == 3 and record.prompt_tokens == 2
    assert not told.error and not told.answer_ids and not chat.error
    assert refused.error == "INVALID_ARGUMENT" and "temperature" in refused.message
    async with http_gateway(words=(" a", " b", " c")) as served, session() as connections:
        door = HttpDoor(connections, f"http://{served.address}/v1/completions", openai_body("completions", "", {}))
        found = await door.send("text", 3, True)
        chat_door = HttpDoor(connections, f"http://{served.address}/v1/chat/completions", openai_body("chat", "", {}))
        chat = await chat_door.send([{"role": "user", "content": "Hi"}], 3)
    assert (found.error, found.output_tokens, found.answer_text) == ("", 3, " a b c")
    assert (chat.error, chat.output_tokens) == ("", 3) and chat.times


@in_loop
async def test_no_grpc_server():
    async with AsyncClient("127.0.0.1:1") as client:
        record = await GrpcDoor(client, {}).send([1], 1)
    assert record.error == "UNAVAILABLE"
