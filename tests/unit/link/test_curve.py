"""Keys: files that are refused, and real sockets with the right key, the wrong one and none."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.links import Recorder, ready
from zmq.auth import load_certificate

from quartet.services.cli.keys import main as keys_command
from quartet.shared import curve, transport
from quartet.shared.config import CommonSettings, load_settings
from quartet.shared.curve import KeysError, read_binder_keys, read_dialer_keys
from quartet.shared.link import Identity
from quartet.shared.messages import GetLoads, Hello, Role, encode
from quartet.shared.thread_dialer import ThreadDialer
from quartet.shared.transport import Binder, Dialer


@pytest.fixture
def keys(tmp_path: Path) -> str:
    curve.generate(str(tmp_path / "keys"))
    return str(tmp_path / "keys")


@pytest.fixture
def other_keys(tmp_path: Path) -> str:
    curve.generate(str(tmp_path / "other"))
    return str(tmp_path / "other")


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def complaints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []

    class Log:
        def warning(self, event: str, **details: Any) -> None:
            told.append(f"{event} {details.get('reason', '')}")

        error = exception = info = warning

    monkeypatch.setattr(transport, "_log", Log())
    return told


def binder(address: str, recorder: Recorder, keys: str) -> Binder:
    return Binder(address, Identity(Role.SCHEDULER, "s"), recorder, ready, curve_keys=keys)


def dialer(address: str, recorder: Recorder, keys: str) -> Dialer:
    return Dialer(address, Identity(Role.TOKENIZER, "t"), recorder, ready, curve_keys=keys)


# --- files ----------------------------------------------------------------------------------------


def test_the_command_makes_private_certificates_and_never_overwrites_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "keys"
    assert keys_command(["generate", str(folder)]) == 0
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["client.key", "client.key_secret", "server.key", "server.key_secret"]
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        public, secret = load_certificate(str(path))  # the form that ZeroMQ's own tools read
        assert (secret is not None) == path.name.endswith("_secret") and len(public) == 40
    before = (folder / "server.key_secret").read_bytes()
    assert keys_command(["generate", str(folder)]) == 1
    assert "File exists" in capsys.readouterr().err
    assert (folder / "server.key_secret").read_bytes() == before
    (folder / "server.key_secret").unlink()  # half a set: nothing is left behind
    assert keys_command(["generate", str(folder)]) == 1
    assert not (folder / "server.key_secret").exists() and (folder / "client.key").exists()


def test_each_side_needs_its_own_files_alone(keys: str, tmp_path: Path) -> None:
    folder = Path(keys)
    here, there = tmp_path / "binder", tmp_path / "dialer"
    here.mkdir(), there.mkdir()
    for name, target in (
        ("server.key_secret", here),
        ("client.key", here),
        ("client.key_secret", there),
        ("server.key", there),
    ):
        (folder / name).rename(target / name)
    assert len(read_binder_keys(str(here)).clients) == 1
    assert read_dialer_keys(str(there)).server_key == read_binder_keys(str(here)).public_key
    for read, path in ((read_binder_keys, there), (read_dialer_keys, here)):
        with pytest.raises(KeysError, match=r"curve_keys: cannot read .*quartet keys generate"):
            read(str(path))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.chmod(0o644), "others may read .*chmod 600"),
        (lambda path: path.chmod(0o640), "others may read .*mode 0640"),
        (lambda path: path.write_text("nothing"), "is no key file: it has no line secret-key"),
        (lambda path: path.write_text('secret-key = "' + "x" * 39 + '"'), "no key file"),
        (lambda path: path.write_bytes(os.urandom(4096)), "no key file"),
        (lambda path: path.write_text(path.read_text().replace("public-key", "x")), None),
        (lambda path: path.unlink(), "cannot read .*No such file.*quartet keys generate"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot read .*Is a directory"),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused_by_name(
    keys: str, damage: Any, reason: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(Path(keys) / "server.key_secret")
    if reason is None:  # the public key follows from the secret one
        assert read_binder_keys(keys)
        return
    with pytest.raises(KeysError, match=f"curve_keys: .*{reason}"):
        read_binder_keys(keys)
    with pytest.raises(SystemExit) as exit:
        load_settings(CommonSettings, "scheduler", ["--curve-keys", keys, "--run-dir", keys], {})
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("quartet scheduler: curve_keys: ") and error.count("\n") == 1


def test_a_pair_that_does_not_belong_together_is_refused(keys: str, other_keys: str) -> None:
    mine, other = Path(keys) / "client.key_secret", Path(other_keys) / "client.key_secret"
    public = other.read_text().split("public-key")[1].split("\n")[0]
    mine.write_text(mine.read_text().replace(mine.read_text().split("public-key")[1].split("\n")[0], public))
    with pytest.raises(KeysError, match="do not belong together"):
        read_dialer_keys(keys)


def test_a_binder_without_any_clients_key_is_refused(keys: str) -> None:
    (Path(keys) / "client.key").unlink()
    with pytest.raises(KeysError, match=r"curve_keys: .* has no client\.key"):
        read_binder_keys(keys)


def test_a_service_refuses_bad_keys_before_it_does_anything(tmp_path: Path) -> None:
    for service in ("scheduler", "executor"):
        result = subprocess.run(
            [sys.executable, "-m", f"quartet.services.{service}", "--curve-keys", str(tmp_path / "none")],
            env={**os.environ, "QUARTET_RUN_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 2
        assert f"quartet {service}: curve_keys: cannot read {tmp_path}/none/" in result.stderr


# --- sockets --------------------------------------------------------------------------------------


def test_with_the_right_key_messages_pass_both_ways(address: str, keys: str) -> None:
    async def scenario() -> None:
        left, right = Recorder(), Recorder()
        b, d = binder(address, right, keys), dialer(address, left, keys)
        b.start()
        d.start()
        to_right, to_left = await left.expect("up"), await right.expect("up")
        for i in range(200):
            assert to_right.send(GetLoads(i)) and to_left.send(GetLoads(-i))
        for i in range(200):
            assert await right.expect("message") == GetLoads(i)
            assert await left.expect("message") == GetLoads(-i)
        b.close()  # and a new binder with the same keys is found
        await left.expect("down")
        b = binder(address, right, keys)
        await b.start_when_free()
        await left.expect("up")
        b.close()
        d.close()

    asyncio.run(scenario())


def test_the_threaded_dialer_has_keys_too(address: str, keys: str) -> None:
    async def scenario() -> None:
        left, right = Recorder(), Recorder()
        b = binder(address, right, keys)
        b.start()
        thread = ThreadDialer(address, Identity(Role.EXECUTOR, "e"), left, ready, curve_keys=keys)
        thread.start()
        await right.expect("up")
        # What is sent before this side has the answer goes to nobody.
        await left.expect("up")
        thread.send(GetLoads(1))
        assert await right.expect("message") == GetLoads(1)
        thread.close()
        b.close()

    asyncio.run(scenario())


def test_one_process_may_have_several_links_with_keys_of_their_own(keys: str, other_keys: str) -> None:
    async def scenario() -> None:
        for folder in (keys, other_keys):
            right = Recorder()
            b = binder("tcp://127.0.0.1:*", right, folder)
            b.start()
            links.append(b)
            assert b._socket is not None
            d = dialer(b._socket.socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0"), Recorder(), folder)
            d.start()
            links.append(d)
            await right.expect("up")
        for link in links:
            link.close()

    links: list[Any] = []
    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("binders", "dialers", "expected"),
    [
        ("right", "other client", "none of the client"),
        ("right", "other server", "another server.key"),
        ("right", "none", "has no key"),
        ("none", "right", "speaks with keys"),
    ],
)
def test_without_the_right_key_nothing_passes_and_the_right_one_heals_it(
    address: str, keys: str, other_keys: str, binders: str, dialers: str, expected: str, complaints: list[str]
) -> None:
    mixed = Path(keys).parent / "mixed"
    mixed.mkdir()
    for name, folder in (("client.key_secret", dialers == "other client"), ("server.key", dialers == "other server")):
        source = Path(other_keys if folder else keys) / name
        (mixed / name).write_text(source.read_text())
        (mixed / name).chmod(0o600)

    async def scenario() -> None:
        left, right, good = Recorder(), Recorder(), Recorder()
        b = binder(address, right, keys if binders == "right" else "")
        d = dialer(address, left, "" if dialers == "none" else str(mixed))
        b.start()
        d.start()
        frames: list[list[bytes]] = []
        b._on_frames = frames.append  # type: ignore[method-assign, assignment]
        for _ in range(200):
            if any(expected in told for told in complaints) and len(complaints) >= 2:
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)  # a hundred attempts, were they not slowed down
        assert not right.seen and not left.seen and not frames
        assert any(expected in told for told in complaints), complaints
        assert len(complaints) == 2, "each side says it once"
        d.close()
        b.close()
        b, d = binder(address, right, keys), dialer(address, good, keys)
        await b.start_when_free()
        d.start()
        await good.expect("up")
        b.close()
        d.close()

    asyncio.run(scenario())


def test_a_dialer_finds_a_binder_whose_keys_were_put_right(address: str, keys: str, other_keys: str) -> None:
    async def scenario() -> None:
        left, right = Recorder(), Recorder()
        wrong = binder(address, right, other_keys)
        d = dialer(address, left, keys)
        wrong.start()
        d.start()
        await asyncio.sleep(0.3)
        assert not left.seen
        wrong.close()
        b = binder(address, right, keys)
        await b.start_when_free()
        await left.expect("up")
        b.close()
        d.close()

    asyncio.run(scenario())


def test_strangers_without_a_session_change_nothing(address: str, keys: str) -> None:
    """A client of plain sockets that knows no key, at a link whose peer goes on meanwhile."""

    async def scenario() -> None:
        left, right = Recorder(), Recorder()
        b, d = binder(address, right, keys), dialer(address, left, keys)
        b.start()
        d.start()
        to_right = await left.expect("up")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(address)
        stranger.send_multipart([b"12345678", encode(Hello(1, 1, Role.TOKENIZER, "stranger", 1))])
        raw = socket.create_connection(address.removeprefix("tcp://").split(":"))
        raw.sendall(os.urandom(4096))
        for i in range(100):
            to_right.send(GetLoads(i))
            assert await right.expect("message") == GetLoads(i)
        assert right.seen.count("up") == 1 and b.frames_dropped == 0
        raw.close()
        stranger.close()
        context.term()
        b.close()
        d.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("where", "warns"),
    [
        ("tcp://127.0.0.1:*", False),
        ("tcp://localhost:*", False),
        ("tcp://[::1]:*", False),
        ("tcp://0.0.0.0:*", True),
        ("tcp://*:*", True),
        ("tcp://[::]:*", True),
    ],
)
def test_a_link_that_is_open_to_the_network_says_so(where: str, warns: bool, complaints: list[str], keys: str) -> None:
    async def scenario() -> None:
        for folder in ("", keys):
            b = binder(where, Recorder(), folder)
            try:
                b.start()
            except OSError:
                pytest.skip(f"this host has no {where}")
            b.close()

    asyncio.run(scenario())
    assert len(complaints) == warns and all("set curve_keys" in told for told in complaints)


def test_ipc_links_take_no_keys(tmp_path: Path, keys: str) -> None:
    async def scenario() -> None:
        left, right = Recorder(), Recorder()
        where = transport.ipc_address(tmp_path, "x")
        b, d = binder(where, right, keys), dialer(where, left, "")
        b.start()
        d.start()
        await right.expect("up")
        b.close()
        d.close()

    asyncio.run(scenario())
