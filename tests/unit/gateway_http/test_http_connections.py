"""What clients do to a connection: garbage, sloth, haste, and leaving."""

import asyncio
import contextlib
import socket

import anthropic
import openai
import pytest
from support.gateway_fakes import AnsweringPeer, delta, in_loop, until
from support.http import parse_reply, request_bytes
from support.http_fakes import http_gateway

from quartet.services.gateway.bind import BindError, tcp_sockets
from quartet.services.gateway.http.protocol import MAX_HEADER_BYTES
from quartet.services.gateway.service import Gateway
from quartet.services.gateway.settings import GatewaySettings
from quartet.shared.messages import Abort, Deltas, Encode, Submit

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]


@in_loop
async def test_f1_what_is_no_http_is_a_400_and_the_server_goes_on():
    garbage = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"GET /health HTTP/1.1\r\nx: a\x00b\r\n\r\n",
        b"NOPE /health HTTP/1.1\r\n\r\n",
        b"\r\n\x00\r\n",
        b"\xff" * 100,
    ]
    async with http_gateway() as gateway:
        for data in garbage:
            async with gateway.connect() as (reader, writer):
                writer.write(data)
                answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.startswith(b"HTTP/1.1 400"), (data, answer)
            assert parse_reply(answer).error
        assert (await gateway.post(COMPLETIONS, {"prompt": "x"})).status == 200


@in_loop
async def test_a_broken_chunk_in_a_body_ends_the_connection():
    async with http_gateway() as gateway:
        head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        async with gateway.connect() as (reader, writer):
            writer.write(head + b'5\r\n{"pro\r\nzz\r\n')
            reply = parse_reply(await asyncio.wait_for(reader.read(), 5))
            assert reply.status == 400 and reply.error
        assert (await gateway.call("GET", "/health")).status == 200
        assert gateway.peer.sent == []


async def _trickle(gateway, start):
    """What comes back. A byte that meets a closed connection resets it, and the answer may be lost: again then."""
    for _ in range(5):
        async with gateway.connect() as (reader, writer):
            writer.write(start)
            reading = asyncio.create_task(reader.read())
            while not reading.done():
                await asyncio.sleep(0.05)
                if start:
                    writer.write(b"a")
            with contextlib.suppress(ConnectionResetError):
                return await reading
    raise AssertionError("reset each time")


@in_loop
async def test_a_slow_head_and_a_slow_body_are_not_waited_for():
    """Slowloris: a byte now and then keeps no connection open."""
    async with http_gateway(header_timeout=0.3, body_timeout=0.3) as gateway:
        for start in (b"", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"):
            assert b"408" in (await _trickle(gateway, start))[:12]
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        assert (await gateway.raw(head)).status == 408
        # A second request on a connection has its own time, and an idle connection is no slow one.
        async with gateway.connect() as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b'{"status":"ok"}')
            await asyncio.sleep(0.5)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b'{"status":"ok"}')
            writer.write(b"GET /hea")
            assert b"408" in (await reader.read())[:12]


@in_loop
async def test_a_head_is_bounded():
    async with http_gateway() as gateway:
        async with gateway.connect() as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\n" + b"x: %s\r\n" % (b"y" * 8000) * 9)
            answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 431") and str(MAX_HEADER_BYTES).encode() in answer


@in_loop
async def test_a_request_that_wishes_another_protocol_is_answered_in_this_one():
    """Java's client asks for h2c with its first request, body and all."""
    wish = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAARAAAAA"}
    async with http_gateway() as gateway:
        data = request_bytes("POST", COMPLETIONS, {"prompt": "x"}, wish)
        head, end, body = data.partition(b"\r\n\r\n")
        for parts in ([data], [head + end, body]):
            async with gateway.connect() as (reader, writer):
                for part in parts:
                    writer.write(part)
                    await asyncio.sleep(0.02)
                assert b"HTTP/1.1 200" in await asyncio.wait_for(reader.readuntil(b"usage"), 5)


@in_loop
async def test_an_idle_connection_is_closed_in_time():
    async with http_gateway(keep_alive_timeout=1.0) as gateway, gateway.connect() as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b'{"status":"ok"}')
        assert await asyncio.wait_for(reader.read(), 5) == b""


