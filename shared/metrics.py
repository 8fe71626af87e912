"""Prometheus metrics: plain numbers that services add to, turned into samples when somebody scrapes.

Nothing here is touched between scrapes but `Histogram.observe`. A scrape runs in a thread of its own,
so sources copy what may change under them (`list(...)`), and two numbers of one scrape may be a moment
apart. Names, labels and bucket edges are vLLM's where the meaning is.
"""

from __future__ import annotations

import errno
import itertools
import socket
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from quartet.shared.address import split_address
from quartet.shared.log import get_logger

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from quartet.shared.link import Identity, Link

PREFIX = "quartet:"
# Further ports that are tried where one is taken: several services of one kind on a host.
MORE_PORTS = 9
# Whatever is asked for: in OpenMetrics, which Prometheus prefers, the library writes quartet_ instead of quartet: for
# all versions before 3.
PLAIN_TEXT = "text/plain;version=0.0.4"

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
TOKENS_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5) if m * 10**e <= 200_000)

_log = get_logger()


class Histogram:
    """Counts by upper edge. One writer; `observe` takes under a microsecond."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


class Families:
    """What one scrape collects. `labels` are on every sample."""

    def __init__(self, **labels: str) -> None:
        self._labels = labels
        self._families: dict[str, Any] = {}

    def __iter__(self) -> Any:
        return iter(self._families.values())

    def counter(self, name: str, about: str, value: float, /, **labels: str) -> None:
        """Is told as `name`_total."""
        from prometheus_client.core import CounterMetricFamily

        self._family(CounterMetricFamily, name, about, labels).add_metric(self._values(labels), value)

    def gauge(self, name: str, about: str, value: float, /, **labels: str) -> None:
        from prometheus_client.core import GaugeMetricFamily

        self._family(GaugeMetricFamily, name, about, labels).add_metric(self._values(labels), value)

    def histogram(self, name: str, about: str, histogram: Histogram, /, **labels: str) -> None:
        from prometheus_client.core import HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        edges = [*map(floatToGoString, histogram.edges), "+Inf"]
        total, sums = histogram.total, itertools.accumulate(list(histogram.counts))
        family = self._family(HistogramMetricFamily, name, about, labels)
        family.add_metric(self._values(labels), list(zip(edges, sums, strict=True)), total)

    def _family(self, kind: type[Any], name: str, about: str, labels: dict[str, str]) -> Any:
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = kind(PREFIX + name, about, labels=[*self._labels, *labels])
        return family

    def _values(self, labels: dict[str, str]) -> list[str]:
        return [*self._labels.values(), *labels.values()]


# Adds what a service has to tell; `Families` has the labels that its samples share.
Source = Callable[[Families], None]


class Collector:
    """What prometheus_client asks. `model_name` is asked at each scrape, since the model may change."""

    def __init__(self, sources: Iterable[Source], model_name: Callable[[], str]) -> None:
        self._sources = list(sources)
        self._model_name = model_name

    def collect(self) -> Iterable[Any]:
        families = Families(model_name=self._model_name())
        for source in self._sources:
            source(families)
        return families

    def describe(self) -> Iterable[Any]:
        return ()


def registry(collector: Collector) -> CollectorRegistry:
    """Of one service: its own metrics, and the process's (CPU time, memory, files, start)."""
    from prometheus_client import CollectorRegistry, ProcessCollector

    made = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=made)
    made.register(cast("Any", collector))  # it is one by its methods
    return made


def exposition(collector: Collector) -> tuple[bytes, str]:
    """All metrics in Prometheus' text format, and its content type."""
    from prometheus_client.exposition import choose_encoder

    encode, content_type = choose_encoder(PLAIN_TEXT)
    return encode(registry(collector)), content_type


def _in_plain_text(app: Callable[..., Any]) -> Callable[..., Any]:
    def asked(environ: dict[str, Any], start_response: Any) -> Any:
        return app(environ | {"HTTP_ACCEPT": PLAIN_TEXT}, start_response)

    return asked


class MetricsServer:
    """Serves /metrics on an address of its own, in a thread. What goes wrong is logged: requests are served
    without metrics too. Where the port is taken, one of the MORE_PORTS after it is used."""

    def __init__(self, address: str, collector: Collector) -> None:
        self._address = address
        self._collector = collector
        self._lock = threading.Lock()
        self._server: Any = None
        self._closed = False
        self.port = 0

    def start(self) -> None:
        """Returns at once: the library takes a moment to import."""
        if self._address:
            threading.Thread(target=self._start, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Frees the port for a successor, in milliseconds."""
        with self._lock:
            self._closed = True
            if self._server is not None:
                self._server.close()
                self._server = None

    def _start(self) -> None:
        try:
            from prometheus_client import make_wsgi_app
        except ImportError:
            _log.warning("no metrics: prometheus-client is not installed", metrics_address=self._address)
            return
        from quartet.shared.metrics_http import MetricsHTTPServer

        host, first = split_address(self._address)
        try:
            family, _, _, _, (found, *_) = socket.getaddrinfo(
                host, first, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError as error:
            self._warn(error)
            return
        app = _in_plain_text(make_wsgi_app(registry(self._collector)))
        last = min(first + MORE_PORTS, 65535) if first else 0
        with self._lock:
            for port in range(first, last + 1):
                if self._closed:
                    return
                try:
                    self._server = MetricsHTTPServer(str(found), port, family, app)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE and port < last:
                        continue
                    self._warn(error)
                    return
                self.port = self._server.server_port
                shown = f"[{host}]" if ":" in host else host
                _log.info("metrics", url=f"http://{shown}:{self.port}/metrics")
                return

    def _warn(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        _log.warning("no metrics: cannot bind", metrics_address=self._address, reason=reason)


# --- what every service tells ---------------------------------------------------------------------


def service_source(identity: Identity, links: Callable[[], Iterable[tuple[str, Link]]]) -> Source:
    """Who this is, and its links, each with the name of the service at its other end."""

    def source(families: Families) -> None:
        families.gauge(
            "service_info",
            "1; labels tell the process.",
            1,
            service=identity.role.name.lower(),
            name=identity.name,
            version=identity.version,
            incarnation=f"{identity.incarnation:016x}",
        )
        for peer_role, link in links():
            _tell_link(families, peer_role, link)

    return source


def _tell_link(families: Families, peer: str, link: Link) -> None:
    peers = list(link.peers.values())
    states = (
        ("up", len(peers)),
        ("ready", sum(p.ready for p in peers)),
        ("draining", sum(p.draining for p in peers)),
        ("stalled", sum(p.stalled for p in peers)),
    )
    for state, count in states:
        families.gauge("link_peers", "Services at the other end of a link, by state.", count, peer=peer, state=state)
    totals = link.totals
    families.counter("link_sessions", "Sessions opened on a link.", totals.sessions, peer=peer)
    families.counter("link_sessions_lost", "Sessions that broke.", totals.losses, peer=peer)
    about = "Processes that a link has had at its other end: each restart is a new incarnation."
    families.counter("link_incarnations", about, totals.incarnations, peer=peer)
    about = "Frames dropped: undecodable, of another session, or from nobody that is known."
    families.counter("link_frames_dropped", about, link.frames_dropped, peer=peer)
