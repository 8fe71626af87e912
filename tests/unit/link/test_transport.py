"""Real sockets: what a link does when processes come, go and queue."""

import asyncio
import json
import os
import threading
import time

import pytest
from support.links import Recorder, ready

from quartet.shared.link import HEARTBEAT_INTERVAL, Identity, Status
from quartet.shared.liveness import StatusFile, check
from quartet.shared.messages import GetLoads, Role
from quartet.shared.thread_dialer import ThreadDialer
from quartet.shared.transport import AddressInUse, Binder, Dialer, ipc_address


def binder(address, recorder, **options):
    return Binder(address, Identity(Role.SCHEDULER, "s"), recorder, ready, **options)


def dialer(address, recorder, name="t"):
    return Dialer(address, Identity(Role.TOKENIZER, name), recorder, ready)


async def found_by(left, address, right):
    """A binder once the dialer of `left` is up with it, and its peer."""
    b = binder(address, right)
    b.start()
    peer = await right.expect("up")
    assert (await left.next())[0] == "up"
    return b, peer


@pytest.fixture(params=["ipc", "tcp"])
def address(request, tmp_path, unused_port):
    return ipc_address(tmp_path, "link") if request.param == "ipc" else f"tcp://127.0.0.1:{unused_port}"


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_messages_pass_both_ways_and_a_new_binder_is_found(address):
    async def scenario():
        left, right = Recorder(), Recorder()
        d = dialer(address, left)
        d.start()  # the dialer may come first
        b = binder(address, right)
        b.start()
        to_right, to_left = await left.expect("up"), await right.expect("up")
        for i in range(1000):
            assert to_right.send(GetLoads(i)) and to_left.send(GetLoads(-i))
        for i in range(1000):
            assert await right.expect("message") == GetLoads(i)
            assert await left.expect("message") == GetLoads(-i)
        b.close()
        assert await left.expect("down") is to_right
        right = Recorder()
        b = binder(address, right)
        b.start()
        assert (await left.expect("up")).incarnation == b.link.identity.incarnation
        await right.expect("up")
        b.close()
        d.close()

    asyncio.run(scenario())


def test_the_binder_sees_a_dialer_go_within_milliseconds(address):
    async def scenario():
        left, right = Recorder(), Recorder()
        b, d = binder(address, right), dialer(address, left)
        b.start()
        d.start()
        peer = await right.expect("up")
        await left.expect("up")
        d.close()
        gone_at = time.monotonic()
        assert await right.expect("down") is peer
        assert time.monotonic() - gone_at < 2.0  # heartbeats alone would take 2.4 s
        b.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("leaver", ["binder", "dialer"])
def test_what_was_sent_last_arrives_before_the_end(address, leaver):
    async def scenario():
        left, right = Recorder(), Recorder()
        b, d = binder(address, right), dialer(address, left)
        await b.start_when_free()  # ZeroMQ frees the port of the round before in its own time
        d.start()
        to_right, to_left = await left.expect("up"), await right.expect("up")
        speaker, listener, leaving = (to_left, left, b) if leaver == "binder" else (to_right, right, d)
        for i in range(300):
            assert speaker.send(GetLoads(i))
        leaving.close()
        for i in range(300):
            assert await listener.next() == ("message", GetLoads(i))
        await listener.expect("down")
        (d if leaver == "binder" else b).close()

    for _ in range(5):
        asyncio.run(scenario())


def test_a_beat_that_finds_nobody_does_not_come_before_what_has_arrived(address):
    async def scenario():
        left, right = Recorder(), Recorder()
        b, d = binder(address, right), dialer(address, left)
        b.start()
        d.start()
        to_right, to_left = await left.expect("up"), await right.expect("up")
        for i in range(2000):
            assert to_right.send(GetLoads(i))
        d.close()
        # The loop reads nothing meanwhile.
        deadline = time.monotonic() + 20
        while b.send(to_left.route, to_left.session, b""):
            assert time.monotonic() < deadline, "the binder did not notice the end of the connection"
            time.sleep(0.001)
        b._tick()
        for i in range(2000):
            assert await right.next() == ("message", GetLoads(i))
        await right.expect("down")
        b.close()

    asyncio.run(scenario())


def test_two_dialers_of_one_name_live_side_by_side(address):
    async def scenario():
        left, right = Recorder(), Recorder()
        b, one, two = binder(address, right), dialer(address, left), dialer(address, left)
        for link in (b, one, two):
            link.start()
        await right.expect("up")
        await right.expect("up")
        assert len(b.peers) == 2
        for link in (b, one, two):
            link.close()

    asyncio.run(scenario())


