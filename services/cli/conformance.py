"""`quartet conformance`: does one service keep the protocol? For whoever writes a service of their own."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quartet.services.cli.processes import die_with_parent
from quartet.shared.config import EXIT_SETTINGS_ERROR
from quartet.shared.conformance import executor, scheduler, tokenizer
from quartet.shared.conformance.report import Report
from quartet.shared.conformance.run import run_scenarios

DESCRIPTION = """Drives one service through its sockets, plays all of its neighbours, and says of each rule of the
wire protocol whether the service keeps it. The service may be written in any language.

A scheduler binds two addresses, which the kit dials as tokenizers and as an executor. A tokenizer and an
executor dial addresses that the kit binds: point the service to them, or let --spawn start it.
One service at a time, and none of its real neighbours on the same addresses.

--spawn starts the service, and starts it anew after a broken rule and where a rule is about restarts. The
addresses are in the command's environment, and {names in braces} in the command are replaced by them:"""
EPILOG = """exit code: 0 every rule looked at holds; 1 a rule is broken, or the service was not there; 2 wrong usage

examples:
  quartet conformance scheduler --spawn 'quartet scheduler'
  quartet conformance scheduler --tokenizer-link tcp://127.0.0.1:7001 --executor-link tcp://127.0.0.1:7002
  quartet conformance tokenizer --spawn './my-tokenizer --gateway {gateway_link} --scheduler {scheduler_link}'
  quartet conformance executor --scheduler-link tcp://0.0.0.0:7002 --json
"""

# Of each service: its scenarios and rules, and each link's name with its socket's and its environment variable.
SERVICES: dict[str, tuple[Any, dict[str, tuple[str, str]]]] = {
    "scheduler": (
        scheduler,
        {
            "tokenizer_link": ("scheduler-tokenizer", "QUARTET_SCHEDULER_TOKENIZER_LINK"),
            "executor_link": ("scheduler-executor", "QUARTET_SCHEDULER_EXECUTOR_LINK"),
        },
    ),
    "tokenizer": (
        tokenizer,
        {
            "gateway_link": ("gateway", "QUARTET_TOKENIZER_GATEWAY_LINKS"),
            "scheduler_link": ("scheduler-tokenizer", "QUARTET_TOKENIZER_SCHEDULER_LINK"),
        },
    ),
    "executor": (executor, {"scheduler_link": ("scheduler-executor", "QUARTET_EXECUTOR_SCHEDULER_LINK")}),
}
TIMEOUTS = {"scheduler": 10.0, "tokenizer": 20.0, "executor": 60.0}


class Service:
    """The service under test, as a process of ours."""

    def __init__(self, command: str, addresses: Mapping[str, str], environ: Mapping[str, str], log: str) -> None:
        self._command = shlex.split(command)
        for name, address in addresses.items():
            self._command = [word.replace(f"{{{name}}}", address) for word in self._command]
        self._environ = {**os.environ, **environ}
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Kills the one before, with everything in its group. Raises OSError when there is no such command."""
        self.stop()
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=die_with_parent(),
            )

    def gone(self) -> str:
        """Why there is no service; empty while there is one."""
        code = self._process.poll() if self._process is not None else None
        return f"it ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}" if code is not None else ""

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    module, links = SERVICES[options.service]
    if options.list:
        for name, function in module.SCENARIOS.items():
            print(f"{name:20} {function.__doc__}")
        return 0
    unknown = [name for name in options.only if name not in module.SCENARIOS]
    if unknown:
        print(f"quartet conformance: no scenario is named {unknown[0]}; --list shows them", file=sys.stderr)
        return EXIT_SETTINGS_ERROR
    folder = tempfile.mkdtemp(prefix="quartet-conformance-")
    addresses = {name: getattr(options, name) or f"ipc://{folder}/{links[name][0]}.sock" for name in links}
    environ = {links[name][1]: address for name, address in addresses.items()} | {"QUARTET_RUN_DIR": folder}
    service = None
    if options.spawn:
        service = Service(options.spawn, addresses, environ, options.service_log)
    try:
        return _run(options, module, addresses, service)
    except OSError as error:
        print(f"quartet conformance: {error}", file=sys.stderr)
        return 1
    finally:
        if service is not None:
            service.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _run(options: argparse.Namespace, module: Any, addresses: Mapping[str, str], service: Service | None) -> int:
    report = Report(module.RULES)
    timeout = options.timeout or TIMEOUTS[options.service]
    restart: Callable[[], None] | None = service.start if service is not None else None
    gone = service.gone if service is not None else None
    if service is not None:
        service.start()
    elif options.service != "scheduler":
        where = ", ".join(f"{name.replace('_', '-')} {address}" for name, address in addresses.items())
        print(f"waiting for the {options.service} to dial: {where}", file=sys.stderr)

    def make_kit() -> Any:
        if options.service == "scheduler":
            return scheduler.SchedulerKit(report, timeout=timeout, gone=gone, **addresses)
        if options.service == "tokenizer":
            return tokenizer.TokenizerKit(report, timeout=timeout, gone=gone, **addresses)
        return executor.ExecutorKit(report, timeout=timeout, gone=gone, restart=restart, **addresses)

    run_scenarios(
        report,
        module.SCENARIOS,
        make_kit,
        only=options.only,
        after_failure=restart or (lambda: None),
        tell=(lambda line: print(line, file=sys.stderr)) if options.verbose else (lambda line: None),
    )
    if options.json:
        print(report.to_json(service=options.service))
    else:
        print("\n".join(report.lines()))
        print(f"{options.service}: {report.summary()}")
    return 0 if report.passed else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    variables = "\n".join(
        f"  {service:10} {{{name}}}  {variable}"
        for service, (_, links) in SERVICES.items()
        for name, (_, variable) in links.items()
    )
    parser = argparse.ArgumentParser(
        "quartet conformance",
        description=f"{DESCRIPTION}\n{variables}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("service", choices=list(SERVICES), help="what is tested")
    add("--spawn", metavar="COMMAND", default="", help="starts the service under test")
    add("--service-log", metavar="FILE", default=os.devnull, help="where the output of a spawned service goes")
    add("--tokenizer-link", metavar="ADDRESS", default="", help="where a scheduler is dialled")
    add("--executor-link", metavar="ADDRESS", default="", help="where a scheduler is dialled")
    add("--gateway-link", metavar="ADDRESS", default="", help="bound for a tokenizer")
    add("--scheduler-link", metavar="ADDRESS", default="", help="bound for a tokenizer or an executor")
    add("--timeout", type=float, default=0.0, help="seconds to wait for what the service owes (default: 10, 20 or 60)")
    add("--only", metavar="SCENARIO,...", default=[], type=lambda text: text.split(","), help="run these alone")
    add("--list", action="store_true", help="list the scenarios and end")
    add("--json", action="store_true", help="one JSON object in place of lines")
    add("--verbose", action="store_true", help="tell on standard error how each scenario ended")
    options = parser.parse_args(argv)
    _, links = SERVICES[options.service]
    for name in ("tokenizer_link", "executor_link", "gateway_link", "scheduler_link"):
        if getattr(options, name) and name not in links:
            parser.error(f"--{name.replace('_', '-')} is no link of a {options.service}")
    if options.service == "scheduler" and not options.spawn and not options.list:
        missing = [name for name in links if not getattr(options, name)]
        if missing:
            parser.error("--tokenizer-link and --executor-link are needed, or --spawn")
    return options
