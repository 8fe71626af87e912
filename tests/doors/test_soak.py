"""Many mixed requests at once leave nothing behind: no stream, no block, no memory, no open file."""

import asyncio

import psutil
import pytest
from support.http import call
from support.soak import Soak
from support.stack import eventually

from quartet.shared.pb import inference_pb2 as pb

MIB = 2**20
# What a process may grow by after it has warmed up: allocators keep some of what is freed.
MAX_GROWTH = 24 * MIB
MAX_NEW_FILES = 8


def at_rest(line):
    server = line.client.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
    return line.client.at_rest() and server.num_open_streams == server.num_retained_streams == 0


def resources(line):
    """Bytes of memory and the number of open files, by service."""
    processes = {name: psutil.Process(process.pid) for name, process in line.stack.processes.items()}
    return {name: (process.memory_info().rss, process.num_fds()) for name, process in processes.items()}


def soak(line, warm_up, count):
    run = Soak(line.stack.address, line.http, seed=6)
    asyncio.run(run.run(warm_up))
    eventually(lambda: at_rest(line), 30, "not at rest after the warm-up")
    before = resources(line)
    run.counts.clear()
    asyncio.run(run.run(count))
    assert run.counts == {"aborted": count // 3, "broken": count // 10, "good": count - count // 3 - count // 10}
    eventually(lambda: at_rest(line), 30, f"not at rest: {line.client.loads()}")
    assert call(line.http, "GET", "/ready").status == 200
    after = resources(line)
    for name, (memory, files) in after.items():
        print(f"{name}: {before[name][0] / MIB:.1f} -> {memory / MIB:.1f} MiB, {before[name][1]} -> {files} files")
    assert all(after[name][0] - before[name][0] <= MAX_GROWTH for name in after), (before, after)
    assert all(after[name][1] - before[name][1] <= MAX_NEW_FILES for name in after), (before, after)
    assert all(process.poll() is None for process in line.stack.processes.values())


def test_a_hundred_mixed_requests_leave_nothing_behind(line):
    soak(line, 60, 100)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_mixed_requests_leave_nothing_behind(line):
    soak(line, 500, 2000)
