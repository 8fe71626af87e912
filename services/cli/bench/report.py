"""The figures in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 110
# A client that uses so much of a core, or sends so late, is what is measured.
BUSY_CLIENT = 0.8
LATE_CLIENT_MS = 50.0
# More of a mix's own prompts than a chat template has in common.
KNOWN_PROMPTS = 0.1
LATENCY_NAMES = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "itl": "Inter-token latency (ITL)",
    "e2el": "End-to-end latency (E2EL)",
}
COLUMNS = ("mean", "median", "p90", "p99", "max")


def print_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    console = Console() if console is None else console
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH, file=console.file)
    results = report["results"]
    console.print(f"{report['model_id']} at {report['base_url']} ({report['backend']}), {describe_mix(report)}")
    if len(results) > 1:
        console.print(_sweep(results))
    for result in results if len(results) == 1 else ():
        console.print(_totals(result))
        console.print(_latencies(result))
    for result in results:
        for line in _remarks(result):
            console.print(line, style="yellow", highlight=False)
    if _prompts_were_known(report):
        line = "Prompts were found in the prefix cache: an earlier run had the same. Take another --seed."
        console.print(line, style="yellow", highlight=False)
    if report["interrupted"]:
        console.print("Interrupted: the figures are of the requests that had ended.", style="yellow")


def describe_mix(report: Mapping[str, Any]) -> str:
    if report["dataset"]:
        return f"data set {report['dataset']}"
    mix = report["mix"]
    text = f"mix {mix['name']}: {mix['input_len']} in, {mix['output_len']} out"
    if mix["sigma"]:
        text += f", log-normal (sigma {mix['sigma']:g})"
    if mix["prefix_len"]:
        text += f", behind {mix['num_prefixes']} x {mix['prefix_len']} in common"
    if mix["num_turns"] > 1:
        text += f", {mix['num_turns']} turns"
    return text


def label(result: Mapping[str, Any]) -> str:
    """Such as "2 req/s" or "32 at once"."""
    rate, places = result["request_rate"], result["max_concurrency"]
    parts = [] if rate == "inf" else [f"{rate:g} req/s"]
    parts += [f"{places} at once"] if places else []
    return ", ".join(parts) or "all at once"


def _totals(result: Mapping[str, Any]) -> Table:
    table = Table(title=f"Serving benchmark result, {label(result)}", box=rich.box.SIMPLE_HEAD, show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    rows = [
        ("Successful requests", result["completed"]),
        ("Failed requests", result["failed"]),
        ("Benchmark duration (s)", f"{result['duration']:.2f}"),
        ("Total input tokens", result["total_input_tokens"]),
        ("  of them found in the prefix cache", result["total_cached_tokens"]),
        ("Total generated tokens", result["total_output_tokens"]),
        ("Request throughput (req/s)", f"{result['request_throughput']:.2f}"),
    ]
    if "request_goodput" in result:
        goals = ", ".join(f"{name} {limit:g} ms" for name, limit in result["slo_ms"].items())
        rows.append((f"Request goodput (req/s; {goals})", f"{result['request_goodput']:.2f}"))
    rows += [
        ("Output token throughput (tok/s)", f"{result['output_throughput']:.2f}"),
        ("Total token throughput (tok/s)", f"{result['total_token_throughput']:.2f}"),
        ("Peak concurrent requests", result["max_concurrent_requests"]),
        ("CPU of this client (us/token)", f"{result['client']['cpu_us_per_token']:.0f}"),
    ]
    for name, value in rows:
        table.add_row(name, str(value))
    return table


def _latencies(result: Mapping[str, Any]) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("ms")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for key, name in LATENCY_NAMES.items():
        if f"mean_{key}_ms" in result:
            table.add_row(name, *(f"{result[f'{column}_{key}_ms']:.2f}" for column in COLUMNS))
    return table


def _sweep(results: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Serving benchmark result", box=rich.box.SIMPLE_HEAD)
    table.add_column("load")
    for column in ("req/s", "goodput", "tok/s", "TTFT median", "p99", "TPOT median", "p99", "ITL p99", "E2EL p99"):
        if column != "goodput" or "request_goodput" in results[0]:
            table.add_column(column, justify="right")
    table.add_column("failed", justify="right")
    keys = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "p99_itl_ms", "p99_e2el_ms")
    for result in results:
        cells = [f"{result['request_throughput']:.2f}"]
        if "request_goodput" in result:
            cells.append(f"{result['request_goodput']:.2f}")
        cells.append(f"{result['output_throughput']:.1f}")
        cells += [f"{result[key]:.1f}" if key in result else "-" for key in keys]
        table.add_row(label(result), *cells, str(result["failed"]))
    return table


def _prompts_were_known(report: Mapping[str, Any]) -> bool:
    """Where the mix itself has nothing in common."""
    mix, results = report["mix"], report["results"]
    if report["dataset"] or mix["prefix_len"] or mix["num_turns"] > 1:
        return False
    known, all_tokens = (sum(r[f"total_{kind}_tokens"] for r in results) for kind in ("cached", "input"))
    return bool(known > KNOWN_PROMPTS * all_tokens)


def _remarks(result: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{label(result)}: {entry['count']} x {kind}: {entry['example']}" for kind, entry in result["errors"].items()
    ]
    if result["gave_up"]:
        lines.append(f"{label(result)}: given up, the server is gone.")
    client = result["client"]
    if client["cpu_share"] > BUSY_CLIENT:
        lines.append(
            f"{label(result)}: this client used {client['cpu_share']:.0%} of a core: the figures may be its own. "
            "Divide the load among several."
        )
    if client["max_dispatch_lag_ms"] > LATE_CLIENT_MS:
        lines.append(f"{label(result)}: requests were sent up to {client['max_dispatch_lag_ms']:.0f} ms late.")
    return lines
