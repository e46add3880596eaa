"""The endpoint for scrapers of Prometheus."""

from __future__ import annotations

import math
import socket
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from launcher.errors import LaunchError
from launcher.tracking import prometheus
from launcher.tracking.prometheus import MetricsServer, PeerMetrics, parse_address
from p2pfl.run_folder.folder import RunFolder, Status
from tests.launcher_fixtures import Invoke, MakeFolder

RUN = {"rounds": 3, "seed": 0, "algorithm": {"name": 'my "method"\n'}}


@pytest.fixture
def folder(make_folder: MakeFolder) -> RunFolder:
    folder = make_folder(peers=3, results={0: None, 1: {"accuracy": 0.5}, 2: {"accuracy": math.nan}})
    folder.peer(1).write_status(Status(1, 1, "waiting", 2, 2, [0, 2], 0.5, 300, 200))
    return folder


def test_scrapers_find_the_state_of_the_peers(folder: RunFolder) -> None:
    registry = CollectorRegistry()
    registry.register(PeerMetrics(folder, RUN))
    samples = {
        (sample.name, sample.labels.get("peer"), sample.labels.get("phase")): sample
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
    assert samples["p2pfl_run_info", None, None].labels["algorithm"] == 'my "method"\n'
    assert samples["p2pfl_run_rounds", None, None].value == 3
    assert samples["p2pfl_peer_accuracy", "1", None].value == 0.5
    assert ("p2pfl_peer_accuracy", "2", None) not in samples  # not a number
    assert ("p2pfl_peer_round", "0", None) not in samples  # not started
    assert samples["p2pfl_peer_sent_bytes_total", "1", None].value == 300
    assert samples["p2pfl_peer_awaited", "1", None].value == 2
    assert samples["p2pfl_peer_phase", "1", "waiting"].value == 1
    assert samples["p2pfl_peer_phase", "1", "training"].value == 0


@pytest.fixture
def server(folder: RunFolder) -> Iterator[MetricsServer]:
    with MetricsServer("127.0.0.1", 0) as server:
        server.start(folder, RUN)
        yield server


def test_answers_over_http_on_a_free_port(server: MetricsServer) -> None:
    with urllib.request.urlopen(server.url, timeout=60) as answer:
        assert answer.headers.get_content_type() == "text/plain"
        assert b"p2pfl_run_rounds 3.0\n" in answer.read()


def test_reads_the_files_at_most_once_a_second(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(prometheus, "time", SimpleNamespace(monotonic=lambda: now))
    metrics = PeerMetrics(folder, RUN)
    first = metrics.collect()
    now += 0.9
    assert metrics.collect() is first
    now += 0.1
    assert metrics.collect() is not first


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9100", ("127.0.0.1", 9100)),
        ("0", ("127.0.0.1", 0)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_the_default_host_is_this_one(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["x", "65536", "-1", "", "host:", "1:²"])
def test_rejects_what_is_no_port(file: object, invoke: Invoke, text: str) -> None:
    outcome = invoke("launch", file, "--metrics-port", text)
    assert outcome.exit_code == 2
    assert "neither a port from 0 to 65535 nor" in outcome.stderr


def test_a_port_in_use_is_an_error_before_there_is_a_run(tmp_path: object, file: object, invoke: Invoke) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match="in use"):
            MetricsServer("127.0.0.1", port)
        outcome = invoke("launch", file, "--metrics-port", port, "--run-dir", f"{tmp_path}/run")
    assert outcome.exit_code == 1
    assert "choose another one, or 0 for a free one" in outcome.stderr
