"""`quartet`: the one console command."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

from quartet.shared.config import EXIT_SETTINGS_ERROR, version

HELP = """usage: quartet COMMAND [...]

A server for large language models made of four services.

run everything on this machine:
  serve      gateway, tokenizer, scheduler and executor under one supervisor

use a running server:
  chat       talk with the model in the terminal
  generate   stream one answer to standard output
  bench      load it, or any server with OpenAI's API, and print how fast it answers
  top        watch it: throughput, KV blocks, latencies, services
  trace      record its steps and requests for Perfetto

run one service by itself (containers, several machines):
  gateway    takes clients' requests, over gRPC and HTTP
  tokenizer  text to tokens and back
  scheduler  plans every step
  executor   runs the model

tools:
  fetch      download a model into the cache and print where it is
  keys       make the keys of links between hosts, and API keys
  conformance  check that a service keeps the wire protocol (for services of your own)
  health     exit with 0 when a service is ready (for container health checks)

Each command explains itself: quartet COMMAND --help. First steps:
  quartet serve --demo
  quartet chat
"""

# A package of each service's extra that is missing when the extra is not installed.
SERVICES = {"gateway": "grpc", "tokenizer": "tokenizers", "scheduler": "zmq", "executor": "torch"}

COMMANDS = ("serve", "chat", "generate", "fetch", "health", "keys", "conformance", "bench", "top", "trace")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if command in ("-V", "--version"):
        print(f"quartet {version()}")
        return 0
    if command in SERVICES:
        return _become(command, arguments[1:])
    if command not in COMMANDS:
        print(f"quartet: unknown command {command}; quartet --help lists them", file=sys.stderr)
        return EXIT_SETTINGS_ERROR
    try:
        return _run(command, arguments[1:])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left (`quartet generate … | head`): keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(command: str, argv: Sequence[str]) -> int:
    # Imported when asked for: health runs every few seconds in each container and needs little.
    if command == "serve":
        from quartet.services.cli.serve import main as run
    elif command == "chat":
        from quartet.services.cli.chat import main as run
    elif command == "generate":
        from quartet.services.cli.generate import main as run
    elif command == "fetch":
        from quartet.services.cli.fetch import main as run
    elif command == "keys":
        from quartet.services.cli.keys import main as run
    elif command == "conformance":
        from quartet.services.cli.conformance import main as run
    elif command == "bench":
        from quartet.services.cli.bench.command import main as run
    elif command == "top":
        from quartet.services.cli.top import main as run
    elif command == "trace":
        from quartet.services.cli.trace import main as run
    else:
        from quartet.services.cli.health import main as run
    return run(argv)


def _become(service: str, argv: Sequence[str]) -> int:
    if importlib.util.find_spec(SERVICES[service]) is None:
        print(
            f"quartet {service}: {SERVICES[service]} is not installed; run: pip install 'quartet[{service}]'",
            file=sys.stderr,
        )
        return EXIT_SETTINGS_ERROR
    os.execv(sys.executable, [sys.executable, "-m", f"quartet.services.{service}", *argv])


if __name__ == "__main__":
    raise SystemExit(main())
