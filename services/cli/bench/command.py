"""`quartet bench`: one run or a sweep, and its report."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.util
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

from quartet.services.cli.bench import mixes
from quartet.services.cli.bench.drive import Run, drive
from quartet.services.cli.bench.metrics import summary
from quartet.services.cli.bench.mixes import Conversation, DatasetError, Source
from quartet.services.cli.bench.options import Point, parse
from quartet.services.cli.bench.target import Target, TargetError, target
from quartet.shared.config import EXIT_SETTINGS_ERROR, version

INTERRUPTED = 130
WARMUP_TOKENS = 4


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    needed = ["rich", *(["matplotlib"] if options.plot else []), *(["aiohttp"] if options.url else [])]
    for module in needed:
        if importlib.util.find_spec(module) is None:
            extra = "plot" if module == "matplotlib" else "bench"
            _say(f"{module} is not installed; run: pip install 'quartet[{extra}]'")
            return EXIT_SETTINGS_ERROR
    try:
        dataset = options.dataset and mixes.read_dataset(options.dataset, options.form, options.mix.output_len)
        compared = [(path.stem, _earlier(path)) for path in options.compare]
        report, interrupted = uvloop.run(_bench(options, dataset))
    except (DatasetError, CompareError) as error:
        _say(str(error))
        return EXIT_SETTINGS_ERROR
    except TargetError as error:
        _say(str(error))
        return 1
    _write(options, report, compared)
    if interrupted:
        return INTERRUPTED
    return 1 if any(result["failed"] or not result["completed"] for result in report["results"]) else 0


class CompareError(Exception):
    """A file that is no report of an earlier run."""


def _earlier(path: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if "mix" in report and all("output_throughput" in result for result in report["results"]):
            return report
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CompareError(f"--compare {path}: {error}") from None
    raise CompareError(f"--compare {path} is not from quartet bench")


async def _bench(options: argparse.Namespace, dataset: list[Conversation] | None) -> tuple[dict[str, Any], bool]:
    from quartet.services.cli.bench.progress import Progress

    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quartet_version": version(),
    }
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        stop.set()
        # The second one ends the process at once.
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    async with target(options) as server:
        report |= server.facts | _described(options)
        report["results"] = []
        await _warm_up(server, options)
        for number, point in enumerate(options.points):
            # No two runs have a prompt in common: what is hit in a cache is hit within a run.
            seed = f"{options.seed}/{number}"
            asked = _asked(options, server, dataset, point, seed)
            run = Run()
            with Progress(run, point, quiet=options.no_progress) as progress:
                showing = asyncio.ensure_future(progress.show())
                try:
                    await drive(asked, server.send, point.arrivals(seed), stop, run)
                finally:
                    showing.cancel()
            report["results"].append(_result(options, point, run))
            if run.gave_up or stop.is_set():
                break
    interrupted = stop.is_set() and not run.gave_up
    report["interrupted"] = interrupted
    return report, interrupted


def _result(options: argparse.Namespace, point: Point, run: Run) -> dict[str, Any]:
    return {
        **point.describe(),
        **summary(run.records, run.seconds, options.slo),
        "cancelled": run.cancelled,
        "gave_up": run.gave_up,
        "client": run.client(),
    }


def _asked(
    options: argparse.Namespace, server: Target, dataset: list[Conversation] | None, point: Point, seed: str
) -> Iterator[Conversation]:
    if dataset:
        return mixes.cycle(dataset, point.num_requests, seed)
    source = Source(options.mix, options.form, seed, server.low, server.high, server.max_model_len)
    return source.conversations(point.num_requests)


async def _warm_up(server: Target, options: argparse.Namespace) -> None:
    """Also finds out whether such requests are taken at all; raises TargetError with what the server says."""
    source = Source(options.mix, options.form, f"{options.seed}/warm-up", server.low, server.high, server.max_model_len)
    conversations = [source.conversation(number) for number in range(options.warmup)]
    prompts: list[Any] = [conversation.opening + conversation.turns[0].said for conversation in conversations]  # type: ignore[operator]
    records = await asyncio.gather(*(server.send(prompt, WARMUP_TOKENS, False) for prompt in prompts))
    for record in records:
        if record.error:
            raise TargetError(f"{server.facts['base_url']} refused the first request: {record.error}: {record.message}")


def _described(options: argparse.Namespace) -> dict[str, Any]:
    mix = options.mix
    return {
        "mix": {name: getattr(mix, name) for name in mix.__dataclass_fields__},
        "dataset": str(options.dataset) if options.dataset else None,
        "prompts": options.form,
        "seed": options.seed,
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos,
        "warmup": options.warmup,
    }


def _write(options: argparse.Namespace, report: dict[str, Any], compared: list[tuple[str, Any]]) -> None:
    from quartet.services.cli.bench.report import print_report

    text = json.dumps(report, indent=2)
    if options.output is not None:
        options.output.write_text(text + "\n")
    if options.json:
        print(text)
    else:
        print_report(report)
    if options.plot is not None:
        from quartet.services.cli.bench.plot import write_plot

        write_plot(options.plot, report, compared)
        _say(f"the plot is {options.plot}")


def _say(line: str) -> None:
    print(f"quartet bench: {line}", file=sys.stderr)
