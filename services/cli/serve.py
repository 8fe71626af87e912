"""`quartet serve`: all four services on this machine, restarted when they die, stopped together."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from quartet.services.cli.processes import Process, SignalInbox
from quartet.services.cli.supervisor import FETCH, GATEWAY, SERVICES, Phase, Supervisor
from quartet.shared.address import DEFAULT_ADDRESS, DEFAULT_HTTP_ADDRESS
from quartet.shared.config import (
    EXIT_SETTINGS_ERROR,
    CommonSettings,
    SettingsError,
    flag_value,
    load_settings,
    peek_setting,
    prepare_run_dir,
)
from quartet.shared.liveness import check, status_path
from quartet.shared.log import configure_logging, get_logger
from quartet.shared.transport import ipc_address

_log = get_logger()

DESCRIPTION = """Runs gateway, tokenizer, scheduler and executor as four processes of this machine and fetches
the model first if need be. A service that dies is started again: the first time at once, then with
back-off; streams wait meanwhile and go on. Ctrl-C or SIGTERM drains: new requests are refused,
running ones end, then everything leaves; a second signal forces."""
EPILOG = """Any setting of a service is a flag here, with the service's name before it; `quartet executor --help`
and the like list them. The same holds for the environment and for the file's sections.

examples:
  quartet serve --demo
  quartet serve --model ./my-model --executor-dtype float32
  quartet serve --gateway-grpc-address 0.0.0.0:50051 --config quartet.toml
"""
DEMO_PROMPT = "Why is the sky blue? Answer in two sentences."
POLL_WHILE_LOADING = 0.1
TELL_WAITING_EVERY = 5.0


class ServeSettings(CommonSettings, frozen=True, kw_only=True):
    run_dir: Annotated[
        str, msgspec.Meta(description="folder of the sockets between services; empty: a private one, removed at exit")
    ] = ""
    demo: Annotated[bool, msgspec.Meta(description="when ready, stream a first answer to the terminal")] = False
    drain_timeout: Annotated[
        float,
        msgspec.Meta(description="seconds that the gateway may take to leave; its own drain ends earlier", gt=0),
    ] = 60.0
    stop_timeout: Annotated[
        float, msgspec.Meta(description="seconds that the other services may take to leave", gt=0)
    ] = 5.0


class ServeArguments(NamedTuple):
    own: list[str]
    services: dict[str, list[str]]


def split_arguments(argv: Sequence[str]) -> ServeArguments:
    """Takes `--<service>-<setting> value` out of serve's own flags, without the service's name."""
    own: list[str] = []
    services: dict[str, list[str]] = {name: [] for name in SERVICES}
    target = own
    for argument in argv:
        if argument.startswith("--"):
            service = next((name for name in SERVICES if argument.startswith(f"--{name}-")), None)
            target = services[service] if service else own
            argument = "--" + argument.removeprefix(f"--{service}-") if service else argument
        target.append(argument)
    return ServeArguments(own, services)


def child_commands(settings: ServeSettings, arguments: ServeArguments, run_dir: str) -> dict[str, list[str]]:
    """One model and one run_dir for all; other common flags as they were given here, a service's own flags last."""
    given = {argument.partition("=")[0]: argument for argument in arguments.own}
    common = ["--model", settings.model, "--run-dir", run_dir]
    if "--log-level" in given:
        common += ["--log-level", settings.log_level]
    if "--log-format" in given:
        common += ["--log-format", settings.log_format]
    if "--otlp-endpoint" in given:
        common += ["--otlp-endpoint", settings.otlp_endpoint]
    if "--config" in given:
        common += ["--config", flag_value(arguments.own, "--config") or ""]
    python = [sys.executable, "-m"]
    commands = {name: [*python, f"quartet.services.{name}", *common, *arguments.services[name]] for name in SERVICES}
    commands[FETCH] = [*python, "quartet.services.cli", "fetch", settings.model]
    return commands


