"""`quartet serve` as an operator meets it: start, port conflict, death, drain, force, and rest."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import psutil
import pytest
from support.client import Client, Result
from support.stack import eventually, free_port

SMALL = ["--executor-dtype=float32", "--executor-num-threads=1", "--executor-num-blocks=1024"]


class Serve:
    def __init__(self, folder: Path, *flags: str, address: str | None = None) -> None:
        self.address = address or f"127.0.0.1:{free_port()}"
        self.log = folder / "serve.log"
        environ = {k: v for k, v in os.environ.items() if not k.startswith("QUARTET_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "quartet.services.cli", "serve"),
                    *("--gateway-grpc-address", self.address, "--gateway-http-address=", *SMALL, *flags),
                ],
                env=environ,
                stdout=log,
                stderr=log,
            )
        self.client = Client(self.address)

    def children(self) -> dict[str, psutil.Process]:
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                command = child.cmdline()
                for role in ("gateway", "tokenizer", "scheduler", "executor"):
                    if f"quartet.services.{role}" in command:
                        found[role] = child
        return found


@pytest.fixture
def serve(tmp_path, tiny_model):
    """Starts one on the tiny model, or on the real one."""
    started = []

    def start(*flags, real=False, **options):
        model = [] if real else ["--model", str(tiny_model[0]), "--tokenizer-tokenizer=byte"]
        server = Serve(tmp_path, *model, *flags, **options)
        started.append(server)
        return server

    yield start
    for server in started:
        server.client.close()
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def gone(processes):
    return all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes)


def test_every_service_comes_back_and_nothing_outlives_serve(serve):
    server = serve()
    server.client.wait_ready()
    assert sorted(server.children()) == ["executor", "gateway", "scheduler", "tokenizer"]
    expected = server.client.generate("Once upon a time", temperature=0.0, max_tokens=20, ignore_eos=True).text
    for role in ("tokenizer", "scheduler", "executor", "gateway"):
        before = server.children()[role]
        before.kill()
        eventually(lambda role=role, old=before: server.children().get(role, old).pid != old.pid, 20.0)
        server.client.wait_ready()
        result = server.client.generate("Once upon a time", temperature=0.0, max_tokens=20, ignore_eos=True)
        assert result.text == expected
    children = list(server.children().values())
    server.process.kill()
    server.process.wait()
    eventually(lambda: gone(children), 20.0, "processes outlived a supervisor that was killed")


def test_g4_sigterm_drains_and_exits_with_0(serve):
    server = serve()
    server.client.wait_ready()
    results = [Result() for _ in range(5)]
    errors = []
    begun = threading.Barrier(6)

    def follow(result):
        try:
            waiting = True
            for response in server.client.stream("Once upon a time", max_tokens=500, ignore_eos=True):
                result.add(response)
                if waiting and result.choices:
                    waiting = False
                    begun.wait(30)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=follow, args=(result,)) for result in results]
    for thread in threads:
        thread.start()
    begun.wait(30)
    children = list(server.children().values())
    server.process.terminate()
    eventually(lambda: refused_new_work(server.client), 20.0)
    for thread in threads:
        thread.join(60)
    assert not errors and all(len(r.token_ids) == 500 and r.usage is not None for r in results)
    assert server.process.wait(60) == 0
    assert gone(children)


def refused_new_work(client):
    try:
        client.generate("x", max_tokens=1, timeout=2)
    except grpc.RpcError as error:
        return error.code() == grpc.StatusCode.UNAVAILABLE
    return False


def test_g4_a_second_signal_forces(serve, tmp_path):
    run_dir = tmp_path / "run"
    server = serve(f"--run-dir={run_dir}")
    server.client.wait_ready()
    stream = server.client.stream("Once upon a time", max_tokens=4000, ignore_eos=True)
    next(stream)
    children = list(server.children().values())
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.8)  # two signals within half a second count as one
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(20) != 0
    eventually(lambda: gone(children), 10.0)
    left = [path.name for path in run_dir.iterdir() if path.suffix != ".lock"]
    assert not left


def test_g4_sigterm_while_loading(serve):
    server = serve()
    eventually(lambda: "executor" in server.children(), 20.0)
    server.process.terminate()
    assert server.process.wait(30) == 0


def test_g9_a_taken_port_is_told_before_anything_is_loaded(serve):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = serve(address=f"127.0.0.1:{port}")
        assert server.process.wait(120) != 0
        log = server.log.read_text()
        assert str(port) in log and "peer up" not in log


def test_an_immediate_restart_works(serve):
    first = serve(real=True)
    first.client.wait_ready()
    address = first.address
    first.process.kill()
    first.process.wait()
    second = serve(address=address, real=True)
    second.client.wait_ready()
    assert second.client.generate("hello", max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize("flag", ["--executor-dtype=float8", "--scheduler-no-such-setting=1"])
def test_a_wrong_setting_is_refused_by_name(serve, flag):
    server = serve(flag)
    assert server.process.wait(120) == 2
    assert flag.partition("=")[0].removeprefix("--executor-").removeprefix("--scheduler-") in server.log.read_text()


def test_g2_a_frozen_or_dead_executor_is_seen_and_heals(stack, client):
    try:
        stack.signal("executor", signal.SIGSTOP)
        eventually(lambda: not ready(client), 15.0, "a frozen executor went unnoticed")
        stack.signal("executor", signal.SIGCONT)
        client.wait_ready()
        assert client.generate("hello", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
        stack.kill("executor")
        eventually(lambda: not ready(client), 15.0)
        stack.start("executor")
        client.wait_ready()
        assert client.generate("hello", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
    finally:
        # Others use it after us.
        if "executor" in stack.processes:
            stack.signal("executor", signal.SIGCONT)
        else:
            stack.start("executor")


def ready(client):
    try:
        client.wait_ready(0.2)
    except AssertionError:
        return False
    return True


def test_g1_at_rest_the_processes_sleep(stack, client):
    client.generate("hello", max_tokens=2)
    time.sleep(1.0)
    before = stack.cpu_seconds()
    time.sleep(5.0)
    used = {name: seconds - before[name] for name, seconds in stack.cpu_seconds().items()}
    # 10 % of a core is far above rest and far below a loop that spins.
    assert max(used.values()) < 0.5, used
