"""Metrics that every service shares: histograms, the exposition, the port, links."""

import socket
import time

import pytest
from support.metrics import collect, scrape, total, value
from support.stack import eventually, free_port

from quartet.shared.address import check_metrics_address, split_address
from quartet.shared.link import LinkTotals
from quartet.shared.metrics import (
    ITL_BUCKETS,
    LATENCY_BUCKETS,
    TOKENS_BUCKETS,
    TTFT_BUCKETS,
    Collector,
    Histogram,
    MetricsServer,
)


def test_a_histogram_counts_up_to_and_with_its_edges():
    histogram = Histogram((1, 2, 5))
    for number in (0, 1, 1.5, 2, 5, 6):
        histogram.observe(number)
    histogram.observe(3, times=10)
    samples = collect(lambda families: families.histogram("h", "", histogram))
    buckets = {edge: value(samples, "h_bucket", le=edge) for edge in ("1.0", "2.0", "5.0", "+Inf")}
    assert buckets == {"1.0": 2, "2.0": 4, "5.0": 15, "+Inf": 16}
    assert (value(samples, "h_count"), value(samples, "h_sum"), histogram.count) == (16, 45.5, 16)


@pytest.mark.parametrize("edges", [TTFT_BUCKETS, ITL_BUCKETS, LATENCY_BUCKETS, TOKENS_BUCKETS])
def test_edges_rise(edges):
    assert list(edges) == sorted(set(edges))


def test_labels_are_on_every_sample_and_the_model_name_is_asked_each_time():
    names = iter(["one", "two"])

    def source(families):
        families.counter("c", "a counter", 3, kind="x")
        families.counter("c", "a counter", 4, kind="y")

    collector = Collector([source], lambda: next(names))
    for name in ("one", "two"):
        (family,) = collector.collect()
        assert [(s.name, s.labels) for s in family.samples] == [
            ("quartet:c_total", {"model_name": name, "kind": "x"}),
            ("quartet:c_total", {"model_name": name, "kind": "y"}),
        ]


def test_further_services_take_the_next_free_ports_and_free_them_again():
    first = free_port()
    servers = [
        MetricsServer(f"127.0.0.1:{first}", Collector([lambda f, i=i: f.gauge("i", "", i)], str)) for i in (1, 2)
    ]
    ports = []
    for server in servers:
        server.start()
        eventually(lambda server=server: server.port)
        ports.append(server.port)
    try:
        assert ports[0] >= first and ports[1] > ports[0]
        for i, port in enumerate(ports, 1):
            samples = scrape(f"http://127.0.0.1:{port}/metrics")
            assert value(samples, "i") == i and value(samples, "process_resident_memory_bytes") > 1e6
    finally:
        for server in servers:
            server.close()
    with socket.create_server(("127.0.0.1", ports[0])):
        pass


OPENMETRICS = "application/openmetrics-text;version=1.0.0"


@pytest.mark.parametrize("accept", ["", "*/*", f"{OPENMETRICS},text/plain;version=0.0.4;q=0.5", f"{OPENMETRICS};q=0.6"])
def test_names_keep_their_colon_for_every_scraper(accept):
    """prometheus_client has underscores instead in OpenMetrics, where it is not asked for more than its version 1.0."""
    collector = Collector([lambda families: families.gauge("g", "", 1)], lambda: "tiny")
    server = MetricsServer("127.0.0.1:0", collector)
    server.start()
    try:
        eventually(lambda: server.port)
        assert value(scrape(f"http://127.0.0.1:{server.port}/metrics", accept=accept), "g") == 1
    finally:
        server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_closes_at_once_and_frees_its_port(host):
    took = []
    for _ in range(5):
        shown = f"[{host}]" if ":" in host else host
        server = MetricsServer(f"{shown}:0", Collector([], str))
        server._start()
        if not server.port and ":" in host:
            pytest.skip("no IPv6 here")
        scrape(f"http://{shown}:{server.port}/metrics")
        with socket.create_connection((host, server.port)):  # one that asks for nothing
            began = time.perf_counter()
            server.close()
            took.append(time.perf_counter() - began)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, server.port))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, server.port), family=family):
            pass
    assert min(took) < 0.02


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clocks of threads here")
def test_it_waits_without_using_the_processor():
    server = MetricsServer("127.0.0.1:0", Collector([], str))
    server._start()
    try:
        thread = server._server._thread
        clock = time.pthread_getcpuclockid(thread.ident)
        scrape(f"http://127.0.0.1:{server.port}/metrics")
        time.sleep(0.05)
        used = time.clock_gettime(clock)
        time.sleep(1.0)
        assert time.clock_gettime(clock) == used
    finally:
        server.close()


def test_an_address_that_cannot_be_had_costs_the_metrics_alone():
    server = MetricsServer("192.0.2.1:9100", Collector([], str))
    server._start()
    assert server.port == 0
    server.close()


@pytest.mark.parametrize("address", ["", "localhost:9120", "[::1]:0", "0.0.0.0:65535"])
def test_addresses_that_are_right(address):
    check_metrics_address(address)
    assert not address or split_address(address)[1] >= 0


@pytest.mark.parametrize("address", ["9120", "host:", ":9120", "host:70000", "::1:9120", "host:x"])
def test_addresses_that_are_not(address):
    with pytest.raises(ValueError, match="--metrics-address must be host:port"):
        check_metrics_address(address)


def test_incarnations_are_counted_once_each():
    totals = LinkTotals()
    for incarnation in (1, 2, 1, 3, 3):
        totals.opened(incarnation)
    assert (totals.sessions, totals.incarnations) == (5, 3)
    for incarnation in range(10_000):
        totals.opened(incarnation)
    assert len(totals._seen) <= 4096


def test_total_sums_over_labels():
    samples = collect(lambda f: [f.counter("c", "", n, kind=str(n)) for n in (1, 2)])
    assert total(samples, "c_total") == 3
