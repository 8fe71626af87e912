"""Throughput against latency, as a picture or as a page that needs nothing else."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure

from quartet.services.cli.bench.report import describe_mix, label

Curve = tuple[str, Mapping[str, Any]]
"""A name, and the report of its runs."""

PANELS = (("ttft", "Time to first token, ms"), ("tpot", "Time per output token, ms"), ("e2el", "End to end, ms"))
TABLE = {
    "request_throughput": "req/s",
    "request_goodput": "goodput req/s",
    "output_throughput": "output tok/s",
    "median_ttft_ms": "TTFT median ms",
    "p99_ttft_ms": "TTFT p99 ms",
    "median_tpot_ms": "TPOT median ms",
    "p99_tpot_ms": "TPOT p99 ms",
    "p99_itl_ms": "ITL p99 ms",
    "p99_e2el_ms": "E2EL p99 ms",
    "failed": "failed",
}


def write_plot(path: Path, report: Mapping[str, Any], compared: Sequence[Curve] = ()) -> None:
    """A page for .html, a picture for .png and .svg; `compared` are curves of earlier runs."""
    name = path.stem if compared else str(report["backend"])
    curves = [(name, report), *compared]
    title = f"{report['model_id']}, {describe_mix(report)}"
    figure = draw(title, curves)
    if path.suffix == ".html":
        path.write_text(_page(title, figure, curves), encoding="utf-8")
    else:
        figure.savefig(path, dpi=150)


def draw(title: str, curves: Sequence[Curve]) -> matplotlib.figure.Figure:
    figure = matplotlib.figure.Figure(figsize=(13, 4.4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    for axes, (key, name) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        latencies: list[float] = []
        highest = 0.0
        for number, (curve, report) in enumerate(curves):
            points = [result for result in report["results"] if f"median_{key}_ms" in result]
            rates = [point["output_throughput"] for point in points]
            highest = max([highest, *rates])
            for part, style in (("median", "-o"), ("p99", "--s")):
                values = [point[f"{part}_{key}_ms"] for point in points]
                latencies += values
                axes.plot(rates, values, style, color=f"C{number}", markersize=4, label=f"{curve}, {part}")
            for point, rate in zip(points, rates, strict=True):
                place = (rate, point[f"median_{key}_ms"])
                axes.annotate(label(point), place, textcoords="offset points", xytext=(4, 4), fontsize=7)
        if latencies and min(latencies) > 0 and math.log10(max(latencies) / min(latencies)) > 1.5:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlim(0, 1.25 * highest or 1.0)  # with room for labels
        axes.set_xlabel("Output tokens/s")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    return figure


def _page(title: str, figure: matplotlib.figure.Figure, curves: Sequence[Curve]) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    svg = buffer.getvalue()
    rows = [
        f"<tr><th>{html.escape(f'{name}: {label(result)}')}</th>"
        + "".join(f"<td>{_cell(result.get(key))}</td>" for key in TABLE)
        + "</tr>"
        for name, report in curves
        for result in report["results"]
    ]
    head = "".join(f"<th>{name}</th>" for name in TABLE.values())
    about = "<br>".join(html.escape(f"{name}: {_about(report)}") for name, report in curves)
    return _PAGE.format(
        title=html.escape(title),
        about=about,
        svg=svg[svg.index("<svg") :],
        head=head,
        rows="\n".join(rows),
    )


def _about(report: Mapping[str, Any]) -> str:
    facts = ", ".join(f"{key} {report[key]}" for key in ("prompts", "seed", "temperature", "date"))
    return f"{report['model_id']} at {report['base_url']}, {describe_mix(report)}, {facts}"


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else html.escape(str(value))


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }}
svg {{ width: 100%; height: auto; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }}
th:first-child {{ text-align: left; }}
</style>
<h1>{title}</h1>
<p>{about}</p>
{svg}
<div><table>
<thead><tr><th></th>{head}</tr></thead>
<tbody>
{rows}
</tbody>
</table></div>
</html>
"""
