"""The figures of `make bench` as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PHASES = ("products", "attention", "logits", "sampling", "host", "idle", "outside")


def precision_lines(name: str, row: Mapping[str, Any]) -> Iterator[str]:
    """A block of text for one precision."""
    yield f"== {name} " + "=" * (100 - len(name))
    bound = row.get("bound", {})
    if bound:
        yield (
            f"bounds by {bound['read_gigabytes_per_second']} GB/s and {bound['gigaops_per_second']:.0f} Gop/s: "
            f"one stream {bound['one_stream_tokens_per_second']} tokens/s, "
            f"32 streams {bound['streams_32_tokens_per_second']:.0f} tokens/s, "
            f"first token of 128 {1e3 * bound['time_to_first_token_128']:.0f} ms"
        )
    if loads := row.get("loads"):
        yield from table(
            ["streams", "load", "tokens/s", "of bound", "first token", "gap/step", "step", *PHASES],
            [_load_cells(streams, figures) for streams, figures in loads.items()],
        )
    yield from _notes(row)
    yield ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as their widest cell; the first two to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for cells in (header, *rows):
        yield "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()


def _load_cells(streams: str, figures: Mapping[str, Any]) -> list[str]:
    rate = figures.get("decode_tokens_per_second", figures["output_tokens_per_second"])
    step = figures["step"]
    gap = figures.get("largest_gap_in_mean_steps")
    failed = f" ({figures['failed']} failed)" if figures["failed"] else ""
    return [
        streams,
        figures["load"] + failed,
        _spread(rate),
        _percent(figures.get("share_of_bound")),
        f"{1e3 * figures['time_to_first_token_mean']['median']:.0f} ms",
        "" if gap is None else f"{gap['median']:.1f}",
        f"{step['mean_ms']:.2f} ms" if step else "",
        *(_percent(step.get(phase, step.get("forward") if phase == "products" else None)) for phase in PHASES),
    ]


def _notes(row: Mapping[str, Any]) -> Iterator[str]:
    if long := row.get("long_stream"):
        yield f"one stream of {long['load']}, by thousand tokens; all but attention grew {long['rest_growth']:.2f} x"
        cells = [f"{b['ms_per_token']:.2f} ({_percent(b['attention_share'])})" for b in long["buckets"]]
        yield "  ms a token (attention): " + "  ".join(cells)
    if memory := row.get("memory"):
        roles = ", ".join(f"{role} {size}" for role, size in memory["megabytes"].items())
        yield f"memory: {memory['beyond_kv_pool']} MB beyond the KV pool's {memory['kv_pool']} ({roles})"
    if ready := row.get("ready_seconds"):
        yield f"ready after {', '.join(f'{seconds:.1f}' for seconds in ready)} s"
    if idle := row.get("idle_cpu_percent"):
        yield "at rest: " + ", ".join(f"{role} {percent} %" for role, percent in idle.items()) + " of a core"


def _spread(values: Mapping[str, float]) -> str:
    text = f"{values['median']:.0f}"
    return text if values["runs"] == 1 else f"{text} ({values['min']:.0f}-{values['max']:.0f})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
