"""Metrics as a scraper sees them."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from quartet.shared.metrics import Collector, exposition

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Samples:
    """Values by (name, labels without model_name); fails where two samples are the same."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))
            key = (sample.name.removeprefix("quartet:"), labels)
            assert key not in found, f"{key} is told twice"
            found[key] = sample.value
    return found


def scrape(url: str, **headers: str) -> Samples:
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return parse(response.read().decode())


def collect(*sources) -> Samples:  # type: ignore[no-untyped-def]
    return parse(exposition(Collector(sources, lambda: "tiny"))[0].decode())


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def total(samples: Samples, name: str) -> float:
    return sum(v for (known, _), v in samples.items() if known == name)
