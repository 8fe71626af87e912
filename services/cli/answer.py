"""What chat and generate share: the flags of sampling, and one streamed answer."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from quartet.services.cli.connection import add_connection_flags, connection_of

SAMPLING = (
    ("--max-tokens", int, "the most tokens to generate (default: until the context is full)"),
    ("--temperature", float, "0 always takes the most likely token (default: 1)"),
    ("--top-p", float, "draw among the likeliest tokens that together have this probability"),
    ("--top-k", int, "draw among this many likeliest tokens"),
    ("--min-p", float, "draw among tokens at least this fraction as likely as the likeliest"),
    ("--repetition-penalty", float, "above 1: tokens seen before become less likely"),
    ("--seed", int, "the same seed gives the same answer"),
)


def build_parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        f"quartet {command}",
        description=description,
        epilog=f"{epilog}\nA server with API keys is given one in QUARTET_API_KEY.\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_connection_flags(parser)
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="wait this long for the server to be ready")
    parser.add_argument("--tenant", metavar="NAME", help="whom this is accounted to, where tenants share the server")
    sampling = parser.add_argument_group("sampling")
    for flag, kind, text in SAMPLING:
        sampling.add_argument(flag, type=kind, metavar="N", help=text)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (may be repeated)")
    return parser


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """Only what was given: the server has the defaults and the limits."""
    names = [flag.removeprefix("--").replace("-", "_") for flag, _, _ in SAMPLING] + ["stop", "tenant"]
    return {name: value for name in names if (value := getattr(options, name)) is not None}


class Stats:
    """Time to the first token and tokens a second, as this client saw them."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.first = self.last = 0.0
        self.tokens = 0
        self.usage: Any = None

    def add(self, count: int) -> None:
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.tokens += count

    def __str__(self) -> str:
        if not self.tokens:
            return "no tokens"
        rate = (self.tokens - 1) / (self.last - self.first) if self.last > self.first else 0.0
        speed = f"{self.tokens} tokens, first after {self.first - self.started:.2f} s, then {rate:.1f} tokens/s"
        if not self.usage:
            return speed
        return f"{speed}; prompt of {self.usage.prompt_tokens}, {self.usage.cached_tokens} of them cached"


def print_answer(client: Any, sampling: dict[str, Any], stats: Stats | None = None, **prompt: Any) -> str:
    """Streams one answer to standard output and returns its text."""
    text = []
    generation = client.generate(**prompt, **sampling)
    for chunk in generation:
        text.append(chunk.text)
        if stats:
            stats.add(len(chunk.token_ids))
        print(chunk.text, end="", flush=True)
    print(flush=True)
    if stats:
        stats.usage = generation.usage
    return "".join(text)


def run_with_client(command: str, options: argparse.Namespace, body: Callable[[Any], int]) -> int:
    """Calls body(client); a server's refusal or absence becomes one line on stderr and exit code 1."""
    try:
        import grpc

        from quartet.shared.client import Client
    except ImportError as error:
        print(f"quartet {command}: {error}; run: pip install 'quartet[client]'", file=sys.stderr)
        return 1
    try:
        with Client(**connection_of(options), api_key=os.environ.get("QUARTET_API_KEY", "")) as client:
            if options.wait is not None:
                client.wait_ready(options.wait)
            return body(client)
    except (TimeoutError, ValueError) as error:
        print(f"quartet {command}: {error}", file=sys.stderr)
    except grpc.RpcError as error:
        print(f"quartet {command}: {describe(error, options.address)}", file=sys.stderr)
    return 1


def describe(error: Any, address: str) -> str:
    code = error.code().name if hasattr(error, "code") else "ERROR"
    details = error.details() if hasattr(error, "details") else str(error)
    if code == "UNAVAILABLE" and "handshake" in details.lower():
        return f"no TLS with {address}: {details}"
    if code == "UNAVAILABLE":
        return f"no server on {address} ({details}); start one with: quartet serve"
    return f"{code}: {details}"


def read_prompt(words: Sequence[str]) -> str:
    """The words of the command line, or standard input for `-`."""
    return sys.stdin.read() if list(words) == ["-"] else " ".join(words)
