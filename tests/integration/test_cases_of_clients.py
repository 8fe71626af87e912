"""Cases of usage (A8), of clients that give up or leave (G5, C12), and of pasts that contradict, at every door."""

import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import openai
import pytest
from support.doors import CHAT, COMPLETIONS, Refused
from support.http import call, connect, parse_reply, post, read_all, request_bytes
from support.http_scripted import named_events
from support.lines import line_of
from support.stack import eventually
from support.tiny_model import make_tiny_llama

from quartet.shared.client import Client as OurClient
from quartet.shared.client import InferenceError
from quartet.shared.pb import inference_pb2 as pb

USER = [{"role": "user", "content": "Hi"}]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
# Seconds of work, even on a fast machine: longer than any client here waits.
LONG = {"max_tokens": 1900, **GREEDY}
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES = {
    COMPLETIONS: {"prompt": "Hi", **LONG},
    CHAT: {"messages": USER, **LONG},
    RESPONSES: {"input": USER, "max_output_tokens": 1900, **GREEDY},
    MESSAGES: {"messages": USER, **LONG},
}


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(folder, 2048)
    settings = {"tokenizer_tokenizer": "byte", "executor_num_blocks": 512, "executor_max_num_seqs": 8}
    with line_of(tmp_path_factory.mktemp("stack"), folder, **settings) as running:
        yield running


@pytest.fixture(autouse=True)
def _at_rest(line):
    """Nothing of a test is left: no stream at the gateway, no row, no block; and the next request is answered."""
    yield
    eventually(lambda: at_rest(line), 20.0, "something was not given back")
    assert post(line.http_address, COMPLETIONS, {"prompt": "Hi", "max_tokens": 2}).status == 200


def at_rest(line):
    return line.client.at_rest() and line.client.server_info().num_open_streams == 0


def is_running(line):
    return line.client.loads().num_running > 0


# --- A8 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a8_usage_comes_in_a_stream_where_it_is_asked_for_and_once(line, path):
    body = BODIES[path] | {"max_tokens": 5, "n": 2, "seed": 1}
    whole = post(line.http_address, path, body).json()["usage"]
    assert whole["completion_tokens"] == 10
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        events = post(line.http_address, path, body | {"stream": True, "stream_options": options}).events()
        assert all("usage" not in event and event["choices"] for event in events)
    asked = body | {"stream": True, "stream_options": {"include_usage": True}, "read_prefix_cache": False}
    *events, last = post(line.http_address, path, asked).events()
    assert all(event["usage"] is None and event["choices"] for event in events)
    assert last["choices"] == [] and last["usage"] == whole
    asked["stream_options"]["continuous_usage_stats"] = True
    *events, last = post(line.http_address, path, asked).events()
    told = [event["usage"]["completion_tokens"] for event in events]
    assert told == sorted(told) and told[-1] == 10 and last["usage"] == whole and last["choices"] == []
    for options in ({}, {"include_usage": True}):
        reply = post(line.http_address, path, body | {"stream_options": options})
        assert reply.status == 400 and reply.error["param"] == "stream_options"


def test_a8_every_door_tells_the_same_usage(line):
    fields = {"messages": USER, "max_tokens": 5, "read_prefix_cache": False, "n": 2, "seed": 1}
    told = {name: ask(fields) for name, ask in line.doors.items()}
    usages = {name: (a.prompt_tokens, a.completion_tokens, a.cached_tokens) for name, a in told.items()}
    assert len(set(usages.values())) == 1 and usages["grpc"][1] <= 10, usages
    events = list(line.client.stream(USER, max_tokens=5, n=2))
    assert [event.WhichOneof("event") for event in events].index("completion") == len(events) - 1
    for path, limit in ((RESPONSES, "max_output_tokens"), (MESSAGES, "max_tokens")):
        body = BODIES[path] | {limit: 5, "read_prefix_cache": False}
        whole = post(line.http_address, path, body).json()["usage"]
        events = named_events(post(line.http_address, path, body | {"stream": True}))
        said = events[-1]["response"]["usage"] if path == RESPONSES else events[-2]["usage"]
        assert said == whole and whole["output_tokens"] == 5


# --- G5: clients that give up ---------------------------------------------------------------------


def test_g5_a_grpc_deadline_a_cancel_and_a_deadline_that_has_passed(line):
    with pytest.raises(grpc.RpcError) as caught:
        list(line.client.stream("Hi", timeout=0.5, **LONG))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: at_rest(line), 10.0)
    with pytest.raises(grpc.RpcError) as caught:
        list(line.client.stream("Hi", timeout=-1, **LONG))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    stream = line.client.stream("Hi", **LONG)
    next(stream)
    stream.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    assert caught.value.code() is grpc.StatusCode.CANCELLED


