"""The command line of `quartet bench`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quartet.services.cli.bench.drive import Arrivals
from quartet.services.cli.bench.metrics import parse_slo
from quartet.services.cli.bench.mixes import MIXES, Form, Mix
from quartet.services.cli.connection import add_connection_flags

DEFAULT_CONCURRENCY = 32
# Of a run that is told neither how many requests nor how long.
DEFAULT_SECONDS = 30
DEFAULT_ROUNDS = 4
PLOTS = (".html", ".png", ".svg")

DESCRIPTION = """Loads a running server and prints how fast it answered, in the terms of vLLM's `bench serve`:
Quartet over gRPC (--address), or any server with OpenAI's API (--url)."""
EPILOG = """examples:
  quartet bench                                              32 streams of 128 tokens in and out, over gRPC
  quartet bench --mix chat --rate 1 2 4 --plot sweep.html    Poisson arrivals at three rates
  quartet bench --url http://127.0.0.1:8000 --endpoint chat --mix multi-turn --concurrency 8
  quartet bench --mix shared-prefix --duration 60 --slo ttft:500,itl:50 -o result.json

A server with keys is given one in QUARTET_API_KEY, with --url in OPENAI_API_KEY too. Exit codes: 0; 1 when the server
is not there, refuses, or any request failed; 2 for a wrong argument; 130 after Ctrl-C, which prints what there is.
docs/benchmarks.md says what the figures mean.
"""


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep; `num_requests` None is until `duration` has passed."""

    rate: float
    concurrency: int
    num_requests: int | None
    duration: float

    def arrivals(self, seed: str) -> Arrivals:
        return Arrivals(self.rate, self.concurrency, self.duration, seed)

    def describe(self) -> dict[str, Any]:
        """Under vLLM's names."""
        return {
            "request_rate": self.rate if math.isfinite(self.rate) else "inf",
            "max_concurrency": self.concurrency or None,
            "num_prompts": self.num_requests,
            "max_duration": self.duration if math.isfinite(self.duration) else None,
        }

    def __str__(self) -> str:
        parts = [f"{self.rate:g} requests/s"] if math.isfinite(self.rate) else []
        parts += [f"{self.concurrency} at once"] if self.concurrency else []
        return ", ".join(parts) or "all at once"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """With what was asked for in `mix`, `points`, `form`, `slo`, `sampling` and `extra`; exits with 2."""
    parser = _build()
    options = parser.parse_args(argv)
    try:
        options.mix = _mix(options)
        options.points = _points(options)
        options.form = _form(options)
        options.slo = parse_slo(" ".join(options.slo)) if options.slo else {}
        options.extra = _extra(options.extra_body)
        _check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _build() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "quartet bench",
        usage="quartet bench [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_connection_flags(parser)
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="of a server with OpenAI's API, such as http://127.0.0.1:8000 (default: gRPC)")
    server.add_argument(
        "--endpoint",
        choices=["completions", "chat"],
        default="completions",
        help="whether prompts are continued or are chats' messages (default: completions)",
    )
    server.add_argument("--model", default="", help="of those at --url (default: the first)")
    server.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait so long for the server")
    server.add_argument(
        "--timeout", type=_positive, default=600.0, metavar="SECONDS", help="of a request (default: 600)"
    )

    mix = parser.add_argument_group("what is asked")
    mix.add_argument(
        "--mix",
        choices=MIXES,
        default="fixed",
        help="fixed: all lengths alike; chat: log-normal around 161 in, 338 out; shared-prefix: 512 tokens in common "
        "before 64 in, 128 out; multi-turn: 4 turns with the history before each (default: fixed)",
    )
    for flag, kind, text in (
        ("--input-len", _count, "mean tokens of what a user says"),
        ("--output-len", _count, "mean tokens of an answer"),
        ("--sigma", float, "spread of the lengths' logarithm; 0: all alike"),
        ("--prefix-len", int, "tokens that conversations begin with in common"),
        ("--num-prefixes", _count, "how many such beginnings there are"),
        ("--num-turns", _count, "turns of a conversation"),
        ("--think-time", float, "mean seconds between an answer and the next turn"),
    ):
        mix.add_argument(flag, type=kind, metavar="N", help=f"{text} (default: the mix's)")
    mix.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="JSON lines with prompt, messages or prompt_token_ids, and max_tokens where not --output-len",
    )
    mix.add_argument(
        "--prompts", choices=["ids", "text"], help="random token ids or words (default: ids; words with --url or chat)"
    )
    mix.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default: 0)")
    mix.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    mix.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers have all the tokens asked for (default); not every server knows it",
    )
    mix.add_argument("--extra-body", metavar="JSON", help="more fields of every request to --url")

    load = parser.add_argument_group("load")
    load.add_argument(
        "--rate", "--request-rate", type=_positive, nargs="+", default=[], metavar="R", help="conversations that begin "
        "each second, as a Poisson process; inf: at once; several are a sweep"
    )  # fmt: skip
    load.add_argument(
        "--concurrency", "--max-concurrency", type=_count, nargs="+", default=[], metavar="N",
        help=f"so many at most run at once; several are a sweep (default: {DEFAULT_CONCURRENCY} without --rate)",
    )  # fmt: skip
    load.add_argument(
        "--num-requests", "--num-prompts", type=_count, metavar="N",
        help=f"of each run (default: {DEFAULT_SECONDS} s of --rate, or {DEFAULT_ROUNDS} for each place)",
    )  # fmt: skip
    load.add_argument("--duration", type=_positive, metavar="SECONDS", help="after which no request is sent")
    load.add_argument("--warmup", type=int, default=1, metavar="N", help="requests beforehand (default: 1)")

    output = parser.add_argument_group("output")
    output.add_argument(
        "--slo", "--goodput", nargs="+", metavar="GOALS", help="such as ttft:500,itl:50 in ms; also tpot, e2el: "
        "requests that meet all are goodput"
    )  # fmt: skip
    output.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    output.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the JSON to a file")
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help=f"throughput against latency; {', '.join(PLOTS)} (needs matplotlib)"
    )
    output.add_argument(
        "--compare", type=Path, nargs="+", default=[], metavar="FILE", help="JSON of earlier runs, for the plot"
    )
    output.add_argument("--no-progress", action="store_true", help="say nothing meanwhile")
    return parser