@in_loop
async def test_a_request_sent_before_the_answer_closes_the_connection_after_it():
    """Reading goes on, so that a client that leaves is noticed."""
    two = request_bytes("POST", COMPLETIONS, {"prompt": "x"}, {"connection": "keep-alive"}) * 2
    async with http_gateway() as gateway:
        async with gateway.connect() as (reader, writer):
            writer.write(two)
            reply = parse_reply(await asyncio.wait_for(reader.read(), 5))
            assert reply.status == 200 and len(gateway.peer.all(Submit)) == 1
        gateway.peer.silent = True
        async with gateway.connect() as (_, writer):
            writer.write(two)
            await until(lambda: len(gateway.peer.all(Submit)) == 2)
        await until(lambda: gateway.table.num_open_streams == 0)


class Slow(AnsweringPeer):
    """Accepts nothing, answers no call."""

    def _answer(self, message):
        pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("phase", ["waiting", "accepted", "decoding"])
def test_c12_a_client_that_leaves_ends_its_work(phase, path, stream):
    """C12: in every phase, with or without stream; every prompt of a batch."""

    @in_loop
    async def test():
        body = {"messages": USER} if path == CHAT else {"prompt": ["x", "y"]}
        count = 1 if path == CHAT else 2
        async with http_gateway(peer_type=Slow if phase == "waiting" else AnsweringPeer) as gateway:
            gateway.peer.silent = True
            async with gateway.connect() as (_, writer):
                writer.write(request_bytes("POST", path, body | {"stream": stream}))
                await until(lambda: len(gateway.peer.all(Submit)) == count)
                if phase == "decoding":
                    for submit in gateway.peer.all(Submit):
                        gateway.peer.speak(submit, 1)
            await until(lambda: gateway.table.num_open_streams == 0, 1.0)
            assert {m.request_id for m in gateway.peer.all(Abort)} == {m.request_id for m in gateway.peer.all(Submit)}
            assert gateway.table.num_retained_streams == 0

    test()


@in_loop
async def test_c12_a_client_that_leaves_with_its_call_open_or_its_body_half_sent():
    async with http_gateway(peer_type=Slow) as gateway:
        async with gateway.connect() as (_, writer):
            writer.write(request_bytes("POST", "/tokenize", {"prompt": "x"}))
            await until(lambda: len(gateway.peer.all(Encode)) == 1)
        await until(lambda: not gateway.table.calls._open)
        async with gateway.connect() as (_, writer):
            writer.write(request_bytes("POST", COMPLETIONS, {"prompt": "x"})[:-3])
        assert (await gateway.call("GET", "/health")).status == 200
        assert gateway.peer.all(Submit) == []


@in_loop
async def test_c10_many_streams_left_after_their_first_chunk_leave_nothing():
    async with http_gateway() as gateway:
        gateway.peer.silent = True

        async def leave():
            async with gateway.connect() as (reader, writer):
                writer.write(request_bytes("POST", CHAT, {"messages": USER, "stream": True}))
                await reader.readuntil(b"assistant")

        for _ in range(10):
            await asyncio.gather(*(leave() for _ in range(20)))
        await until(lambda: gateway.table.num_open_streams == 0)
        gateway.peer.silent = False
        assert (await gateway.post(CHAT, {"messages": USER})).status == 200


@contextlib.asynccontextmanager
async def not_reading(gateway, request):
    """A socket on which `request` was sent, with little room for what comes back."""
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        host, _, port = gateway.address.rpartition(":")
        loop = asyncio.get_running_loop()
        await loop.sock_connect(deaf, (host, int(port)))
        await loop.sock_sendall(deaf, request)
        yield deaf


@in_loop
async def test_a_client_that_reads_nothing_ends_its_stream_alone():
    """What cannot be written waits in the ledger, up to max_unread_bytes."""
    async with http_gateway(max_unread_bytes=200_000) as gateway:
        gateway.peer.silent = True
        async with not_reading(gateway, request_bytes("POST", CHAT, {"messages": USER, "stream": True})):
            await until(lambda: len(gateway.peer.all(Submit)) == 1)
            submit, size = gateway.peer.last(), 40_000
            for i in range(400):
                word = delta(submit, i, [i], "x" * size, (i + 1) * size)
                gateway.table.on_message(gateway.peer, Deltas([word]))
                await asyncio.sleep(0.001)
                if not gateway.table.num_open_streams:
                    break
            else:
                raise AssertionError("16 MB were kept for a client that reads nothing")


