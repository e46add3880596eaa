"""Graphs that change by a list or a trace: their rounds, their files, and errors that name the member or the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from p2pfl.errors import RunFileError
from p2pfl.graphs import GRAPHS, Schedule
from p2pfl.messaging.topology import Topology
from p2pfl.run_file.load import from_dict, load
from tests.conftest import tree
from tests.schedules import plan, problem

# ---- lists


def test_list_takes_its_graphs_in_turn() -> None:
    _, schedule = plan("list", graphs=["ring", "star"], every=2)
    ring, star = (GRAPHS.find(name).parse({}).build(10, 0, Path()) for name in ("ring", "star"))
    assert [schedule(t) for t in range(6)] == [ring, ring, star, star, ring, ring]
    assert schedule.period == 4


def test_list_switches_at_given_rounds() -> None:
    _, schedule = plan("list", graphs=["ring", {"name": "el-oracle", "degree": 4}, "star"], at=[0, 3, 7])
    degrees = [max(map(len, schedule(t).neighbors)) for t in range(10)]
    assert degrees == [2, 2, 2, 4, 4, 4, 4, 9, 9, 9]
    assert schedule(3) != schedule(4)
    assert schedule.period is None


def test_random_members_of_a_list_differ_and_may_be_disconnected() -> None:
    one = {"name": "regular", "degree": 3}
    _, schedule = plan("list", graphs=[one, one])
    assert schedule(0) != schedule(1)
    halves = [{"name": "edges", "edges": edges} for edges in ([[0, 1]], [[1, 2]])]
    assert plan("list", peers=3, graphs=halves)[0].edges == [(0, 1), (1, 2)]


def test_list_with_a_directed_member_is_directed() -> None:
    assert GRAPHS.find("list").parse({"graphs": ["ring", "one-peer-exponential"]}).directed  # type: ignore[attr-defined]
    assert not GRAPHS.find("list").parse({"graphs": ["ring", "matchings"]}).directed  # type: ignore[attr-defined]


def test_files_in_a_list_are_stored_in_the_resolved_run_file(tmp_path: Path) -> None:
    (tmp_path / "line.txt").write_text("0 1\n1 2\n2 3")
    (tmp_path / "moves.csv").write_text("0,0,1\n1,2,3\n2\n")
    file = tmp_path / "run.yaml"
    graphs = [{"name": "file", "path": "line.txt"}, {"name": "trace", "path": "moves.csv", "repeat": True}]
    settings = tree(algorithm="dpsgd", peers=4, rounds=6, models="tiny-cnn", graph={"name": "list", "graphs": graphs})
    file.write_text(yaml.safe_dump(settings))
    run = load(file)
    assert [str(path) for path in run.graph.files] == ["line.txt", "moves.csv"]
    (tmp_path / "line.txt").unlink()
    (tmp_path / "moves.csv").unlink()
    again = from_dict(yaml.safe_load(run.to_yaml()))
    assert run.schedule is not None
    assert again.schedule is not None
    assert [again.schedule(t).edges for t in range(6)] == [run.schedule(t).edges for t in range(6)]
    assert [len(again.schedule(t).edges) for t in range(6)] == [3, 1, 3, 1, 3, 0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"graphs": []}, "at least 1"),
        ({"graphs": ["ring", "rong"]}, "graph.graphs.1: name: unknown 'rong'"),
        ({"graphs": ["ring", {"name": "regular"}]}, "graph.graphs.1: degree: missing"),
        ({"graphs": [{"degree": 4}]}, "graph.graphs.0: should be a graph"),
        ({"graphs": ["ring"], "every": 2, "at": [0]}, "give every or at, not both"),
        ({"graphs": ["ring", "star"], "at": [0]}, "at should hold 2 ascending rounds"),
        ({"graphs": ["ring", "star"], "at": [1, 2]}, "the first 0"),
        ({"graphs": ["ring", {"name": "torus", "rows": 3}]}, "graph: graphs.1: 4 peers do not fill a torus"),
    ],
)
def test_errors_in_a_list_name_the_member(given: dict[str, Any], message: str) -> None:
    assert message in problem(peers=4, graph={"name": "list", **given})


# ---- traces


def trace(tmp_path: Path, text: str, **given: Any) -> tuple[Topology, Schedule]:
    (tmp_path / "moves.csv").write_text(text)
    graph = GRAPHS.find("trace").parse({"path": "moves.csv", **given})
    union, schedule = graph.plan(4, 0, tmp_path, rounds=3)
    assert schedule is not None
    return union, schedule


def test_trace_lists_the_edges_of_each_round(tmp_path: Path) -> None:
    text = "round,i,j\n0,0,1  # a meeting\n\n2; 2; 3\n2 1 2\n"
    union, schedule = trace(tmp_path, text)
    assert [schedule(t).edges for t in range(3)] == [[(0, 1)], [], [(1, 2), (2, 3)]]
    assert union.edges == [(0, 1), (1, 2), (2, 3)]


def test_trace_may_have_weights_directions_and_empty_rounds_at_its_end(tmp_path: Path) -> None:
    _, schedule = trace(tmp_path, "0,0,1,0.25\n0,1,2,0.5\n1,3,0,0.5\n2\n", directed=True)
    assert [dict(schedule(0).row(peer)) for peer in range(4)] == [{}, {0: 0.25}, {1: 0.5}, {}]
    assert schedule(2).edges == []


def test_trace_starts_again_if_told_to(tmp_path: Path) -> None:
    _, schedule = trace(tmp_path, "0,0,1\n1,1,2\n1,2,3", repeat=True)
    assert schedule(2) == schedule(0) == schedule(4)
    assert schedule.period == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "moves.csv: no edges; each line should be a round and two peers"),
        ("0,0,1\n0,1\n", "moves.csv:2: expected round, peer, peer and perhaps a weight, found 2 values"),
        ("0,0,1\nx,1,2\n", "moves.csv:2: 'x' is not a round"),
        ("round,i,j\n\n1,1,9\n", "moves.csv:3: '9' is not a peer; the 4 peers are 0 to 3"),
        ("0,2,2\n", "moves.csv:1: the edge connects peer 2 to itself"),
        ("0,0,1,much\n", "moves.csv:1: 'much' is not a weight"),
        ("0,0,1,1.5\n2\n", "round 0: edge 0-1: the weight should be above 0 and at most 1 (found 1.5)"),
        ("0,0,1,0.6\n0,0,2,0.6\n2\n", "round 0: the weights that peer 0 gives to others sum to 1.2; at most 1"),
        ("0,0,1,0.6\n0,1,2\n2\n", "round 0: some edges have a weight and some have none"),
        ("0,0,1\n1,1,2\n1,2,3", "the trace ends with round 1, but the run has 3 rounds"),
        ("0,0,1\n2,2,3\n", "the graphs of all rounds together are not connected"),
    ],
)
def test_errors_in_a_trace_name_its_line_or_round(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RunFileError) as caught:
        trace(tmp_path, text)
    assert message in str(caught.value)


def test_trace_needs_one_source_that_can_be_read(tmp_path: Path) -> None:
    assert "give path or edges" in problem(graph={"name": "trace"})
    assert "none.csv: cannot be read" in problem(graph={"name": "trace", "path": "none.csv"})
    early = {"name": "trace", "edges": [[-1, 0, 1]], "repeat": True}
    assert "should be greater than or equal to 0" in problem(graph=early)
    late = {"name": "trace", "edges": [[0, 0, 1], [5, 1, 2]], "last": 3}
    assert "an edge in round 5, after its last round 3" in problem(graph=late)