def test_a_second_bind_is_refused_and_can_wait(address):
    async def scenario():
        first, second = binder(address, Recorder()), binder(address, Recorder())
        first.start()
        with pytest.raises(AddressInUse):
            second.start()
        waiting = asyncio.ensure_future(second.start_when_free())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        first.close()
        await asyncio.wait_for(waiting, 5)
        second.close()

    asyncio.run(scenario())


def test_the_threaded_dialer_speaks_the_same(tmp_path):
    address = ipc_address(tmp_path, "link")

    async def scenario():
        left, right = Recorder(), Recorder()
        status = StatusFile(tmp_path / "executor.status")
        thread = ThreadDialer(address, Identity(Role.EXECUTOR, "e"), left, ready, status_file=status)
        thread.start()
        b, peer = await found_by(left, address, right)
        for i in range(3000):
            peer.send(GetLoads(i))
            thread.send(GetLoads(i))
        for i in range(3000):
            assert (await left.next()) == ("message", GetLoads(i))
            assert await right.expect("message") == GetLoads(i)
        assert check(tmp_path / "executor.status") is None
        await asyncio.to_thread(thread.close)
        await right.expect("down")
        b.close()

    asyncio.run(scenario())


def test_a_dialer_whose_owner_reads_gets_everything_and_beats_meanwhile(tmp_path):
    address = ipc_address(tmp_path, "link")
    done = threading.Event()

    async def scenario():
        left, right = Recorder(), Recorder()
        dialer = ThreadDialer(address, Identity(Role.EXECUTOR, "e"), left, ready, attended=True)
        dialer.start()

        def attend():
            while not done.is_set():
                dialer.read()
                dialer.wait()

        owner = threading.Thread(target=attend)
        owner.start()
        b, peer = await found_by(left, address, right)
        # More than is read at once, as when the owner has computed for long.
        for i in range(3000):
            peer.send(GetLoads(i))
        for i in range(3000):
            assert (await left.next()) == ("message", GetLoads(i))
        for i in range(50):
            dialer.send(GetLoads(i))
            assert await right.expect("message") == GetLoads(i)
            peer.send(GetLoads(i))
            assert (await left.next()) == ("message", GetLoads(i))
        done.set()
        dialer.wake()
        await asyncio.to_thread(owner.join)
        # The owner reads no more: still nobody is taken for dead.
        await asyncio.sleep(4 * HEARTBEAT_INTERVAL)
        assert peer.alive and dialer.peer is not None and dialer.peer.alive
        await asyncio.to_thread(dialer.close)
        await right.expect("down")
        b.close()

    asyncio.run(scenario())


def test_a_status_file_tells_stale_from_ready(tmp_path):
    path = tmp_path / "x.status"
    assert "no status" in check(path)
    StatusFile(path).write(Status(1, 0, False))
    assert check(path) == "not ready"
    StatusFile(path).write(Status(1, 0, True))
    assert check(path) is None
    assert "silent" in check(path, now=time.time() + 60)


def test_a_beat_touches_the_status_file_and_another_process_of_the_role_may_replace_it(tmp_path):
    path = tmp_path / "x.status"
    status_file = StatusFile(path)
    status_file.write(Status(1, 0, True))
    inode = path.stat().st_ino
    os.utime(path, (0, 0))
    assert "silent" in check(path)
    status_file.write(Status(2, 1, True))
    assert check(path) is None
    assert path.stat().st_ino == inode

    other = tmp_path / "other"
    other.write_text(json.dumps({"pid": 1, "ready": False}))
    other.replace(path)
    assert check(path) == "not ready"
    status_file.write(Status(3, 0, True))
    assert check(path) is None
    path.unlink()
    status_file.write(Status(4, 0, True))
    assert json.loads(path.read_text())["pid"] == os.getpid()


def test_an_ipc_path_that_is_too_long_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="run_dir"):
        ipc_address(tmp_path / ("x" * 120), "link")


def test_a_clean_end_leaves_no_socket_behind(tmp_path):
    async def scenario():
        b = binder(ipc_address(tmp_path, "link"), Recorder())
        b.start()
        assert (tmp_path / "link.sock").exists()
        b.close()

    asyncio.run(scenario())
    assert not (tmp_path / "link.sock").exists()
