"""The gateway as a process: addresses, signals, exit codes."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import msgspec
import pytest
from support.gateway_fakes import MODEL

from quartet.services.gateway.bind import is_reached_from_elsewhere
from quartet.services.gateway.settings import GatewaySettings
from quartet.shared.client import Client, InferenceError
from quartet.shared.messages import (
    Accepted,
    Attach,
    Attached,
    ChoicePast,
    Delta,
    Deltas,
    FinishReason,
    Role,
    Submit,
    TokensPrompt,
)
from quartet.shared.thread_dialer import ThreadDialer
from quartet.shared.transport import Identity, Status, ipc_address


class Tokenizer:
    """Accepts each request and says one token; the rest when it is told to."""

    def __init__(self, run_dir):
        self.submits = []
        self.attached = threading.Event()
        identity = Identity(Role.TOKENIZER, "t", model=MODEL, tokenizer_fingerprint="tok")
        self.dialer = ThreadDialer(ipc_address(run_dir, "gateway"), identity, self, lambda: Status(0, 0, True))
        self.dialer.start()

    def on_up(self, peer): ...
    def on_down(self, peer, reason): ...
    def on_status(self, peer): ...

    def on_message(self, peer, message):
        if isinstance(message, Submit):
            self.submits.append(message)
            peer.send(Accepted(message.request_id, message.attempt, [1]))
            if not message.choices[0].output_token_ids:
                peer.send(Deltas([Delta(message.request_id, message.attempt, 0, 0, [7], "a", 1)]))
        elif isinstance(message, Attach):
            submit = self.submits.pop()
            submit = msgspec.structs.replace(
                submit, attempt=message.attempt, prompt=TokensPrompt([1]), choices=[ChoicePast(0, [7], 1)]
            )
            self.submits.append(submit)
            peer.send(Attached(message.request_id, message.attempt, submit))
            self.attached.set()

    def finish(self):
        for submit in self.submits:
            last = Delta(submit.request_id, submit.attempt, 0, 1, [8], "b", 2, finish_reason=FinishReason.LENGTH)
            self.dialer.send(Deltas([last]))


def start(run_dir, address, *flags):
    command = [sys.executable, "-m", "quartet.services.gateway", "--run-dir", str(run_dir), "--grpc-address", address]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QUARTET_")}
    environ["QUARTET_GATEWAY_HTTP_ADDRESS"] = ""
    return subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True, env=environ)


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/grpc.sock"


@pytest.fixture
def running(tmp_path, address):
    started = []

    def run(*flags):
        process = start(tmp_path, address, *flags)
        started.append(process)
        tokenizer = Tokenizer(tmp_path)
        started.append(tokenizer)
        return process, tokenizer

    yield run
    for item in started:
        if isinstance(item, Tokenizer):
            item.dialer.close()
        else:
            item.kill()
            item.communicate()


def first_chunk(client, **options):
    generation = client.generate("hi", **options)
    return generation, next(generation)


def test_sigterm_lets_running_streams_end(running, address):
    process, tokenizer = running()
    with Client(address) as client, Client(address) as other:
        client.wait_ready(20)
        generation, chunk = first_chunk(client)
        assert chunk.text == "a"
        process.send_signal(signal.SIGTERM)
        wait_for_draining(other)
        with pytest.raises(InferenceError, match="shutting down"):
            other.generate("x").text()
        tokenizer.finish()
        assert generation.text() == "b"
        assert process.wait(10) == 0


def wait_for_draining(client):
    deadline = time.monotonic() + 10
    while not client.server_info().draining:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sighup_reads_the_keys_again(running, tmp_path, address):
    keys = [hashlib.sha256(name).hexdigest() for name in (b"first", b"second")]
    path = tmp_path / "keys"
    path.write_text(keys[0])
    process, _ = running("--api-key-file", str(path))
    with Client(address, api_key="first") as first, Client(address, api_key="second") as second:
        first.wait_ready(20)
        with pytest.raises(InferenceError, match="API key"):
            second.server_info()
        path.write_text(keys[1])
        process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 10
        while True:
            try:
                second.server_info()
                break
            except InferenceError:
                assert time.monotonic() < deadline
        with pytest.raises(InferenceError, match="API key"):
            first.server_info()


def test_sighup_ends_nothing_where_there_is_nothing_to_read(running, address):
    process, _ = running()
    with Client(address, reconnect_timeout=0) as client:
        client.wait_ready(20)
        process.send_signal(signal.SIGHUP)
        client.server_info()
        assert process.poll() is None


def test_streams_that_do_not_end_are_ended(running, address):
    process, _ = running("--drain-timeout", "0.1")
    with Client(address, reconnect_timeout=0) as client:
        client.wait_ready(20)
        generation, _ = first_chunk(client)
        process.send_signal(signal.SIGINT)
        with pytest.raises(InferenceError, match="stopped") as caught:
            generation.text()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert process.wait(10) == 0


def test_a_second_signal_ends_it_at_once(running, address):
    process, _ = running("--drain-timeout", "600")
    with Client(address, reconnect_timeout=0) as client:
        client.wait_ready(20)
        generation, _ = first_chunk(client)
        process.send_signal(signal.SIGTERM)
        wait_for_draining(client)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 1
        generation.close()


def test_a_second_gateway_on_the_address_says_so(running, tmp_path, address):
    running()
    with Client(address) as client:
        client.wait_ready(20)
        second = start(tmp_path / "other", address)
        _, errors = second.communicate(timeout=20)
        assert second.returncode == 1 and "another server" in errors
        assert "Traceback" not in errors and not (tmp_path / "other" / "gateway.sock").exists()
        third = start(tmp_path, f"unix:{tmp_path}/third.sock")
        _, errors = third.communicate(timeout=20)
        assert third.returncode == 1 and "tokenizer_link" in errors and "Traceback" not in errors
        assert client.generate("x").request_id == ""


def test_a_client_outlives_a_gateway_that_is_killed(running, tmp_path, address):
    process, tokenizer = running()
    with Client(address) as client:
        client.wait_ready(20)
        generation, chunk = first_chunk(client)
        process.kill()
        process.wait(10)
        second = start(tmp_path, address)
        try:
            rest = []
            reader = threading.Thread(target=lambda: rest.append(generation.text()))
            reader.start()
            assert tokenizer.attached.wait(20)
            tokenizer.finish()
            reader.join(20)
            assert chunk.text + rest[0] == "ab" and generation.usage.completion_tokens == 2
        finally:
            second.kill()
            second.communicate()


def test_a_taken_port_is_one_line_in_the_log(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        process = start(tmp_path, f"127.0.0.1:{other.getsockname()[1]}", "--log-format", "json")
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert json.loads(line)["event"].endswith("address already in use")
    assert not (tmp_path / "gateway.sock").exists()


@pytest.mark.parametrize(
    ("address", "flags", "warned"),
    [
        ("0.0.0.0:0", (), ["0.0.0.0:0"]),
        ("[::]:0", ("--http-address", "0.0.0.0:0"), ["[::]:0", "0.0.0.0:0"]),
        ("0.0.0.0:0", ("--api-key-hashes", "a" * 64), None),
        ("localhost:0", ("--http-address", "127.0.0.1:0"), None),
    ],
)
def test_who_listens_to_the_world_without_keys_is_warned(tmp_path, address, flags, warned):
    process = start(tmp_path, address, "--log-format", "json", *flags)
    with process:
        lines = []
        for line in process.stderr:
            lines.append(json.loads(line))
            if lines[-1]["event"] == "serving":
                process.terminate()
    assert process.returncode == 0 and "serving" in [line["event"] for line in lines]
    warnings = [line for line in lines if line["level"] == "warning"]
    if warned is None:
        assert not warnings
    else:
        assert [line["addresses"] for line in warnings] == [warned] and "API keys" in warnings[0]["event"]


@pytest.mark.parametrize("address", ["unix:/a/b", "127.0.0.1:1", "127.1.2.3:1", "localhost:1", "[::1]:1"])
def test_addresses_that_only_this_host_reaches(address):
    assert not is_reached_from_elsewhere(address)


def test_wrong_settings_are_named(tmp_path):
    process = start(tmp_path, "127.0.0.1:0", "--max-n", "0")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2 and "max-n" in errors


@pytest.mark.parametrize("bad", ["127.0.0.1:99999", "localhost", "::1:50051", ":50051", "127.0.0.1:x"])
def test_addresses_that_are_none(bad):
    with pytest.raises(ValueError, match="grpc-address"):
        GatewaySettings(grpc_address=bad)


@pytest.mark.parametrize("good", ["127.0.0.1:0", "[::]:50051", "host.name:1", "unix:/a/b"])
def test_addresses(good):
    assert GatewaySettings(grpc_address=good).grpc_address == good