def main(argv: Sequence[str]) -> int:
    arguments = split_arguments(argv)
    settings = load_settings(ServeSettings, "serve", arguments.own, description=DESCRIPTION, epilog=EPILOG)
    configure_logging("serve", settings.log_level, settings.log_format, settings.name)
    config = flag_value(arguments.own, "--config") or os.environ.get("QUARTET_CONFIG", "")
    flags = arguments.services[GATEWAY]
    address = peek_setting("gateway", "grpc_address", flags, os.environ, config)
    http_address = peek_setting("gateway", "http_address", flags, os.environ, config, DEFAULT_HTTP_ADDRESS)
    if peek_setting("gateway", "tls_cert", flags, os.environ, config):
        address = f"grpcs://{address or DEFAULT_ADDRESS}"
        http_address = f"https://{http_address}" if http_address else ""
    try:
        with SignalInbox() as inbox, own_run_dir(settings.run_dir) as run_dir:
            commands = child_commands(settings, arguments, run_dir)
            return Serve(settings, commands, run_dir, address or DEFAULT_ADDRESS, inbox, http_address).run()
    except SettingsError as error:
        print(f"quartet serve: {error}", file=sys.stderr)
        return EXIT_SETTINGS_ERROR


class Serve:
    """Does what the Supervisor decides, and tells the user how far things are."""

    def __init__(
        self,
        settings: ServeSettings,
        commands: dict[str, list[str]],
        run_dir: str,
        address: str,
        inbox: SignalInbox,
        http_address: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._commands = commands
        self._run_dir = run_dir
        self._address = address
        self._inbox = inbox
        self._http_address = http_address
        self._clock = clock
        self._supervisor = Supervisor(clock, settings.drain_timeout, settings.stop_timeout, fetch=FETCH in commands)
        self._processes: dict[str, Process] = {}
        self._demo: Process | None = None
        self._started_at = clock()
        self._told_at = clock()
        self._ready = False

    def run(self) -> int:
        try:
            while True:
                for action in self._supervisor.poll(self._gateway_bound()):
                    self._act(action.kind, action.name)
                if self._supervisor.phase is Phase.DONE:
                    break
                if not self._ready and self._supervisor.phase is Phase.RUNNING:
                    self._watch_loading()
                self._wait()
                self._reap()
        finally:
            for process in (*self._processes.values(), *((self._demo,) if self._demo else ())):
                process.kill()
            self._clear_run_dir()
        if self._supervisor.message:
            _log.error("stopped", reason=self._supervisor.message)
        else:
            _log.info("stopped")
        return self._supervisor.exit_code

    def _clear_run_dir(self) -> None:
        """A killed service leaves its socket and its status."""
        for pattern in ("*.sock", "*.status"):
            for path in Path(self._run_dir).glob(pattern):
                path.unlink(missing_ok=True)

    def _wait(self) -> None:
        timeout = self._supervisor.next_poll()
        loading = self._supervisor.phase is Phase.STARTING or not self._ready
        if loading and self._supervisor.phase in (Phase.STARTING, Phase.RUNNING):
            timeout = POLL_WHILE_LOADING if timeout is None else min(timeout, POLL_WHILE_LOADING)
        if self._inbox.wait(timeout):
            _log.info("stopping", hint="a second signal forces")
            if self._demo:
                self._demo.kill()
            self._supervisor.on_signal()

    def _act(self, kind: str, name: str) -> None:
        if kind == "start":
            self._processes[name] = Process(self._commands[name], quiet=name == FETCH)
            _log.debug("started", child=name, pid=self._processes[name].pid)
        elif kind == "terminate":
            self._processes[name].terminate()
        else:
            _log.warning("killing", child=name)
            self._processes[name].kill()

    def _reap(self) -> None:
        if self._demo and self._demo.poll() is not None:
            self._demo = None
            self._tell_how_to_connect()
        for name, process in list(self._processes.items()):
            returncode = process.poll()
            if returncode is None:
                continue
            del self._processes[name]
            delay = self._supervisor.on_exit(name, returncode)
            if delay is not None:
                _log.warning("restarting", child=name, exit=returncode, delay=delay)

    # --- telling the user -------------------------------------------------------------------------

    def _gateway_bound(self) -> bool:
        """Its status file names its pid, and it writes one only after it has bound its ports."""
        if self._supervisor.phase is not Phase.STARTING or GATEWAY not in self._processes:
            return False
        try:
            status = json.loads(status_path(self._run_dir, GATEWAY).read_bytes())
        except (OSError, ValueError):
            return False
        return bool(status.get("pid") == self._processes[GATEWAY].pid)

    def _watch_loading(self) -> None:
        now = self._clock()
        if check(status_path(self._run_dir, GATEWAY)) is None:
            self._ready = True
            _log.info("ready", seconds=round(now - self._started_at, 1), address=self._address, run_dir=self._run_dir)
            if self._settings.demo:
                self._start_demo()
            else:
                self._tell_how_to_connect()
        elif now - self._told_at >= TELL_WAITING_EVERY:
            self._told_at = now
            waiting = [name for name in SERVICES[1:] if check(status_path(self._run_dir, name)) is not None]
            _log.info("loading", seconds=round(now - self._started_at), waiting_for=", ".join(waiting) or GATEWAY)

    def _start_demo(self) -> None:
        print(f"\n> {DEMO_PROMPT}", flush=True)
        command = [sys.executable, "-m", "quartet.services.cli", "generate", "--address", self._address]
        self._demo = Process([*command, "--temperature", "0", "--max-tokens", "96", "--stats", DEMO_PROMPT])

    def _tell_how_to_connect(self) -> None:
        at = "" if self._address == DEFAULT_ADDRESS else f" --address {self._address}"
        print(
            f"\nQuartet serves {self._settings.model}. gRPC on {self._address} (inference.v1.InferenceService).\n"
            f"{self._about_http()}"
            f"  quartet chat{at}\n"
            f"  quartet generate{at} 'Tell me a joke.'\n"
            "Ctrl-C stops it.\n",
            flush=True,
        )

    def _about_http(self) -> str:
        url = self._http_address if "://" in self._http_address else f"http://{self._http_address}"
        return f"OpenAI's API on {url}/v1, described at {url}/docs.\n" if self._http_address else ""


# --- run_dir --------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_run_dir(given: str) -> Iterator[str]:
    """The run_dir of this serve alone: `given`, refused while another serve has it, or a private one."""
    if given:
        prepare_run_dir(given)
        _check_run_dir(given)
        with _serve_lock(Path(given)) as locked:
            if not locked:
                raise SettingsError(f"run_dir: {given} is in use by another quartet serve")
            yield given
        return
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    base = base if base and len(base) <= 50 and os.access(base, os.W_OK) else "/tmp"
    _sweep(Path(base))
    path = tempfile.mkdtemp(prefix="quartet-serve-", dir=base)
    try:
        with _serve_lock(Path(path)):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _check_run_dir(path: str) -> None:
    """Refuses here what would end every service in turn."""
    try:
        ipc_address(path, "scheduler-tokenizer")  # the longest name of the three
    except ValueError as error:
        raise SettingsError(str(error)) from None
    try:
        (Path(path) / "serve.lock").open("a").close()
    except OSError as error:
        raise SettingsError(f"run_dir: cannot write into {path}: {error.strerror or error}") from None


@contextlib.contextmanager
def _serve_lock(folder: Path) -> Iterator[bool]:
    with (folder / "serve.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def _sweep(base: Path) -> None:
    """Removes what serves that were killed left behind: private folders whose lock nobody holds."""
    for folder in base.glob("quartet-serve-*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid() or not (folder / "serve.lock").is_file():
                continue
            with _serve_lock(folder) as locked:
                if locked:
                    shutil.rmtree(folder, ignore_errors=True)
