"""``--metrics-port``: the state of the peers over HTTP in Prometheus' text format, for scrapers.

It is computed from the status files on request, at most once a second, in a thread of the launcher.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from launcher.errors import LaunchError
from p2pfl.run_folder.folder import FINAL, RunFolder, Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_AGE = 1.0
"""Seconds for which an answer is given again: a scraper can not make the launcher busy."""
TIMEOUT = 10.0
"""Seconds after which a connection without a request is closed."""
PHASES = ("starting", "queued", "training", "waiting", "evaluating", *FINAL)

METRICS = (
    ("p2pfl_peer_round", "gauge", "Round that the peer is in.", lambda status: status.t),
    ("p2pfl_peer_rounds_done", "gauge", "Rounds that the peer has completed.", lambda status: status.rounds_done),
    (
        "p2pfl_peer_accuracy",
        "gauge",
        "Last accuracy on the local test split, 0 to 1.",
        lambda status: status.accuracy,
    ),
    ("p2pfl_peer_sent_bytes_total", "counter", "Bytes sent, with headers.", lambda status: status.bytes_out),
    ("p2pfl_peer_received_bytes_total", "counter", "Bytes received, with headers.", lambda status: status.bytes_in),
    ("p2pfl_peer_awaited", "gauge", "Neighbors that the peer waits for.", lambda status: len(status.waiting_for)),
)


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``[HOST:]PORT``; the default host is 127.0.0.1. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is no port from 0 to 65535, and no HOST:PORT")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def exposition(folder: RunFolder, run: dict[str, Any]) -> str:
    """Return the state of the peers in Prometheus' text format.

    Args:
        run: the settings of the run.
    """
    statuses = [status for files in folder.peers() if (status := files.status()) is not None]
    return "".join(f"{line}\n" for line in _lines(folder, run, statuses))


def _lines(folder: RunFolder, run: dict[str, Any], statuses: list[Status]) -> Iterator[str]:
    labels = {"run": folder.root.name, "algorithm": run["algorithm"]["name"], "seed": run["seed"]}
    yield from _head("p2pfl_run_info", "gauge", "The run, as labels.")
    yield f"p2pfl_run_info{_labels(**labels)} 1"
    yield from _head("p2pfl_run_rounds", "gauge", "Rounds of the run.")
    yield f"p2pfl_run_rounds {run['rounds']}"
    for name, kind, text, value in METRICS:
        yield from _head(name, kind, text)
        for status in statuses:
            number = value(status)
            if number is not None and math.isfinite(number):
                yield f"{name}{_labels(peer=status.peer)} {number}"
    yield from _head("p2pfl_peer_phase", "gauge", "1 for the phase that the peer is in.")
    for status in statuses:
        for phase in PHASES:
            yield f"p2pfl_peer_phase{_labels(peer=status.peer, phase=phase)} {int(status.phase == phase)}"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _labels(**labels: object) -> str:
    escaped = (
        (key, str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for key, value in labels.items()
    )
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped) + "}"


class MetricsServer:
    """Answers `GET /metrics`. It binds its port at once, so that a port in use is an error before any peer starts."""

    def __init__(self, host: str, port: int) -> None:
        self._folder: RunFolder | None = None
        self._run: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._answer, self._until = "", -math.inf
        served = self

        class Handler(BaseHTTPRequestHandler):
            timeout = TIMEOUT

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "see /metrics")
                    return
                body = served.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

            def server_bind(self) -> None:
                TCPServer.server_bind(self)  # not HTTPServer's, which asks the network for the name of the host

            def handle_error(self, *arguments: object) -> None:
                pass  # the scraper has closed the connection

        try:
            self._server = Server((host, port), Handler)
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
        self._folder, self._run = folder, run
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def text(self) -> str:
        """Return the state of the peers, which may be a second old."""
        assert self._folder is not None
        with self._lock:
            if time.monotonic() >= self._until:
                self._answer, self._until = exposition(self._folder, self._run), time.monotonic() + MAX_AGE
            return self._answer

    def close(self) -> None:
        if self._folder is not None:
            self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
