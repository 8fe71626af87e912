"""Keys on both protocols: deny by default, but to see whether the server lives."""

import asyncio
import base64
import hashlib
import re

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.gateway_fakes import gateway as grpc_gateway
from support.gateway_fakes import in_loop, until
from support.http import parse_reply, request_bytes
from support.http_fakes import http_gateway

from quartet.services.cli.keys import main as keys_main
from quartet.services.gateway.api_keys import ApiKeys
from quartet.services.gateway.credentials import Credentials
from quartet.services.gateway.http.app import OPEN_PATHS
from quartet.services.gateway.settings import GatewaySettings
from quartet.shared.client import AsyncClient, InferenceError
from quartet.shared.messages import Submit
from quartet.shared.pb import inference_pb2 as pb
from quartet.shared.pb import inference_pb2_grpc as pb_grpc

KEY, OTHER = "qk-right", "qk-other"
HASH, OTHER_HASH = (hashlib.sha256(key.encode()).hexdigest() for key in (KEY, OTHER))
HASHES = [f"alice={HASH}", OTHER_HASH]
BEARER = {"authorization": f"Bearer {KEY}"}
# What no route has, and what looks like the one that needs no key.
ODD_PATHS = [
    ("GET", "/none"),
    ("GET", "//health"),
    ("GET", "/health/"),
    ("GET", "/Health"),
    ("GET", "/v1/../health"),
    ("POST", "//v1/completions"),
    ("POST", "/v1/completions/"),
    ("OPTIONS", "/v1/completions"),
    ("HEAD", "/v1/models"),
]
PAGE = {"accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8", "sec-fetch-mode": "navigate"}


def basic(password, user="me"):
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def routes(gateway):
    """Every method and path that the application answers, but those that need no key."""
    for route in gateway.face._app._app.routes:
        for method in route.methods:
            path = re.sub(r"{[^}]*}", "tiny", route.path)
            if path not in OPEN_PATHS:
                yield method, path


async def status(gateway, method, path, headers):
    """Not waiting for a response's end: some go on for ever."""
    async with gateway.connect() as (reader, writer):
        writer.write(request_bytes(method, path, headers=headers))
        return parse_reply(await reader.readuntil(b"\r\n\r\n"), head_only=True).status


@in_loop
async def test_g11_every_http_route_but_liveness_needs_a_key():
    async with http_gateway(api_key_hashes=HASHES, call_timeout=0.05) as gateway:
        wrong = [{}, {"authorization": ""}, {"authorization": "Bearer no"}, {"authorization": f"Basic {KEY}"}]
        wrong += [{"authorization": KEY}, {"authorization": f"Bearer {HASH}"}, {"authorization": "Bearer "}]
        wrong += [{"x-api-key": "no"}, basic("no"), basic("", KEY), basic(HASH), {"authorization": "Basic \xff="}]
        found = list(routes(gateway))
        assert len(found) > 10 and ("POST", "/v1/completions") in found
        for method, path in [*found, *ODD_PATHS]:
            for headers in wrong:
                reply = await gateway.call(method, path, headers=headers)
                assert reply.status == 401, (method, path, headers, reply)
                assert reply.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert reply.json()["error"]["type"] == "authentication_error"
            for right in (BEARER, {"x-api-key": KEY}, basic(KEY)):
                assert await status(gateway, method, path, right) not in (401, 500)
        assert gateway.peer.all(Submit) == []
        assert (await gateway.call("GET", "/health")).status == 200
        headers = {"authorization": f"bearer {OTHER}"}
        assert (await gateway.post("/v1/completions", {"prompt": "x"}, headers)).status == 200
        assert gateway.peer.last().tenant == f"key-{OTHER_HASH[:8]}"
        await gateway.post("/v1/completions", {"prompt": "x", "user": "bob"}, BEARER)
        assert gateway.peer.last().tenant == "bob"
        await gateway.post("/v1/completions", {"prompt": "x"}, BEARER)
        assert gateway.peer.last().tenant == "alice"