@in_loop
async def test_a_client_that_takes_nothing_of_a_whole_answer_loses_its_connection():
    """What a system has taken over to send is nobody's but its own."""
    settings = {"send_timeout": 0.4, "max_unread_bytes": 2**25}
    request = request_bytes("POST", COMPLETIONS, {"prompt": "x"})
    async with http_gateway(("x" * 12_000_000,), **settings) as gateway, not_reading(gateway, request):
        await until(lambda: gateway.peer.all(Submit) and not gateway.table.num_open_streams)
        await until(lambda: len(gateway.face.connections) == 0)


@pytest.mark.parametrize(
    ("path", "ping"),
    [
        (COMPLETIONS, b": keep-alive\n\n"),
        (CHAT, b": keep-alive\n\n"),
        ("/v1/responses", b": keep-alive\n\n"),
        ("/v1/messages", b'event: ping\ndata: {"type": "ping"}\n\n'),
    ],
)
def test_a_stream_on_which_nothing_comes_says_that_it_lives(path, ping):
    """So that no proxy cuts it, while a service is away or a request waits in the queue; clients pass it over."""

    @in_loop
    async def test():
        body = {
            COMPLETIONS: {"prompt": "x"},
            "/v1/responses": {"input": "x"},
            "/v1/messages": {"messages": USER, "max_tokens": 3},
        }.get(path, {"messages": USER})
        async with http_gateway(sse_keep_alive_interval=0.05) as gateway:
            gateway.peer.silent = True
            async with gateway.connect() as (reader, writer):
                writer.write(request_bytes("POST", path, body | {"stream": True}))
                for _ in range(3):
                    await asyncio.wait_for(reader.readuntil(ping), 5)
                gateway.peer.speak(gateway.peer.last())
                rest = await asyncio.wait_for(reader.read(), 5)
            assert ping not in rest.partition(b'"a"')[2] and rest.endswith(b"0\r\n\r\n")
            # Who leaves meanwhile is noticed as ever, and a failure is the last word.
            async with gateway.connect() as (reader, writer):
                writer.write(request_bytes("POST", path, body | {"stream": True}))
                await reader.readuntil(ping)
            await until(lambda: gateway.table.num_open_streams == 0)
            async with gateway.connect() as (reader, writer):
                writer.write(request_bytes("POST", path, body | {"stream": True}))
                await reader.readuntil(ping)
                gateway.table.end_all("stopped")
                *_, last = (await asyncio.wait_for(reader.read(), 5)).rpartition(ping)
                assert b"stopped" in last
        async with http_gateway(sse_keep_alive_interval=0.05) as gateway:
            gateway.peer.silent = True
            asking = asyncio.create_task(gateway.post(path, body))
            await asyncio.sleep(0.2)
            gateway.peer.speak(gateway.peer.last())
            assert (await asking).json()["model"] == "tiny"  # no stream, nothing beside its body

    test()


@in_loop
async def test_silence_is_counted_from_the_last_that_was_written():
    async with http_gateway(sse_keep_alive_interval=1.0) as gateway:
        gateway.peer.silent = True
        async with gateway.connect() as (reader, writer):
            writer.write(request_bytes("POST", COMPLETIONS, {"prompt": "x", "stream": True}))
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            await asyncio.sleep(0.3)
            submit = gateway.peer.last()
            gateway.peer.table.on_message(gateway.peer, Deltas([delta(submit, 0, [10], "a", 1)]))
            await asyncio.wait_for(reader.readuntil(b'"a"'), 5)
            wrote_at = asyncio.get_running_loop().time()
            await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 5)
            assert 0.9 < asyncio.get_running_loop().time() - wrote_at < 1.4


@in_loop
async def test_the_packages_pass_over_what_keeps_a_stream_alive():
    async with http_gateway(sse_keep_alive_interval=0.02) as gateway:
        gateway.peer.silent = True

        async def speak_late():
            await until(lambda: gateway.peer.all(Submit))
            await asyncio.sleep(0.1)
            gateway.peer.speak(gateway.peer.last())
            gateway.peer.sent.clear()

        options = {"model": "", "messages": USER, "stream": True}
        async with openai.AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="any", max_retries=0) as api:
            speaking = asyncio.create_task(speak_late())
            chunks = [chunk async for chunk in await api.chat.completions.create(**options)]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abc"
            await speaking
        url = f"http://{gateway.address}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as api:
            speaking = asyncio.create_task(speak_late())
            async with api.messages.stream(model="", messages=USER, max_tokens=3) as stream:
                assert "".join([text async for text in stream.text_stream]) == "abc"
            await speaking


