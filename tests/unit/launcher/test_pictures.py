"""Pictures of graphs and partitions."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from launcher.report.drawings import draw_graph, positions
from p2pfl.errors import WriteError
from p2pfl.messaging.topology import Topology
from p2pfl.run_file.load import load
from p2pfl.run_folder.new_run import create
from tests.launcher_fixtures import Invoke


@pytest.fixture
def ring(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    file.write_text(file.read_text().replace("peers: 3", "peers: 6"))
    return file


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "start"), [("g.png", b"\x89PNG"), ("g.svg", b"<svg"), ("g.PDF", b"%PDF")])
def test_the_name_of_a_picture_gives_its_format(
    tmp_path: Path, ring: Path, invoke: Invoke, name: str, start: bytes
) -> None:
    pytest.importorskip("vl_convert")
    for command in (("graph",), ("data", "show")):
        assert invoke(*command, ring, "--png", tmp_path / name).exit_code == 0
        assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("none/g.png", "there is no folder"), ("g.gif", "use .png, .svg or .pdf"), ("", "is a directory")],
)
@pytest.mark.parametrize("command", [("graph",), ("data", "show")])
def test_rejects_a_picture_that_cannot_be_written(
    tmp_path: Path, ring: Path, invoke: Invoke, command: tuple[str, ...], name: str, reason: str
) -> None:
    outcome = invoke(*command, ring, "--png", tmp_path / name)
    assert outcome.exit_code == 2
    assert reason in outcome.stderr


def test_a_picture_that_fails_to_be_written_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    with pytest.raises(WriteError, match="No such file"):
        draw_graph(Topology.from_edges(2, [(0, 1)]), tmp_path / "gone" / "g.png")


@pytest.mark.exhaustive
@pytest.mark.parametrize("weighted", [True, False])
def test_draws_groups_in_colors_and_weights_as_edges(tmp_path: Path, weighted: bool) -> None:
    pytest.importorskip("vl_convert")
    weights = np.array([[0.5, 0.4, 0.1], [0.3, 0.7, 0.0], [np.nan] * 3]) if weighted else None
    draw_graph(Topology.from_edges(3, [(0, 1), (1, 2), (0, 2)]), tmp_path / "g.svg", [0, 0, 1], weights)
    drawn = (tmp_path / "g.svg").read_text()
    assert ">group<" in drawn
    assert ("mixing weights" in drawn) == weighted
    assert ("of up to 0.350<" in drawn) == weighted  # the mean of both directions


def test_draws_a_ring_as_a_ring() -> None:
    order = [0, 2, 4, 1, 3]  # of a ring whose neighbors are not consecutive
    ring = Topology.from_edges(5, [(order[k], order[(k + 1) % 5]) for k in range(5)])
    places = positions(ring, [0] * 5)
    sides = [math.dist(places[order[k - 1]], places[peer]) for k, peer in enumerate(order)]
    assert sides == pytest.approx([2 * math.sin(math.pi / 5)] * 5)


def test_draws_a_graph_without_groups_if_the_data_is_not_there(tmp_path: Path, ring: Path, invoke: Invoke) -> None:
    pytest.importorskip("vl_convert")
    missing = ("--set", "data.dataset={name: npz, path: /no/where.npz}")
    outcome = invoke("graph", ring, *missing, "--png", tmp_path / "g.svg")
    assert outcome.exit_code == 0
    assert "without colors of groups, because the data is not available" in outcome.stderr


def test_draws_the_learned_weights_of_a_run(tmp_path: Path, ring: Path, invoke: Invoke) -> None:
    pytest.importorskip("vl_convert")
    folder = create(load(ring), tmp_path / "run")
    outcome = invoke("graph", folder.root, "--png", tmp_path / "g.svg")
    assert outcome.exit_code == 0
    assert "without weights: " in outcome.stderr
    for files in folder.peers():
        weights = {str(files.peer): 0.5, str((files.peer + 1) % 6): 0.5}
        files.metrics.write_text(json.dumps({"peer": files.peer, "t": 0, "weights": weights}) + "\n")
    outcome = invoke("graph", folder.root, "--png", tmp_path / "g.svg")
    assert outcome.stderr == f"wrote {tmp_path / 'g.svg'}\n"
    assert "of up to 0.250<" in (tmp_path / "g.svg").read_text()