@in_loop
async def test_a_browser_is_asked_for_the_key_where_it_opens_a_page_and_nowhere_else():
    """The key is the password, whatever the name; with it the page's own requests go through, other sites' do not."""
    async with http_gateway(api_key_hashes=HASHES) as gateway:
        reply = await gateway.call("GET", "/docs", headers=PAGE)
        assert reply.status == 401 and reply.headers["www-authenticate"].startswith("Basic realm=")
        for method, headers in (("GET", {"accept": "application/json"}), ("GET", {}), ("POST", PAGE)):
            reply = await gateway.call(method, "/docs", headers=headers)
            assert reply.status == 401 and reply.headers["www-authenticate"] == "Bearer"
        for given in (
            basic(KEY),
            basic(KEY, user=""),
            {"authorization": basic(KEY)["authorization"].replace("B", "b")},
        ):
            assert (await gateway.call("GET", "/docs", headers=PAGE | given)).status == 200
        assert (await gateway.call("GET", "/docs", headers=PAGE | basic("no"))).status == 401
        # A link on another site may open a page; a form or script of another site may do nothing.
        foreign = basic(KEY) | {"sec-fetch-site": "cross-site"}
        assert (await gateway.call("GET", "/docs", headers=PAGE | foreign)).status == 200
        body = {"prompt": "x"}
        for own in ({"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}, {"origin": "http://test"}, {}):
            assert (await gateway.post("/v1/completions", body, basic(KEY) | own)).status == 200
            assert gateway.peer.last().tenant == "alice"
        count = len(gateway.peer.all(Submit))
        for other in ({"sec-fetch-site": "same-site"}, {"origin": "https://evil.example"}, {"origin": "null"}, foreign):
            assert (await gateway.post("/v1/completions", body, basic(KEY) | other)).status == 403
            assert (await gateway.post("/reset_prefix_cache", None, basic(KEY) | other)).status == 403
            assert (await gateway.call("GET", "/v1/models", headers=basic(KEY) | other)).status == 403
        frame = PAGE | foreign | {"sec-fetch-dest": "iframe"}
        assert (await gateway.call("GET", "/docs", headers=frame)).status == 403
        assert len(gateway.peer.all(Submit)) == count
        # A bearer is what a program has been given; a browser adds none by itself.
        assert (await gateway.post("/v1/completions", body, BEARER | {"sec-fetch-site": "cross-site"})).status == 200


@in_loop
async def test_other_sites_pages_may_do_nothing_where_no_key_is_needed():
    """The browser's certificate, or that it is in the network, would be enough."""
    others = ({"sec-fetch-site": "cross-site"}, {"origin": "https://evil.example"}, {"origin": "null"})
    allowed = {"origin": "https://a.example", "sec-fetch-site": "cross-site"}
    body = {"prompt": "x"}
    async with http_gateway() as gateway:
        for other in (*others, {"sec-fetch-site": "same-site", "origin": "http://test"}, allowed):
            headers = {"content-type": None} | other
            for path in ("/v1/completions", "/v1/chat/completions", "/reset_prefix_cache", "/none"):
                reply = await gateway.post(path, body, headers)
                assert reply.status == 403 and reply.error["code"] == "foreign_origin"
                assert reply.headers["x-request-id"]
            reply = await gateway.post("/v1/messages", body, headers)
            assert reply.status == 403 and reply.json()["error"]["type"] == "permission_error"
            assert (await gateway.call("GET", "/v1/models", headers=other)).status == 200
        assert gateway.peer.sent == []
        for own in ({"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}, {"origin": "http://test"}, {}):
            assert (await gateway.post("/v1/completions", body, own)).status == 200
    async with http_gateway(cors_allow_origins=["https://a.example"]) as gateway:
        reply = await gateway.post("/v1/completions", body, allowed)
        assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://a.example"
        for other in others:
            assert (await gateway.post("/v1/completions", body, other)).status == 403
    async with http_gateway(cors_allow_origins=["*"], api_key_hashes=HASHES) as gateway:
        assert (await gateway.post("/v1/completions", body, basic(KEY) | allowed)).status == 403
        assert (await gateway.post("/v1/completions", body, BEARER | allowed)).status == 200
    async with http_gateway(cors_allow_origins=["*"]) as gateway:
        assert (await gateway.post("/v1/completions", body, allowed)).status == 200


@in_loop
async def test_g11_every_grpc_method_but_liveness_needs_a_key():
    async with grpc_gateway(api_key_hashes=HASHES) as (address, _, peer), grpc.aio.insecure_channel(address) as channel:
        stub, health = pb_grpc.InferenceServiceStub(channel), health_pb2_grpc.HealthStub(channel)
        service = "inference.v1.InferenceService"
        methods = pb.DESCRIPTOR.services_by_name["InferenceService"].methods
        calls = [(getattr(stub, m.name), getattr(pb, m.input_type.name)()) for m in methods]
        calls += [(health.Check, health_pb2.HealthCheckRequest(service=service))]
        calls += [(health.Watch, health_pb2.HealthCheckRequest(service=service))]
        calls += [(channel.unary_unary("/inference.v1.InferenceService/None"), b"")]
        calls += [(channel.unary_unary("/grpc.health.v1.Health/check"), b"")]
        calls += [(channel.unary_unary("//grpc.health.v1.Health/Check"), b"")]
        info = reflection_pb2.ServerReflectionRequest(list_services="")
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        calls += [(reflect, iter([info]))]
        for method, request in calls:
            for metadata in (None, [("authorization", "Bearer no")], [("authorization", KEY)]):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await _result(method(request, metadata=metadata, timeout=10))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
                if method is reflect:
                    break
        assert peer.sent == []
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        metadata = [("authorization", f"Bearer {KEY}")]
        assert (await health.Check(health_pb2.HealthCheckRequest(service=service), metadata=metadata)).status == 1
        assert [r async for r in stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata)]
        assert peer.last().tenant == "alice"
        assert [r async for r in stub.Generate(pb.GenerateRequest(text="x", tenant="t"), metadata=metadata)]
        assert peer.last().tenant == "t"
        assert await _result(reflect(iter([info]), metadata=metadata))
        async with AsyncClient(address, api_key=KEY) as client:
            assert "".join([chunk.text async for chunk in client.generate("x")]) == "abc"
            await client.tokenize("x")


async def _result(call):
    if hasattr(call, "__aiter__"):
        async for response in call:
            return response
        return None
    return await call


async def two_open_calls(channel, peer):
    """(the stub, metadata with the key, two streams of that key that stay open)."""
    peer.silent = True
    stub = pb_grpc.InferenceServiceStub(channel)
    metadata = [("authorization", f"Bearer {KEY}")]
    open_calls = [stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata) for _ in range(2)]
    for call in open_calls:
        await call.read()
    return stub, metadata, open_calls


@in_loop
async def test_a_keys_requests_are_bounded_and_those_of_others_are_not():
    settings = {"api_key_hashes": HASHES, "max_requests_per_key": 2}
    async with http_gateway(**settings) as gateway:
        gateway.peer.silent = True
        path, body = "/v1/completions", {"prompt": "x"}
        waiting = [asyncio.create_task(gateway.post(path, body, BEARER)) for _ in range(2)]
        await until(lambda: gateway.table.num_open_streams == 2)
        reply = await gateway.post(path, body, BEARER)
        assert reply.status == 429 and "max_requests_per_key" in reply.error["message"]
        assert reply.headers["retry-after"] == "1"
        gateway.peer.silent = False
        assert (await gateway.post(path, body, {"authorization": f"Bearer {OTHER}"})).status == 200
        assert (await gateway.post(path, {"prompt": ["x"] * 3}, {"authorization": f"Bearer {OTHER}"})).status == 429
        for task in waiting:
            task.cancel()
        await until(lambda: gateway.table.num_open_streams == 0)
        assert (await gateway.post(path, body, BEARER)).status == 200
    async with grpc_gateway(**settings) as (address, table, peer), grpc.aio.insecure_channel(address) as channel:
        stub, metadata, open_calls = await two_open_calls(channel, peer)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(caught.value.trailing_metadata())["retry-after-ms"] == "1000"
        for call in open_calls:
            call.cancel()
        await until(lambda: table.num_open_streams == 0)
        peer.silent = False
        assert [r async for r in stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata)]


def counts(table):
    """[received, rejected, other ends, in progress], which add up."""
    ended = table.metrics.ended
    found = [table.metrics.received, ended["rejected"], sum(ended.values()) - ended["rejected"], table.num_open_streams]
    assert found[0] == sum(found[1:]), found
    return found


@in_loop
async def test_what_is_refused_for_its_key_is_counted():
    settings = {"api_key_hashes": HASHES, "max_requests_per_key": 2}
    async with http_gateway(**settings) as gateway:
        assert (await gateway.post("/v1/completions", {"prompt": ["x"] * 3}, BEARER)).status == 429
        assert counts(gateway.table) == [3, 3, 0, 0]
        assert (await gateway.post("/v1/completions", {"prompt": ["x"] * 2}, BEARER)).status == 200
        assert (await gateway.post("/v1/completions", {"prompt": "x"})).status == 401
        assert counts(gateway.table) == [5, 3, 2, 0]
    async with grpc_gateway(**settings) as (address, table, peer), grpc.aio.insecure_channel(address) as channel:
        stub, metadata, open_calls = await two_open_calls(channel, peer)
        unknown = channel.unary_unary("/inference.v1.InferenceService/None")
        for method, request, given in (
            (stub.Generate, pb.GenerateRequest(text="x"), metadata),
            (stub.Attach, pb.AttachRequest(), metadata),
            (stub.Generate, pb.GenerateRequest(text="x"), None),
            (stub.GetLoads, pb.GetLoadsRequest(), None),
            (unknown, b"", None),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await _result(method(request, metadata=given))
        assert table.metrics.grpc_calls == {
            ("Generate", "RESOURCE_EXHAUSTED"): 1,
            ("Attach", "RESOURCE_EXHAUSTED"): 1,
            ("Generate", "UNAUTHENTICATED"): 1,
            ("GetLoads", "UNAUTHENTICATED"): 1,
        }
        assert counts(table) == [3, 1, 0, 2]
        for call in open_calls:
            call.cancel()


def test_keys_come_from_settings_and_files(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\nbob={HASH}\n{OTHER_HASH}\n")
    keys = GatewaySettings(api_key_file=str(path)).read_api_keys()
    assert keys.required and keys.find(f"Bearer {KEY}").name == "bob"
    assert not ApiKeys().required and ApiKeys().find(None) is not None
    for hashes in (["short"], ["a b=" + HASH], [KEY]):
        with pytest.raises(ValueError, match="api-key-hashes"):
            GatewaySettings(api_key_hashes=hashes)
    path.write_text("# none yet\n")
    with pytest.raises(ValueError, match="nobody could come in"):
        GatewaySettings(api_key_file=str(path))
    with pytest.raises(ValueError, match="cannot read"):
        GatewaySettings(api_key_file=str(tmp_path / "none"))


@in_loop
async def test_keys_are_read_again_and_what_runs_is_still_counted(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"alice={HASH}\n")
    settings = {"api_key_file": str(path), "max_requests_per_key": 1}
    async with http_gateway(**settings) as gateway, grpc_gateway(**settings) as (address, table, _):
        credentials = (gateway.face._credentials, table.face._credentials)
        body, other = {"prompt": "x"}, {"authorization": f"Bearer {OTHER}"}

        def reload():
            for each in credentials:
                each.reload_if_changed()

        gateway.peer.silent = True
        running = asyncio.create_task(gateway.post("/v1/completions", body, BEARER))
        await until(lambda: gateway.table.num_open_streams == 1)
        gateway.peer.silent = False
        assert (await gateway.post("/v1/completions", body, other)).status == 401
        path.write_text(f"alice={HASH}\nbob={OTHER_HASH}\n")
        reload()
        assert (await gateway.post("/v1/completions", body, other)).status == 200
        assert (await gateway.post("/v1/completions", body, BEARER)).status == 429
        # What would let everybody in, or is no hash, changes nothing.
        for content in ("", "# none\n", "nonsense\n"):
            path.write_text(content)
            reload()
            assert (await gateway.post("/v1/completions", body, other)).status == 200
            assert (await gateway.post("/v1/completions", body, {})).status == 401
        path.write_text(f"bob={OTHER_HASH}\n")
        reload()
        assert (await gateway.post("/v1/completions", body, BEARER)).status == 401
        gateway.peer.speak(gateway.peer.all(Submit)[0])
        assert (await running).status == 200
        async with AsyncClient(address, api_key=KEY) as client:
            with pytest.raises(InferenceError, match="API key"):
                await client.tokenize("x")
        async with AsyncClient(address, api_key=OTHER) as client:
            await client.tokenize("x")


@pytest.mark.parametrize("content", ["", "# none yet\n", "carol=abc\n"])
def test_a_file_without_a_key_changes_nothing_where_there_are_others(tmp_path, content):
    path = tmp_path / "keys"
    path.write_text(f"bob={OTHER_HASH}\n")
    settings = GatewaySettings(api_key_hashes=[f"alice={HASH}"], api_key_file=str(path))
    credentials = Credentials(settings)
    path.write_text(content)
    credentials.reload()
    assert credentials.keys.find(f"Bearer {OTHER}").name == "bob"
    assert credentials.keys.find(f"Bearer {KEY}").name == "alice"
    with pytest.raises(ValueError, match="api-key"):
        GatewaySettings(api_key_hashes=[f"alice={HASH}"], api_key_file=str(path))


def test_the_command_makes_a_key_whose_hash_lets_it_in(capsys):
    assert keys_main(["api", "alice"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    key = ApiKeys([lines["hash"]]).find(f"Bearer {lines['key']}")
    assert key is not None and key.name == "alice"
    assert keys_main(["api", "a b"]) == 2
    assert keys_main(["api"]) == 0


@in_loop
async def test_cors_is_off_unless_told():
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with http_gateway() as gateway:
        reply = await gateway.call("OPTIONS", "/v1/completions", headers=preflight)
        assert reply.status == 405 and not any(name.startswith("access-control") for name in reply.headers)
        reply = await gateway.call("GET", "/health", headers=preflight)
        assert not any(name.startswith("access-control") for name in reply.headers)
    async with http_gateway(cors_allow_origins=["https://a.example"], api_key_hashes=HASHES) as gateway:
        reply = await gateway.call("OPTIONS", "/v1/completions", headers=preflight)
        assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://a.example"
        reply = await gateway.call("OPTIONS", "/v1/completions", headers=preflight | {"origin": "https://b.example"})
        assert reply.status == 400 and "access-control-allow-origin" not in reply.headers
        reply = await gateway.call("GET", "/v1/models", headers=preflight)
        assert reply.status == 401 and reply.headers["access-control-allow-origin"] == "https://a.example"