@in_loop
async def test_connections_are_bounded_and_idle_ones_make_place():
    async with http_gateway(max_connections=3) as gateway, contextlib.AsyncExitStack() as stack:
        gateway.peer.silent = True

        async def connect(data=b""):
            reader, writer = await stack.enter_async_context(gateway.connect())
            writer.write(data)
            return reader

        health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        stream = request_bytes("POST", CHAT, {"messages": USER, "stream": True})
        busy = await connect(stream)
        await busy.readuntil(b"assistant")
        used = await connect(health)
        await used.readuntil(b'{"status":"ok"}')
        half = await connect(b"GET /hea")
        await until(lambda: len(gateway.face.connections) == 3)
        # The longest idle goes first, whether it has had an answer or is still writing its head.
        third = await connect(stream)
        await third.readuntil(b"assistant")
        assert await _ended(used)
        fourth = await connect(stream)
        await fourth.readuntil(b"assistant")
        assert await _ended(half)
        reply = parse_reply(await asyncio.wait_for((await connect(health)).read(), 5))
        assert reply.status == 503 and "max_connections" in reply.error["message"] and reply.headers["retry-after"]
        assert len(gateway.face.connections) == 3 and not busy.at_eof()
        for submit in gateway.peer.all(Submit):
            gateway.peer.speak(submit)
        assert (await asyncio.wait_for(busy.read(), 5)).endswith(b"0\r\n\r\n")
        await until(lambda: len(gateway.face.connections) == 0)


async def _ended(reader):
    try:
        return await asyncio.wait_for(reader.read(), 5) == b""
    except ConnectionError:
        return True


@in_loop
async def test_draining_ends_streams_with_an_error_and_closes_idle_connections():
    async with http_gateway() as gateway:
        gateway.peer.silent = True
        async with gateway.connect() as (idle, writer), gateway.connect() as (reader, busy):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await idle.readuntil(b'{"status":"ok"}')
            busy.write(request_bytes("POST", CHAT, {"messages": USER, "stream": True}))
            await reader.readuntil(b"assistant")
            gateway.table.draining = True
            assert (await gateway.post(COMPLETIONS, {"prompt": "x"})).status == 503
            gateway.table.end_all("stopped")
            assert b'"code":null' in await reader.read()
            await gateway.face.stop(1.0)
            assert await asyncio.wait_for(idle.read(), 5) == b""


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_g9_an_address_that_is_taken_is_told_before_anything_else(host):
    @in_loop
    async def test():
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            if host != "127.0.0.1":
                pytest.skip("no IPv6 here")
        family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
        with socket.create_server((host.strip("[]"), 0), family=family) as taken:
            address = f"{host}:{taken.getsockname()[1]}"
            gateway = Gateway(GatewaySettings(http_address=address, grpc_address="127.0.0.1:0", run_dir="/nonexistent"))
            with pytest.raises(BindError, match=r"http_address: cannot bind .*: address already in use"):
                await gateway.run(asyncio.Event())

    test()


@in_loop
async def test_g9_a_port_whose_connections_linger_can_be_bound_again():
    async with http_gateway() as gateway:
        assert (await gateway.call("GET", "/health")).status == 200
        address = gateway.address
    settings = GatewaySettings(http_address=address)
    for listener in tcp_sockets("http_address", settings.http_address):
        listener.close()


@pytest.mark.parametrize("bad", ["8000", "host", "h:99999", "::1:80"])
def test_an_address_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="http-address"):
        GatewaySettings(http_address=bad)


@in_loop
async def test_a_connection_with_an_answer_still_to_be_sent_is_not_idle():
    text = "a" * 16_000_000
    settings = {"max_connections": 1, "max_unread_bytes": 2**26}
    request = request_bytes("POST", COMPLETIONS, {"prompt": "x"}, {"connection": None})
    async with http_gateway((text,), **settings) as gateway, not_reading(gateway, request) as slow:
        await until(lambda: gateway.peer.all(Submit) and gateway.table.num_open_streams == 0)
        await asyncio.sleep(0.1)
        assert (await gateway.call("GET", "/health")).status == 503
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
        received = bytearray()
        async with asyncio.timeout(20):
            while not received.endswith(b"}"):
                chunk = await asyncio.get_running_loop().sock_recv(slow, 2**20)
                assert chunk, len(received)
                received += chunk
        assert text.encode() in received
        assert (await gateway.call("GET", "/health")).status == 200
