"""`quartet top`: what a running server does, in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from quartet.services.cli.live_feed import Feed, FeedError, add_feed_flags
from quartet.services.cli.top_view import TopView

DESCRIPTION = """Shows what a running server does: throughput, what runs and waits, KV blocks, prefix hits,
preemptions, latencies as clients see them, and the services. It asks the gateway's /live (docs/live.md), and costs
nothing while it does not run."""
EPILOG = """examples:
  quartet top
  quartet top --url http://gateway:8000
  quartet top --once --json | jq .kv_cache.usage
"""
RETRY = 1.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "quartet top",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_feed_flags(parser)
    parser.add_argument(
        "--interval", type=_interval, default=0.5, metavar="SECONDS", help="between two updates (default: 0.5)"
    )
    parser.add_argument("--once", action="store_true", help="look for --seconds, print, and end")
    parser.add_argument(
        "--seconds", type=_seconds, default=2.0, metavar="SECONDS", help="with --once: how long (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line, instead of a table")
    options = parser.parse_args(argv)
    if not options.json:
        try:
            from quartet.services.cli.top_table import Screen
        except ImportError:
            print("quartet top: rich is not installed; run: pip install 'quartet[top]', or use --json", file=sys.stderr)
            return 1
    try:
        if options.once:
            view = look(options)
            print(json.dumps(view.summary())) if options.json else Screen().print(view.summary())
            return 0
        if options.json:
            for view in follow(options):
                print(json.dumps(view.summary()), flush=True)
            return 0
        with Screen() as screen:
            while True:
                try:
                    for view in follow(options):
                        screen.show(view.summary())
                except FeedError as error:
                    # It may be on its way back.
                    screen.lost(str(error))
                    time.sleep(RETRY)
    except FeedError as error:
        print(f"quartet top: {error}", file=sys.stderr)
        return 1


def look(options: argparse.Namespace) -> TopView:
    """What is so after options.seconds. Raises FeedError."""
    view = TopView()
    for name, data in Feed(options, 100, seconds=options.seconds):
        view.apply(name, data)
    return view


def follow(options: argparse.Namespace) -> Any:
    """A view after each event, without end. Raises FeedError."""
    view = TopView()
    for name, data in Feed(options, max(50, round(1000 * options.interval))):
        view.apply(name, data)
        yield view


def _interval(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 10:
        raise argparse.ArgumentTypeError("must be between 0.05 and 10")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError("must be between 0 and 3600")
    return value