def _mix(options: argparse.Namespace) -> Mix:
    fields = {field.name for field in dataclasses.fields(Mix)} - {"name"}
    given = {name: value for name in fields if (value := getattr(options, name)) is not None}
    for name, value in given.items():
        if value < 0 or not math.isfinite(value):
            raise ValueError(f"--{name.replace('_', '-')} is {value}: it must be at least 0")
    return dataclasses.replace(MIXES[options.mix], **given)


def _form(options: argparse.Namespace) -> Form:
    if options.endpoint == "chat":
        if options.prompts == "ids":
            raise ValueError("a chat's messages are text: leave --prompts ids or --endpoint chat out")
        return "chat"
    if options.prompts == "ids" and options.url and options.mix.num_turns > 1:
        raise ValueError("with --url answers are known as text only: --num-turns needs --prompts text")
    return "text" if (options.prompts or ("text" if options.url else "ids")) == "text" else "ids"


def _points(options: argparse.Namespace) -> list[Point]:
    rates, places = options.rate, options.concurrency
    if not rates:
        rates, places = [math.inf], places or [DEFAULT_CONCURRENCY]
    places = places or [0]
    if len(rates) > 1 and len(places) > 1:
        raise ValueError("--rate and --concurrency: only one of them may have several values")
    return [_point(options, rate, concurrency) for rate in rates for concurrency in places]


def _point(options: argparse.Namespace, rate: float, concurrency: int) -> Point:
    num_requests, duration = options.num_requests, options.duration or math.inf
    if options.duration:
        if math.isinf(rate) and not concurrency and num_requests is None:
            raise ValueError("--duration with all requests at once needs --num-requests, --rate or --concurrency")
    elif num_requests is None:
        turns = options.mix.num_turns
        rounds = DEFAULT_ROUNDS * (concurrency or DEFAULT_CONCURRENCY)
        num_requests = turns * (math.ceil(rate * DEFAULT_SECONDS) if math.isfinite(rate) else rounds)
    return Point(rate, concurrency, num_requests, duration)


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--extra-body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("--extra-body is no JSON object")
    return found


def _check(options: argparse.Namespace) -> None:
    if options.extra and not options.url:
        raise ValueError("--extra-body goes with --url")
    if options.model and not options.url:
        raise ValueError("--model goes with --url: a gRPC address serves one model")
    if options.url and not options.url.startswith(("http://", "https://")):
        raise ValueError(f"--url {options.url}: it begins with http:// or https://")
    if options.plot is not None and options.plot.suffix not in PLOTS:
        raise ValueError(f"--plot {options.plot}: its name ends with one of {', '.join(PLOTS)}")
    if options.compare and options.plot is None:
        raise ValueError("--compare goes with --plot")
    for path in filter(None, (options.output, options.plot)):
        # Found out before minutes of load, not after.
        if not os.access(path.absolute().parent, os.W_OK):
            raise ValueError(f"{path}: its folder cannot be written to")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
