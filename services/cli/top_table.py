"""The table of `quartet top`. Needs rich."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BAR_WIDTH = 40


class Screen:
    """`show` in a context draws over what was there before; `print` appends."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False, screen=self._console.is_terminal)
        self._summary: dict[str, Any] | None = None

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self, summary: dict[str, Any]) -> None:
        self._summary = summary
        self._live.update(render(summary), refresh=True)

    def lost(self, reason: str) -> None:
        """Nothing comes any more; what was last is still shown."""
        parts: list[RenderableType] = [Text(f"{reason}; trying again", style="bold red")]
        if self._summary is not None:
            parts.append(render(self._summary))
        self._live.update(Group(*parts), refresh=True)

    def print(self, summary: dict[str, Any]) -> None:
        self._console.print(render(summary))


def render(summary: dict[str, Any]) -> RenderableType:
    title = Text(f"quartet top  {summary['model'] or 'no model yet'}", style="bold")
    tables: list[RenderableType] = [title, _numbers(summary), _kv(summary), _latencies(summary)]
    tables.append(_services(summary["services"]))
    return Panel(Group(*tables), border_style="dim")


def _numbers(summary: dict[str, Any]) -> Table:
    queue = summary["queue"] or {}
    table = Table.grid(padding=(0, 3))
    for _ in range(4):
        table.add_column()
    rows = (
        ("output tokens/s", _number(summary["output_tokens_per_second"]), "running", _count(queue, "num_running")),
        ("prefill tokens/s", _number(summary["prefill_tokens_per_second"]), "waiting", _count(queue, "num_waiting")),
        ("steps/s", _number(summary["steps_per_second"]), "preempted", _count(queue, "num_preempted")),
        ("tokens a step", _of(summary["tokens_per_step"], queue.get("token_budget")), "preemptions",
         _number(summary["preemptions"], 0)),
        ("executor ms a step", _number(summary["executor_ms"], 2), "scheduler ms", _number(summary["scheduler_ms"], 2)),
    )  # fmt: skip
    for name, value, other, number in rows:
        table.add_row(Text(name, style="dim"), value, Text(other, style="dim"), number)
    return table


def _kv(summary: dict[str, Any]) -> Table:
    pool = summary["kv_cache"]
    table = Table.grid(padding=(0, 2))
    if pool is None:
        table.add_row(Text("no executor yet", style="yellow"))
        return table
    bar = ProgressBar(total=pool["num_blocks"], completed=pool["num_used"], width=BAR_WIDTH)
    used = f"{100 * pool['usage']:.1f} % of {pool['num_blocks']} blocks, {pool['num_cached']} cached"
    table.add_row(Text("KV", style="dim"), bar, used)
    rate = summary["prefix_cache_hit_rate"]
    hits = Text("-") if rate is None else Text(f"{100 * rate:.1f} % of prompt tokens")
    hit_bar = ProgressBar(total=1.0, completed=rate or 0.0, width=BAR_WIDTH)
    table.add_row(Text("prefix hits", style="dim"), hit_bar, hits)
    return table


def _latencies(summary: dict[str, Any]) -> Table:
    table = Table("ms, last 30 s", "p50", "p90", "p99", "count", box=None, header_style="dim", pad_edge=False)
    for name, key in (("first token", "ttft_ms"), ("between tokens", "itl_ms")):
        found = summary[key] or {}
        table.add_row(name, *(_number(found.get(p)) for p in ("p50", "p90", "p99")), _number(found.get("count"), 0))
    return table


def _services(services: list[dict[str, Any]]) -> Table:
    table = Table("service", "name", "incarnation", "state", box=None, header_style="dim", pad_edge=False)
    for service in services:
        table.add_row(service["role"], service["name"], service["incarnation"][:8], _state(service))
    return table


def _state(service: dict[str, Any]) -> Text:
    if not service["alive"]:
        return Text("gone", style="red")
    if service["stalled"]:
        return Text("stalled", style="red")
    if service["draining"]:
        return Text("draining", style="yellow")
    return Text("ready", style="green") if service["ready"] else Text("not ready", style="yellow")


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _count(queue: dict[str, int], name: str) -> str:
    if name == "num_running":
        return _of(queue.get(name), queue.get("max_num_seqs"), 0)
    return _number(queue.get(name), 0)


def _of(value: float | None, limit: float | None, digits: int = 1) -> str:
    return _number(value, digits) if value is None or limit is None else f"{value:,.{digits}f} of {limit:,}"
