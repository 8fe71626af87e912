"""`quartet trace`: records what a running server does for some seconds."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from quartet.services.cli.live_feed import Feed, FeedError, add_feed_flags
from quartet.services.cli.trace_file import Trace

DESCRIPTION = """Records steps and requests of a running server, and writes them in Chrome's trace format: open the
file at https://ui.perfetto.dev (it stays on your machine) or chrome://tracing. Each service is a process with what it
does in each step; each request is a span with what it waits for and computes. Ctrl-C ends it before its time, with
what it has."""
EPILOG = """examples:
  quartet trace -o trace.json --seconds 10
  quartet trace --url http://gateway:8000 -o - | gzip > trace.json.gz
"""
INTERVAL_MS = 200


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "quartet trace",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_feed_flags(parser)
    parser.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="- is standard output")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="N", help="how long (default: 5)")
    options = parser.parse_args(argv)
    if options.seconds <= 0:
        parser.error("--seconds must be more than 0")
    try:
        trace = record(options)
    except FeedError as error:
        print(f"quartet trace: {error}", file=sys.stderr)
        return 1
    text = json.dumps(trace.build(), separators=(",", ":"))
    try:
        if options.output == "-":
            print(text)
        else:
            Path(options.output).write_text(text)
    except OSError as error:
        print(f"quartet trace: {options.output}: {(error.strerror or str(error)).lower()}", file=sys.stderr)
        return 1
    timed = sum(step["executor"] is not None for step in trace.steps.values())
    print(
        f"{options.output}: {len(trace.steps)} steps ({timed} with the executor's phases), "
        f"{trace.num_requests} requests, {trace.last_t - trace.first_t:.1f} s; open it at https://ui.perfetto.dev",
        file=sys.stderr,
    )
    return 0


def record(options: argparse.Namespace) -> Trace:
    """Raises FeedError when nothing came; what came before the feed's end is kept."""
    trace, feed = Trace(), Feed(options, INTERVAL_MS, "trace", options.seconds)
    try:
        for name, data in feed:
            trace.add(name, data)
    except FeedError as error:
        if not trace.first_t:
            raise
        print(f"quartet trace: ended early: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        pass
    finally:
        feed.close()
    return trace
