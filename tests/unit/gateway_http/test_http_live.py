"""GET /live where it is refused, or has nothing to tell. What it tells is in test_live_feed.py."""

import pytest
from support.gateway_fakes import in_loop
from support.http import parse_reply, request_bytes
from support.http_fakes import http_gateway


@pytest.mark.parametrize("interval", ["00000000050", "0" * 5000 + "50", "000000100" + "9" * 20, "49", "10001", "-100"])
def test_an_interval_that_is_none_is_refused_and_keeps_no_place(interval):
    @in_loop
    async def test():
        async with http_gateway() as gateway:
            reply = await gateway.call("GET", f"/live?interval_ms={interval}")
            assert reply.status == 400 and reply.error["param"] == "interval_ms"
            assert gateway.table.live._viewers == []
            async with gateway.connect() as (reader, writer):
                writer.write(request_bytes("GET", "/live?interval_ms=00100"))
                assert parse_reply(await reader.readuntil(b"\r\n\r\n"), head_only=True).status == 200

    test()


@in_loop
async def test_who_asks_for_the_head_alone_is_no_viewer():
    async with http_gateway() as gateway:
        reply = await gateway.call("HEAD", "/live")
        assert reply.status == 200 and reply.body == b""
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert gateway.table.live._viewers == []
        assert (await gateway.call("HEAD", "/live?level=x")).status == 400
