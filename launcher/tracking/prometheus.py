"""``--metrics-port``: the state of the peers for scrapers of Prometheus.

It is computed from the status files on request, at most once a second, in a thread of the launcher.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app
from prometheus_client.registry import Collector

from launcher.errors import LaunchError
from p2pfl.run_folder.folder import FINAL, RunFolder

MAX_AGE = 1.0
"""Seconds for which an answer is given again: a scraper cannot make the launcher busy."""
TIMEOUT = 10.0
"""Seconds after which a connection without a request is closed."""
PHASES = ("starting", "queued", "training", "waiting", "evaluating", *FINAL)
NUMBERS = (
    (GaugeMetricFamily, "round", "Round that the peer is in.", lambda status: status.t),
    (GaugeMetricFamily, "rounds_done", "Rounds that the peer has completed.", lambda status: status.rounds_done),
    (GaugeMetricFamily, "accuracy", "Last accuracy on the local test split, 0 to 1.", lambda status: status.accuracy),
    (CounterMetricFamily, "sent_bytes", "Bytes sent, with headers.", lambda status: status.bytes_out),
    (CounterMetricFamily, "received_bytes", "Bytes received, with headers.", lambda status: status.bytes_in),
    (GaugeMetricFamily, "awaited", "Neighbors that the peer waits for.", lambda status: len(status.waiting_for)),
)


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``[HOST:]PORT``; the default host is 127.0.0.1. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is neither a port from 0 to 65535 nor HOST:PORT")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


class PeerMetrics(Collector):
    """The state of the peers, which may be MAX_AGE old. ``run``: the settings of the run."""

    def __init__(self, folder: RunFolder, run: dict[str, Any]) -> None:
        self._folder, self._run = folder, run
        self._lock = threading.Lock()
        self._found: list[Metric] = []
        self._until = -math.inf

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            if time.monotonic() >= self._until:
                self._found, self._until = list(self._read()), time.monotonic() + MAX_AGE
            return self._found

    def _read(self) -> Iterator[Metric]:
        statuses = [status for files in self._folder.peers() if (status := files.status()) is not None]
        info = GaugeMetricFamily("p2pfl_run_info", "The run, as labels.", labels=["run", "algorithm", "seed"])
        info.add_metric([self._folder.root.name, self._run["algorithm"]["name"], str(self._run["seed"])], 1)
        yield info
        yield GaugeMetricFamily("p2pfl_run_rounds", "Rounds of the run.", value=self._run["rounds"])
        for family, name, text, value in NUMBERS:
            found = family(f"p2pfl_peer_{name}", text, labels=["peer"])
            for status in statuses:
                number = value(status)
                if number is not None and math.isfinite(number):
                    found.add_metric([str(status.peer)], number)
            yield found
        phases = GaugeMetricFamily(
            "p2pfl_peer_phase", "1 for the phase that the peer is in.", labels=["peer", "phase"]
        )
        for status in statuses:
            for phase in PHASES:
                phases.add_metric([str(status.peer), phase], status.phase == phase)
        yield phases


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT

    def log_message(self, *arguments: object) -> None:
        pass


class MetricsServer:
    """Answers `GET /metrics`. It binds its port at once, so that a port in use is an error before any peer starts.

    Its thread starts with the run: before, the launcher forks.
    """

    def __init__(self, host: str, port: int) -> None:
        self._serving = False

        class Server(ThreadingWSGIServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def handle_error(self, *arguments: object) -> None:
                pass  # the scraper has closed the connection, or sends nothing

        try:
            self._server = Server((host, port), _Handler)
        except OSError as error:
            reason = error.strerror or str(error)
            raise LaunchError(
                f"--metrics-port {host}:{port}: {reason}; choose another one, or 0 for a free one"
            ) from None

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        name = host.decode() if isinstance(host, bytes | bytearray) else str(host)
        return f"http://{f'[{name}]' if ':' in name else name}:{port}/metrics"

    def start(self, folder: RunFolder, run: dict[str, Any]) -> None:
        """Answer, from now on, with the state of this run."""
        registry = CollectorRegistry()
        registry.register(PeerMetrics(folder, run))
        self._server.set_app(make_wsgi_app(registry))
        self._serving = True
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        if self._serving:
            self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