def test_g5_half_closed_is_how_every_grpc_request_is_and_ends_nothing(line):
    """A generic call says by itself when it will send no more: before the answer."""
    generate = line.client.channel.stream_stream(
        "/inference.v1.InferenceService/Generate",
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )
    events = list(generate(iter([line.client.request("Hi", max_tokens=6, **GREEDY)]), timeout=60))
    assert events[-1].completion.usage.completion_tokens == 6


def test_g5_the_python_client_s_deadline(line):
    with OurClient(line.address) as client:
        with pytest.raises(InferenceError) as caught:
            client.generate("Hi", timeout=0.5, **LONG).text()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        eventually(lambda: at_rest(line), 10.0)
        generation = client.generate("Hi", **LONG)
        next(generation)
        generation.close()


@pytest.mark.parametrize("stream", [False, True])
def test_g5_the_openai_client_s_timeout(line, stream):
    """Over HTTP a deadline is the client's own: it closes the connection."""
    with openai.OpenAI(base_url=f"http://{line.http_address}/v1", api_key="any", max_retries=0) as client:
        for kind in (client.completions, client.chat.completions):
            body = {"prompt": "Hi"} if kind is client.completions else {"messages": USER}
            options = {"max_tokens": 1900, "temperature": 0, "extra_body": {"ignore_eos": True}, **body}
            if not stream:
                with pytest.raises(openai.APITimeoutError):
                    kind.create(model="", timeout=0.5, **options)
            else:
                events = kind.create(model="", stream=True, **options)
                deadline = time.monotonic() + 0.5
                for _ in events:
                    if time.monotonic() > deadline:
                        break
                events.close()
            eventually(lambda: at_rest(line), 10.0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_g5_c12_a_client_that_leaves_in_any_phase_ends_its_work(line, path, stream):
    """While its body is sent, queued behind others, in prefill, in decode; by FIN, by RST, by half a close."""
    body = request_bytes("POST", path, BODIES[path] | {"stream": stream})
    ways = (socket.socket.close, _reset, lambda connection: connection.shutdown(socket.SHUT_WR))
    for leave in ways:
        with connect(line.http_address) as connection:
            connection.sendall(body[: len(body) - 5])
            leave(connection)
        with connect(line.http_address) as connection:
            connection.sendall(body)
            leave(connection)
        with connect(line.http_address) as connection:
            connection.sendall(body)
            eventually(lambda: is_running(line), 20.0)
            if stream:
                assert connection.recv(64).startswith(b"HTTP/1.1 200")
            leave(connection)
            eventually(lambda: at_rest(line), 10.0, f"{leave} did not end it")


def test_c12_who_leaves_the_queue_never_runs(line):
    """Eight rows are all there are, and all are taken."""
    busy = [line.client.stream("Hi", **LONG) for _ in range(8)]
    eventually(lambda: line.client.loads().num_running == 8, 20.0)
    waiting = []
    for path, body in BODIES.items():
        waiting.append(connect(line.http_address))
        waiting[-1].sendall(request_bytes("POST", path, body))
    eventually(lambda: line.client.loads().num_waiting == len(waiting), 20.0)
    for connection in waiting:
        connection.close()
    eventually(lambda: line.client.loads().num_waiting == 0, 10.0)
    assert line.client.loads().num_running == 8
    for stream in busy:
        stream.cancel()


def _reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()


# --- pasts that contradict ------------------------------------------------------------------------


def test_a_past_against_its_grammar_is_that_request_s_error_before_any_step(line):
    ids = list(b"Hi")
    regex = {"structured": {"regex": "(ab)+c"}, "max_tokens": 20, "temperature": 0.0}

    def ask(past, **more):
        return line.client.stream(ids, past=[pb.ChoicePast(index=0, past_token_ids=past)], **regex | more)

    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(line.client.generate, "Hi", max_tokens=200, **GREEDY)
        for past, place in ((b"x", 0), (b"aba", None), (b"abb", 2), (b"abcc", 3)):
            if place is None:
                # However many tokens the first chunk has.
                text = "".join(event.chunk.text for event in ask(past) if event.WhichOneof("event") == "chunk")
                assert re.fullmatch("b(ab)*[ac]?", text)
                continue
            with pytest.raises(grpc.RpcError) as caught:
                list(ask(past))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith(f"past_token_ids: token {place} of choice 0, id {past[place]}")
        assert neighbour.result().usage.completion_tokens == 200
    eventually(lambda: at_rest(line), 10.0)
    steps = line.client.loads().num_steps_total
    with pytest.raises(grpc.RpcError):
        list(ask(b"x", n=2))
    assert line.client.loads().num_steps_total == steps


def test_a_continued_message_is_prompt_and_no_output_so_the_structure_begins_after_it(line):
    messages = [*USER, {"role": "assistant", "content": "surely no"}]
    fields = {"messages": messages, "continue_final_message": True, "structured_outputs": {"regex": "(ab)+c"}}
    for name, ask in line.doors.items():
        answer = ask(fields | {"max_tokens": 30})
        assert not isinstance(answer, Refused) and answer.text.startswith("ab"), (name, answer)


# --- what no client should send -------------------------------------------------------------------

COMPLETION = b'{"prompt":"x","max_tokens":1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
STRANGE = {
    "two lengths": (HEAD + b"content-length: 29\r\ncontent-length: 30\r\n\r\n" + COMPLETION, 400),
    "a length and chunks": (HEAD + b"content-length: 29\r\ntransfer-encoding: chunked\r\n\r\n" + COMPLETION, 400),
    "a negative length": (HEAD + b"content-length: -1\r\n\r\n", 400),
    "a length that is no number": (HEAD + b"content-length: 1e2\r\n\r\n", 400),
    "a huge length": (HEAD + b"expect: 100-continue\r\ncontent-length: 99999999999\r\n\r\n", 413),
    "an unknown coding": (HEAD + b"transfer-encoding: gzip\r\n\r\n", 400),
    "a broken chunk": (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    "HTTP/2's preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", None),
    "a NUL in the path": (b"GET /v1/\x00models HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a CR in a header": (b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\rb\r\n\r\n", 400),
    "a header without a name": (b"GET /health HTTP/1.1\r\n: x\r\n\r\n", 400),
    "a whole URL": (b"GET http://elsewhere/health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", None),
    "CONNECT": (b"CONNECT elsewhere:443 HTTP/1.1\r\nhost: x\r\n\r\n", None),
    "a folded header": (b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\r\n b\r\nconnection: close\r\n\r\n", None),
}


@pytest.mark.parametrize("name", STRANGE)
def test_f1_strange_bytes_are_an_error_or_nothing_and_hurt_nobody(line, name):
    """None: the standard leaves it open; it is no 5xx, and the connection ends."""
    data, status = STRANGE[name]
    with connect(line.http_address, 15.0) as connection:
        connection.sendall(data)
        if status is None:
            connection.shutdown(socket.SHUT_WR)
        try:
            received = read_all(connection)
        except ConnectionResetError:
            received = b""
        if status is not None:
            reply = parse_reply(received)
            assert reply.status == status and reply.error, received[:200]
        elif received:
            assert 200 <= parse_reply(received).status < 500, received[:200]
    assert call(line.http_address, "GET", "/health").status == 200


def test_f1_random_bytes_over_both_ports_end_nothing(line):
    draw = random.Random(7)
    for address in (line.address, line.http_address):
        for _ in range(40):
            with connect(address, 10.0) as connection:
                try:
                    connection.sendall(draw.randbytes(draw.randrange(1, 3000)))
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(4096):
                        pass
                except OSError:
                    pass
    assert line.client.generate("Hi", max_tokens=2, **GREEDY).usage.completion_tokens == 2


def test_f8_strange_requests_over_grpc_name_their_field(line):
    bad = {
        "sampling.n": {"n": 0},
        "temperature": {"temperature": float("nan")},
        "top_p": {"top_p": 0.0},
        "max_tokens": {"max_tokens": -1},
        "min_tokens": {"min_tokens": 5, "max_tokens": 2},
        "seed": {"seed": -1},
        "logit_bias": {"logit_bias": {9999: 1.0}},
        "stop_token_ids": {"stop_token_ids": [9999]},
        "stop": {"stop": [""]},
        "logprobs": {"logprobs": 21},
        "detach_grace_ms": {"detach_grace_ms": 2**32 - 1},
        "tenant": {"tenant": "t" * 5000},
        "cache_salt": {"cache_salt": "t" * 5000},
    }
    for field, options in bad.items():
        message = line.client.refused("Hi", **options)
        assert field.rpartition(".")[2] in message.partition(":")[0], message
    for prompt, field in (([], "token_ids"), ([300], "token_ids"), ("", "text"), ("x" * 5000, "text")):
        assert line.client.refused(prompt, max_tokens=1).startswith(field)
    past = [pb.ChoicePast(index=1, past_token_ids=[97])]
    assert line.client.refused([97], past=past).startswith("past")
    empty = line.client.stub.Generate(pb.GenerateRequest(), timeout=10)
    with pytest.raises(grpc.RpcError) as caught:
        list(empty)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    garbage = line.client.channel.unary_stream("/inference.v1.InferenceService/Generate")
    with pytest.raises(grpc.RpcError) as caught:
        list(garbage(b"\xff\xff\xff", timeout=10))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "GenerateRequest" in caught.value.details()
    nowhere = line.client.channel.unary_unary("/inference.v1.InferenceService/Nope")
    with pytest.raises(grpc.RpcError) as caught:
        nowhere(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
