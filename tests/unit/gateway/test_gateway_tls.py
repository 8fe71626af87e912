"""TLS and client certificates on both protocols."""

import asyncio
import contextlib
import hashlib
import socket
import ssl
from pathlib import Path

import grpc
import pytest
import trustme
import uvloop
from support.gateway_fakes import gateway, in_loop, until
from support.http import parse_reply, request_bytes
from support.http_fakes import http_gateway

from quartet.services.cli.generate import main as generate
from quartet.services.cli.health import main as health
from quartet.services.gateway.credentials import Credentials
from quartet.services.gateway.settings import GatewaySettings
from quartet.shared.client import AsyncClient, Client
from quartet.shared.messages import Submit

BODY = {"model": "tiny", "prompt": "hi"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Paths by name: the server's pair and CA, a client's pair and CA, and those of a stranger."""
    folder = tmp_path_factory.mktemp("tls")
    found = {}
    for owner in ("server", "client", "stranger"):
        authority = trustme.CA()
        pair = authority.issue_cert("127.0.0.1", "localhost")
        for name, blobs in (
            ("ca", [authority.cert_pem]),
            ("cert", pair.cert_chain_pems),
            ("key", [pair.private_key_pem]),
        ):
            path = folder / f"{owner}-{name}.pem"
            path.write_bytes(b"".join(blob.bytes() for blob in blobs))
            found[f"{owner}_{name}"] = str(path)
    return found


def server_settings(files, mutual=False):
    settings = {"tls_cert": files["server_cert"], "tls_key": files["server_key"]}
    return settings | ({"tls_client_ca": files["client_ca"]} if mutual else {})


def client_settings(files, owner=None, ca="server"):
    own = {"tls_cert": files[f"{owner}_cert"], "tls_key": files[f"{owner}_key"]} if owner else {}
    return {"tls_ca": files[f"{ca}_ca"]} | own


def context_of(files, owner=None, ca="server"):
    context = ssl.create_default_context(cafile=files[f"{ca}_ca"])
    if owner:
        context.load_cert_chain(files[f"{owner}_cert"], files[f"{owner}_key"])
    return context


async def over_https(address, context):
    """The reply; raises OSError or ssl.SSLError, or gives None when the server only hangs up."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        try:
            writer.write(request_bytes("POST", "/v1/completions", BODY))
            data = await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    return parse_reply(data) if data else None


async def ask_grpc(address, **options):
    async with AsyncClient(address, **options) as client:
        return await client.generate("hi", timeout=10).text()


@in_loop
async def test_both_protocols_answer_over_tls(files):
    async with gateway(**server_settings(files)) as (address, *_):
        assert await ask_grpc(f"grpcs://{address}", **client_settings(files)) == "abc"
        assert await ask_grpc(address, **client_settings(files)) == "abc"
    async with http_gateway(**server_settings(files)) as served:
        reply = await over_https(served.address, context_of(files))
        assert reply.json()["choices"][0]["text"] == "abc"


@in_loop
async def test_with_a_client_ca_only_its_clients_are_let_in(files):
    async with gateway(**server_settings(files, mutual=True)) as (address, *_):
        assert await ask_grpc(address, **client_settings(files, "client")) == "abc"
        for stranger in (None, "stranger"):
            with pytest.raises(grpc.RpcError) as caught:
                await ask_grpc(address, **client_settings(files, stranger))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    async with http_gateway(**server_settings(files, mutual=True)) as served:
        assert (await over_https(served.address, context_of(files, "client"))).status == 200
        for stranger in (None, "stranger"):
            with pytest.raises(OSError):
                assert await over_https(served.address, context_of(files, stranger)) is None
                raise ConnectionResetError
        assert (await over_https(served.address, context_of(files, "client"))).status == 200


@in_loop
async def test_a_server_that_the_client_does_not_trust_is_told_apart_from_none(files, capsys):
    async with gateway(**server_settings(files)) as (address, *_):
        for arguments in ([], ["--tls-ca", files["stranger_ca"]]):
            flags = ["--address", f"grpcs://{address}", *arguments, "hi"]
            assert await asyncio.to_thread(generate, flags) == 1
            assert f"no TLS with grpcs://{address}" in capsys.readouterr().err


@in_loop
async def test_a_plain_client_of_a_tls_port_fails_cleanly_and_hurts_nobody(files):
    async with gateway(**server_settings(files)) as (address, *_):
        with pytest.raises(grpc.RpcError) as caught:
            await ask_grpc(address)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await ask_grpc(address, **client_settings(files)) == "abc"
    async with http_gateway(**server_settings(files)) as served:
        with pytest.raises((AssertionError, ConnectionError, ValueError, IndexError)):
            await asyncio.wait_for(served.post("/v1/completions", BODY), 10)
        assert (await over_https(served.address, context_of(files))).status == 200


@in_loop
async def test_a_tls_client_of_a_plain_port_fails_cleanly_and_hurts_nobody(files):
    async with gateway() as (address, *_):
        with pytest.raises(grpc.RpcError) as caught:
            await ask_grpc(address, **client_settings(files))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await ask_grpc(f"grpc://{address}") == "abc"
    async with http_gateway() as served:
        with pytest.raises(ssl.SSLError):
            await over_https(served.address, context_of(files))
        assert (await served.post("/v1/completions", BODY)).status == 200


@in_loop
async def test_the_command_line_uses_tls(files, capsys, monkeypatch):
    async with gateway(**server_settings(files, mutual=True)) as (address, *_):
        pair = ["--tls-cert", files["client_cert"], "--tls-key", files["client_key"]]
        flags = ["--address", f"grpcs://{address}", "--tls-ca", files["server_ca"], *pair]
        assert await asyncio.to_thread(generate, [*flags, "hi"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "abc"
        assert await asyncio.to_thread(health, flags) == 0
        assert await asyncio.to_thread(health, flags[:4]) == 1
        for name, value in client_settings(files, "client").items():
            monkeypatch.setenv(f"QUARTET_{name.upper()}", value)
        assert await asyncio.to_thread(health, ["--address", address]) == 0
        assert await asyncio.to_thread(health, ["--address", f"http://{address}"]) == 1


# --- files that change, and who never finishes a handshake -----------------------------------------


def put(files, folder, owner, authority=None):
    """The server's files as `owner` has them, in `folder`; returns their settings."""
    for name in ("cert", "key"):
        (folder / name).write_bytes(Path(files[f"{owner}_{name}"]).read_bytes())
    settings = {"tls_cert": str(folder / "cert"), "tls_key": str(folder / "key")}
    if authority:
        (folder / "ca").write_bytes(Path(files[f"{authority}_ca"]).read_bytes())
        settings["tls_client_ca"] = str(folder / "ca")
    return settings


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_a_new_certificate_is_shown_and_new_authorities_count_without_a_restart(files, tmp_path, runner):
    async def test():
        settings = put(files, tmp_path, "server", "client")
        async with gateway(**settings) as (address, table, _), http_gateway(**settings) as served:
            credentials = [table.face._credentials, served.face._credentials]

            async def works(ca, owner):
                async with asyncio.timeout(20):
                    text = await ask_grpc(f"grpcs://{address}", **client_settings(files, owner, ca))
                    reply = await over_https(served.address, context_of(files, owner, ca))
                return text == "abc" and reply is not None and reply.status == 200

            async def refused(ca, owner):
                with pytest.raises(grpc.RpcError):
                    await ask_grpc(f"grpcs://{address}", **client_settings(files, owner, ca))
                try:
                    return await over_https(served.address, context_of(files, owner, ca)) is None
                except OSError:
                    return True

            assert await works("server", "client")
            # An open connection goes on under what it began with.
            async with AsyncClient(f"grpcs://{address}", **client_settings(files, "client", "server")) as open_client:
                assert await open_client.generate("hi", timeout=10).text() == "abc"
                put(files, tmp_path, "stranger", "server")
                for each in credentials:
                    each.reload_if_changed()
                assert await open_client.generate("hi", timeout=10).text() == "abc"
            assert await works("stranger", "server")
            assert await refused("stranger", "client") and await refused("server", "server")
            # A certificate without its key, garbage or no file at all: the former stays.
            (tmp_path / "cert").write_bytes(Path(files["client_cert"]).read_bytes())
            for each in credentials:
                each.reload_if_changed()
            assert await works("stranger", "server")
            (tmp_path / "cert").unlink()
            for each in credentials:
                each.reload_if_changed()
            assert await works("stranger", "server")
            (tmp_path / "key").write_bytes(Path(files["client_key"]).read_bytes())
            (tmp_path / "cert").write_bytes(Path(files["client_cert"]).read_bytes())
            for each in credentials:
                each.reload_if_changed()
            assert await works("client", "server")

    runner(test())


def test_keys_and_the_certificate_come_and_go_each_by_itself(files, tmp_path):
    hashes = [hashlib.sha256(key.encode()).hexdigest() for key in ("one", "two")]
    keys, cert = tmp_path / "keys", tmp_path / "cert"
    keys.write_text("\n".join(hashes))
    good = Path(files["server_cert"]).read_bytes()
    cert.write_bytes(good)
    settings = server_settings(files) | {"tls_cert": str(cert), "api_key_file": str(keys)}
    credentials = Credentials(GatewaySettings(**settings))
    former = credentials.ssl_context.latest
    cert.write_bytes(b"broken")
    keys.write_text(hashes[1])
    credentials.reload()
    assert credentials.keys.find("Bearer one") is None and credentials.keys.find("Bearer two") is not None
    assert credentials.ssl_context.latest is former
    keys.write_text("")
    cert.write_bytes(good)
    credentials.reload()
    assert credentials.keys.find("Bearer two") is not None
    assert credentials.ssl_context.latest is not former


@in_loop
async def test_who_does_not_finish_a_handshake_is_not_waited_for(files):
    settings = {**server_settings(files), "tls_handshake_timeout": 0.3}
    async with gateway(**settings) as (address, *_), http_gateway(**settings) as served:
        for target in (address, served.address):
            host, _, port = target.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        assert (await over_https(served.address, context_of(files))).status == 200


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_a_slow_reader_over_tls_keeps_its_connection_until_it_has_its_answer(files, runner):
    """The only connection there may be; the answer is more than all buffers below hold together."""
    text = "a" * 16_000_000

    async def test():
        settings = {**server_settings(files), "max_connections": 1, "max_unread_bytes": 2**26}
        async with http_gateway((text,), **settings) as served:
            host, _, port = served.address.rpartition(":")

            def ask():
                plain = socket.socket()
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                plain.settimeout(30)
                plain.connect((host, int(port)))
                slow = context_of(files).wrap_socket(plain, server_hostname=host)
                slow.sendall(request_bytes("POST", "/v1/completions", BODY, {"connection": None}))
                return slow

            def take(slow):
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
                received = bytearray()
                while not received.endswith(b"}"):
                    part = slow.recv(2**20)
                    assert part, len(received)
                    received += part
                return received

            slow = await asyncio.to_thread(ask)
            with slow:
                await until(lambda: served.peer.all(Submit) and served.table.num_open_streams == 0)
                for _ in range(3):
                    assert (await over_https(served.address, context_of(files))).status == 503
                assert text.encode() in await asyncio.to_thread(take, slow)
                # Now it is idle, and makes place as soon as the kernel has heard that all has arrived.
                async with asyncio.timeout(10):
                    while (reply := await over_https(served.address, context_of(files))).status == 503:
                        await asyncio.sleep(0.01)
                assert reply.status == 200

    runner(test())


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tls_cert": "server_cert"}, "--tls-cert needs --tls-key"),
        ({"tls_key": "server_key"}, "--tls-key needs --tls-cert"),
        ({"tls_client_ca": "client_ca"}, "--tls-client-ca needs --tls-cert"),
        ({"tls_cert": "missing", "tls_key": "server_key"}, "--tls-cert: cannot read .*: no such file"),
        ({"tls_cert": "server_cert", "tls_key": "missing"}, "--tls-key: cannot read .*: no such file"),
        ({"tls_cert": "folder", "tls_key": "server_key"}, "--tls-cert: cannot read .*: is a directory"),
        ({"tls_cert": "text", "tls_key": "server_key"}, "--tls-cert: there is no PEM certificate"),
        ({"tls_cert": "server_key", "tls_key": "server_key"}, "--tls-cert: there is no PEM certificate"),
        ({"tls_cert": "empty", "tls_key": "server_key"}, "--tls-cert: there is no PEM certificate"),
        ({"tls_cert": "server_cert", "tls_key": "text"}, "--tls-key: there is no PEM private key"),
        ({"tls_cert": "server_cert", "tls_key": "broken_key"}, "--tls-key: .* cannot be used"),
        ({"tls_cert": "server_cert", "tls_key": "encrypted"}, "--tls-key: .* is encrypted"),
        ({"tls_cert": "server_cert", "tls_key": "client_key"}, "--tls-key: .* not the key of the certificate"),
        (
            {"tls_cert": "server_cert", "tls_key": "server_key", "tls_client_ca": "missing"},
            "--tls-client-ca: cannot read",
        ),
        (
            {"tls_cert": "server_cert", "tls_key": "server_key", "tls_client_ca": "text"},
            "--tls-client-ca: there is no PEM certificate",
        ),
    ],
)
def test_files_that_cannot_be_used_are_refused_at_the_start(files, tmp_path, settings, message):
    for name, content in (
        ("text", "no PEM"),
        ("empty", ""),
        ("broken_key", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"),
        ("encrypted", "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n"),
    ):
        (tmp_path / name).write_text(content)
    found = files | {"folder": str(tmp_path)}
    with pytest.raises(ValueError, match=message):
        GatewaySettings(**{key: found.get(name, str(tmp_path / name)) for key, name in settings.items()})


def test_a_unix_socket_has_no_tls(files):
    with pytest.raises(ValueError, match=r"--tls-cert: .*unix"):
        GatewaySettings(grpc_address="unix:/tmp/q.sock", **server_settings(files))


def test_a_client_refuses_what_contradicts_itself(files):
    with pytest.raises(ValueError, match="without TLS"):
        Client("http://127.0.0.1:1", tls_ca=files["server_ca"])
    with pytest.raises(ValueError, match="belong together"):
        Client("127.0.0.1:1", tls_cert=files["client_cert"])
    with pytest.raises(ValueError, match="tls_ca: cannot read"):
        Client("127.0.0.1:1", tls_ca="/no/such/file")
