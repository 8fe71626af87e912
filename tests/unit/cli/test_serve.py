"""`quartet serve` with real, tiny child processes in place of the services."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from quartet.services.cli.processes import SignalInbox
from quartet.services.cli.serve import Serve, ServeSettings, child_commands, own_run_dir, split_arguments
from quartet.shared.config import SettingsError

DRIVER = """
import sys
from pathlib import Path
from quartet.services.cli.processes import SignalInbox
from quartet.services.cli.serve import Serve, ServeSettings
from quartet.shared.log import configure_logging
configure_logging("serve", "debug", "json")
run_dir = sys.argv[1]
names = ["gateway", "tokenizer", "scheduler", "executor", "fetch"]
commands = {name: [sys.executable, "-S", f"{run_dir}/{name}.py", name, run_dir] for name in names}
with SignalInbox() as inbox:
    settings = ServeSettings(run_dir=run_dir, drain_timeout=20, stop_timeout=20)
    sys.exit(Serve(settings, commands, run_dir, "127.0.0.1:1", inbox).run())
"""
SERVICE = """
import json, os, signal, sys, time
name, run_dir = sys.argv[1:]
def leave(*_):
    with open(f"{run_dir}/order", "a") as file: file.write(name + "\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
with open(f"{run_dir}/{name}.tmp", "w") as file:
    json.dump({"pid": os.getpid(), "ready": True}, file)
os.utime(f"{run_dir}/{name}.tmp", (time.time() + 1000, time.time() + 1000))
os.rename(f"{run_dir}/{name}.tmp", f"{run_dir}/{name}.status")
"""
SLEEP = "while True: time.sleep(60)\n"


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


class Running:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("gateway", "tokenizer", "scheduler", "executor"):
            self.script(name, SERVICE + SLEEP)
        self.script("fetch", "")
        self.process: subprocess.Popen[str]

    def script(self, name: str, text: str) -> None:
        (self.folder / f"{name}.py").write_text(text)

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(self.folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pid(self, name: str) -> int:
        try:
            return int(json.loads((self.folder / f"{name}.status").read_text())["pid"])
        except OSError:
            return 0

    def all_up(self) -> bool:
        return all(self.pid(name) for name in ("gateway", "tokenizer", "scheduler", "executor"))

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    with contextlib.suppress(ProcessLookupError):
        running.process.kill()
    running.process.wait()
    if running.process.stdout:
        running.process.stdout.close()


def test_a_killed_child_returns_and_sigterm_stops_all_gateway_first(running: Running) -> None:
    running.start()
    wait_for(running.all_up)
    before = running.pid("executor")
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: running.pid("executor") not in (0, before))
    children = running.children()
    running.process.send_signal(signal.SIGTERM)
    output, _ = running.process.communicate(timeout=20)
    assert running.process.returncode == 0, output
    order = (running.folder / "order").read_text().split()
    assert order[0] == "gateway"
    assert sorted(order) == ["executor", "gateway", "scheduler", "tokenizer"]
    assert not any(child.is_running() for child in children)
    assert '"restarting"' in output


def test_children_do_not_outlive_a_killed_serve(running: Running) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux tells children of their parent's death")
    running.start()
    wait_for(running.all_up)
    children = running.children()
    assert len(children) == 4
    running.process.kill()
    running.process.wait()
    wait_for(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))


def test_a_second_signal_forces(running: Running) -> None:
    running.script("gateway", SERVICE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP)
    running.start()
    wait_for(running.all_up)
    children = running.children()
    running.process.send_signal(signal.SIGINT)
    output = ""
    assert running.process.stdout is not None
    for output in running.process.stdout:
        if "stopping" in output:
            break
    time.sleep(0.6)  # sooner, it would count as the same signal
    running.process.send_signal(signal.SIGINT)
    running.process.communicate(timeout=20)
    assert running.process.returncode == 1
    assert not any(child.is_running() for child in children)


def test_a_port_conflict_ends_it_before_the_others_start(running: Running) -> None:
    running.script("gateway", "import sys; print('address already in use', flush=True); sys.exit(1)\n")
    running.start()
    output, _ = running.process.communicate(timeout=20)
    assert running.process.returncode == 1
    assert "address already in use" in output
    assert not running.pid("executor")


def test_refused_settings_of_a_child_end_it_with_code_2(running: Running) -> None:
    running.script("scheduler", "import sys; sys.exit(2)\n")
    running.start()
    output, _ = running.process.communicate(timeout=20)
    assert running.process.returncode == 2
    assert "scheduler does not accept its settings" in output


def test_sigterm_while_fetching_stops_at_once_with_its_children(running: Running) -> None:
    running.script(
        "fetch",
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(running.folder / 'fetching')!r}, 'w').write(str(child.pid))\ntime.sleep(600)\n",
    )
    running.start()
    wait_for(lambda: (running.folder / "fetching").is_file() and (running.folder / "fetching").read_text())
    grandchild = psutil.Process(int((running.folder / "fetching").read_text()))
    running.process.send_signal(signal.SIGTERM)
    running.process.communicate(timeout=20)
    assert running.process.returncode == 0
    wait_for(lambda: not grandchild.is_running() or grandchild.status() == "zombie")


# --- flags and folders ----------------------------------------------------------------------------


def test_service_flags_go_to_their_service() -> None:
    own, services = split_arguments(
        ["--model", "m", "--executor-dtype", "float32", "--gateway-grpc-address=:1", "--scheduler-fast", "--demo"]
    )
    assert own == ["--model", "m", "--demo"]
    assert services["executor"] == ["--dtype", "float32"]
    assert services["gateway"] == ["--grpc-address=:1"]
    assert services["scheduler"] == ["--fast"]


def test_children_get_the_common_flags_that_were_given() -> None:
    arguments = split_arguments(["--config", "q.toml", "--log-level=debug", "--executor-log-level", "error"])
    settings = ServeSettings(model="m", log_level="debug")
    commands = child_commands(settings, arguments, "/r")
    common = ["--model", "m", "--run-dir", "/r", "--log-level", "debug", "--config", "q.toml"]
    assert commands["executor"][3:] == [*common, "--log-level", "error"]
    assert commands["gateway"][3:] == common
    plain = child_commands(ServeSettings(), split_arguments([]), "/r")
    assert "--log-format" not in plain["gateway"]  # a file's or the environment's value stands


def test_a_private_run_dir_is_for_its_owner_and_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/nowhere")
    monkeypatch.setattr("tempfile.tempdir", None)
    with own_run_dir("") as path:
        assert os.stat(path).st_mode & 0o777 == 0o700
        assert len(path) < 60
    assert not os.path.exists(path)


def test_a_run_dir_that_no_service_could_use_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(SettingsError, match=r"run_dir: the socket path .* is longer"),
        own_run_dir(f"{tmp_path}/{'a' * 99}"),
    ):
        pass
    (tmp_path / "serve.lock").mkdir()
    with pytest.raises(SettingsError, match="run_dir: cannot write"), own_run_dir(str(tmp_path)):
        pass


def test_two_serves_do_not_share_a_run_dir(tmp_path: Path) -> None:
    with own_run_dir(str(tmp_path)), pytest.raises(SettingsError, match="in use"), own_run_dir(str(tmp_path)):
        pass
    with own_run_dir(str(tmp_path)):
        pass
    assert tmp_path.is_dir()


def test_what_a_killed_serve_left_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with own_run_dir("") as live:
        stale = Path(f"{live}-stale")
        stale.mkdir()
        (stale / "serve.lock").touch()
        with own_run_dir("") as second:
            assert not stale.exists()
            assert os.path.isdir(live)
            assert second != live


def test_the_user_is_told_of_http_where_it_is_served(capsys, tmp_path):
    settings = ServeSettings(run_dir=str(tmp_path))
    for address, told in (("127.0.0.1:1234", True), ("", False)):
        with SignalInbox() as inbox:
            Serve(settings, {}, str(tmp_path), "127.0.0.1:1", inbox, address)._tell_how_to_connect()
        text = capsys.readouterr().out
        assert ("http://127.0.0.1:1234/v1" in text) == told and "127.0.0.1:1" in text
