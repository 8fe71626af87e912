"""The overrides that bring certificates and keys of one's own, as a user puts them together."""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from support import http as plain_http
from support.client import Client as PlainClient
from support.compose import PROJECT, SERVICES, Compose, docker
from support.stack import eventually

from quartet.shared import curve
from quartet.shared.client import Client

pytestmark = pytest.mark.docker

PROMPT = "The capital of France is"
TLS = "docker/compose.tls.yml"
MTLS = "docker/compose.mtls.yml"


def give(folder: Path) -> None:
    """As the documents say: group 1000 may read the files, and nobody else."""
    for path in folder.iterdir():
        path.chmod(0o640)
    folder.chmod(0o750)
    mount = f"{folder}:/given"
    command = ["run", "--rm", "--user", "0", "--volume", mount, "--entrypoint", "chgrp"]
    docker(*command, f"{PROJECT}-scheduler", "-R", "1000", "/given")


@contextlib.contextmanager
def gateway(line: Compose, *more: str, **environ: str) -> Iterator[None]:
    line("up", "-d", "--wait", "--no-deps", "gateway", more=more, **environ)
    try:
        yield
    finally:
        line("up", "-d", "--wait", "--no-deps", "gateway")


def write(folder: Path, authority: trustme.CA, name: str) -> tuple[str, str]:
    """A certificate for this host and its key, in place."""
    pair = authority.issue_cert("127.0.0.1", "localhost")
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    key.write_bytes(pair.private_key_pem.bytes())
    return str(cert), str(key)


def complete(line: Compose, context: ssl.SSLContext) -> tuple[int, int]:
    """Status of a completion over HTTPS, and the serial number of the certificate that the gateway showed."""
    connection = http.client.HTTPSConnection("127.0.0.1", line.http_port, timeout=60, context=context)
    with contextlib.closing(connection):
        body = '{"prompt": "Hello", "max_tokens": 2}'
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        status = connection.getresponse().status
        shown = connection.sock.getpeercert() if isinstance(connection.sock, ssl.SSLSocket) else None
        return status, int(str((shown or {})["serialNumber"]), 16)


@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mtls"])
def test_tls_on_both_protocols(line: Compose, tmp_path: Path, mutual: bool) -> None:
    authority, clients = trustme.CA(), trustme.CA()
    files = tmp_path / "server"
    files.mkdir()
    cert, key = write(files, authority, "tls")
    (files / "clients.crt").write_bytes(clients.cert_pem.bytes())
    give(files)
    (ca := tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    own = write(tmp_path, clients, "client")
    more = (TLS, MTLS) if mutual else (TLS,)
    environ = {"TLS_CERT_FILE": cert, "TLS_KEY_FILE": key, "TLS_CLIENT_CA_FILE": str(files / "clients.crt")}
    with gateway(line, *more, **environ):
        context = ssl.create_default_context(cafile=str(ca))
        with Client(f"grpcs://{line.address}", tls_ca=str(ca), tls_cert=own[0], tls_key=own[1]) as client:
            chunks = list(client.generate(PROMPT, temperature=0, max_tokens=8))
        assert sum(len(chunk.token_ids) for chunk in chunks) == 8
        if mutual:
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
                complete(line, context)
            context.load_cert_chain(*own)
        status, serial = complete(line, context)
        assert status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            complete(line, ssl.create_default_context())
        with pytest.raises((OSError, AssertionError, ValueError, IndexError)):
            assert plain_http.post(line.http_address, "/v1/completions", {"prompt": "x"}).status == 200
        assert "PRIVATE KEY" not in str(line.inspect("gateway"))
        # Renewed in place: no container is made anew.
        before = line.inspect("gateway")["Id"]
        write(files, authority, "tls")
        eventually(lambda: complete(line, context)[1] != serial, 60, "the new certificate was not taken up")
        assert line.inspect("gateway")["Id"] == before


def test_links_with_keys_of_ones_own(line: Compose, client: PlainClient, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    curve.generate(str(folder))
    give(folder)
    expected = client.generate(PROMPT, max_tokens=12, temperature=0.0)
    try:
        line("up", "-d", "--wait", more=("docker/compose.keys.yml",), CURVE_KEYS=str(folder))
        for service in SERVICES:
            listed = line.python(service, "import os; print(*sorted(os.listdir('/run/secrets')))").stdout.split()
            binds = service in ("gateway", "scheduler")
            assert listed == (["client.key", "server.key_secret"] if binds else ["client.key_secret", "server.key"])
        client.wait_ready(120)
        assert client.generate(PROMPT, max_tokens=12, temperature=0.0).text == expected.text
        # Who still has the keys that compose made is a stranger now.
        name = f"{PROJECT}-stranger"
        command = ["run", "--detach", "--name", name, "--network", f"{PROJECT}_links"]
        command += ["--volume", f"{line.volume('dialer-keys')}:/etc/quartet/keys:ro"]
        command += ["--volume", f"{line.volume('models')}:/var/cache/quartet:ro", f"{PROJECT}-executor", "executor"]
        command += ["--curve-keys", "/etc/quartet/keys", "--scheduler-link", "tcp://scheduler:5703"]
        docker(*command)
        try:
            eventually(lambda: "connection refused" in docker("logs", name).stderr, 120)
            assert "peer up" not in docker("logs", name).stderr
        finally:
            print(docker("logs", name).stderr[-2000:])
            docker("rm", "--force", name)
    finally:
        line("up", "-d", "--wait")
    client.wait_ready(120)
    assert client.generate(PROMPT, max_tokens=12, temperature=0.0).text == expected.text
