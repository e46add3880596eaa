"""Time-varying graphs: the properties of every schedule, its errors, and what a resolved run file keeps of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from p2pfl.errors import RunFileError
from p2pfl.graphs import GRAPHS, Schedule, TimeVaryingGraph
from p2pfl.graphs.finite_time import base_graph, simple_base_graph
from p2pfl.messaging.topology import WeightedTopology, averaging_gap
from p2pfl.run_file.load import from_dict, load
from tests.conftest import tree
from tests.schedules import plan, problem, run_of

TIME_VARYING = [name for name, graph in GRAPHS.items() if issubclass(graph, TimeVaryingGraph)]
SECTIONS: dict[str, dict[str, Any]] = {
    "one-peer-exponential": {},
    "base-k": {"degree": 2},
    "el-oracle": {"degree": 4},
    "el-local": {"receivers": 2},
    "matchings": {},
    "list": {"graphs": ["ring", {"name": "regular", "degree": 3}, "matchings"]},
    "trace": {"edges": [[t, t % 7, (t + 1) % 7 + 3 * (t % 7 == 6)] for t in range(10)], "allow_disconnected": True},
}


def product(schedule: Schedule, rounds: int) -> Any:
    result = np.eye(schedule(0).peers)
    for t in range(rounds):
        result = schedule(t).mixing_matrix() @ result
    return result


# ---- every schedule


def test_every_graph_that_changes_is_tested_here() -> None:
    assert set(SECTIONS) == set(TIME_VARYING)


@pytest.mark.parametrize("name", TIME_VARYING)
def test_union_holds_the_edges_of_all_rounds_and_no_others(name: str) -> None:
    union, schedule = plan(name, **SECTIONS[name])
    assert set(union.edges) == {edge for t in range(10) for edge in schedule(t).edges}


@pytest.mark.parametrize("name", TIME_VARYING)
def test_equal_seeds_give_equal_rounds_and_other_seeds_other_random_ones(name: str) -> None:
    _, schedule = plan(name, **SECTIONS[name])
    _, again = plan(name, **SECTIONS[name])
    _, other = plan(name, seed=6, **SECTIONS[name])
    order = [7, 2, 9, 0, 2]
    assert [schedule(t) for t in order] == [again(t) for t in order]
    random = name in ("el-oracle", "el-local", "matchings", "list")
    assert any(schedule(t) != other(t) for t in range(10)) == random


def test_rounds_far_apart_are_computed_again() -> None:
    _, schedule = plan("el-oracle", degree=4)
    first = schedule(0)
    assert all(schedule(t) is schedule(t) for t in range(1, 100))
    assert schedule(0) == first
    assert schedule(0) is not first


@pytest.mark.parametrize("name", TIME_VARYING)
def test_rows_sum_to_one_and_those_of_undirected_graphs_are_symmetric(name: str) -> None:
    _, schedule = plan(name, **SECTIONS[name])
    for t in range(10):
        weights = schedule(t).mixing_matrix()
        assert weights.min() >= 0.0
        np.testing.assert_allclose(weights.sum(axis=1), 1.0)
        if not schedule(t).directed:
            np.testing.assert_array_equal(weights, weights.T)
        if name != "el-local":
            np.testing.assert_allclose(weights.sum(axis=0), 1.0)


@pytest.mark.parametrize("name", TIME_VARYING)
def test_sources_and_receivers_are_the_two_ends_of_the_same_edges(name: str) -> None:
    _, schedule = plan(name, **SECTIONS[name])
    for graph in map(schedule, range(10)):
        sent = {(i, j) for i in range(10) for j in graph.receivers[i]}
        assert sent == {(j, i) for i in range(10) for j in graph.sources[i]}
        assert all(list(graph.row(i)) == sorted(graph.sources[i]) for i in range(10))
        assert graph.directed == (sent != {(j, i) for i, j in sent})


@pytest.mark.parametrize("name", TIME_VARYING)
def test_resolved_run_loads_as_the_same_schedule_on_another_host(name: str) -> None:
    run = run_of(peers=10, rounds=10, graph={"name": name, **SECTIONS[name]}, models="tiny-cnn")
    again = from_dict(yaml.safe_load(run.to_yaml()))
    assert run.schedule is not None
    assert again.schedule is not None
    assert again.topology == run.topology
    assert [again.schedule(t) for t in range(10)] == [run.schedule(t) for t in range(10)]
    assert again.config_hash() == run.config_hash()


def test_a_single_peer_has_no_edges() -> None:
    for name in ("one-peer-exponential", "base-k", "matchings"):
        union, schedule = plan(name, peers=1)
        assert union.edges == schedule(3).edges == []


# ---- finite-time averages


@pytest.mark.parametrize("peers", [2, 4, 8, 32])
def test_one_peer_exponential_averages_exactly_in_a_period(peers: int) -> None:
    _, schedule = plan("one-peer-exponential", peers=peers)
    assert schedule.period == np.log2(peers)
    assert all(len(receivers) == 1 for t in range(5) for receivers in schedule(t).receivers)
    np.testing.assert_allclose(product(schedule, schedule.period or 0), 1.0 / peers)


def test_one_peer_exponential_of_six_peers_does_not_average_exactly() -> None:
    _, schedule = plan("one-peer-exponential", peers=6)
    assert schedule.period == 3
    assert averaging_gap(map(schedule, range(3))) < 0.99


@pytest.mark.exhaustive
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_base_k_averages_exactly_for_every_number_of_peers(degree: int) -> None:
    for peers in range(2, 40):
        _, schedule = plan("base-k", peers=peers, degree=degree)
        assert schedule.period is not None
        assert schedule.period <= 2 * np.log(peers) / np.log(degree + 1) + 2  # Theorem 1
        np.testing.assert_allclose(product(schedule, schedule.period), 1.0 / peers, atol=1e-12)
        for t in range(schedule.period):
            assert max(map(len, schedule(t).neighbors)) <= degree


def test_base_k_takes_the_shorter_of_the_two_constructions() -> None:
    both = [(len(base_graph(range(n), 1)), len(simple_base_graph(range(n), 1))) for n in range(2, 65)]
    assert all(shorter <= simple for shorter, simple in both)
    assert any(shorter < simple for shorter, simple in both)


# ---- random graphs


def test_el_oracle_draws_another_regular_graph_in_every_round() -> None:
    union, schedule = plan("el-oracle", peers=32, degree=4, rounds=100)
    graphs = [schedule(t) for t in range(20)]
    assert {graph.degree(peer) for graph in graphs for peer in range(32)} == {4}
    assert len(set(graphs)) == 20
    assert len(union.edges) == 32 * 31 // 2


def test_el_oracle_is_complete_or_perfect_at_the_extremes() -> None:
    assert len(plan("el-oracle", peers=6, degree=5)[1](0).edges) == 15
    assert len(plan("el-oracle", peers=6, degree=1)[1](0).edges) == 3


def test_el_local_sends_to_s_others_and_takes_the_mean_of_what_arrives() -> None:
    _, schedule = plan("el-local", peers=20, receivers=3)
    received = set()
    for graph in map(schedule, range(10)):
        assert all(len(receivers) == 3 and i not in receivers for i, receivers in enumerate(graph.receivers))
        for peer in range(20):
            received.add(len(graph.sources[peer]))
            assert set(graph.row(peer).values()) <= {1.0 / (1 + len(graph.sources[peer]))}
    assert len(received) > 3


@pytest.mark.parametrize("peers", [8, 9])
def test_matchings_pair_all_but_at_most_one(peers: int) -> None:
    _, schedule = plan("matchings", peers=peers)
    for graph in map(schedule, range(10)):
        assert sorted(map(len, graph.neighbors)) == [0] * (peers % 2) + [1] * (peers - peers % 2)
        assert {weight for peer in range(peers) for weight in graph.row(peer).values()} == {0.5}


def test_random_graphs_spread_information_faster_than_a_static_one() -> None:
    """The static random graph of the same degree needs more rounds for the same agreement."""
    static = GRAPHS.find("regular").parse({"degree": 4}).build(32, 5, Path())
    _, schedule = plan("el-oracle", peers=32, degree=4)
    assert averaging_gap(map(schedule, range(8))) > averaging_gap([static] * 8)


def test_gap_of_one_symmetric_round_is_its_spectral_gap() -> None:
    ring = GRAPHS.find("ring").parse({}).build(8, 0, Path())
    assert averaging_gap([ring]) == pytest.approx(ring.spectral_gap)
    pairs = WeightedTopology.from_arcs(2, [(0, 1, 0.25), (1, 0, 0.25)])
    assert pairs.spectral_gap == pytest.approx(0.5)
    assert averaging_gap([]) == 1.0


# ---- graphs and methods


@pytest.mark.parametrize(
    ("graph", "algorithm", "message"),
    [
        ("matchings", "l2c", "l2c learns which neighbors to keep for good, so the graph must stay the same"),
        ("matchings", "meta-l2c", "but 'matchings' changes"),
        ("matchings", "flt", "flt learns which neighbors to keep"),
        ("base-k", "mapl", "mapl learns which neighbors to keep"),
        ("base-k", "mapl+", "mapl+ learns which neighbors to keep"),
        ("one-peer-exponential", "dfml", "dfml has peers answer each other, so edges need both directions"),
        ("one-peer-exponential", "fedfomo", "fedfomo has peers answer each other, so edges need both directions"),
        ({"name": "el-local", "receivers": 2}, "fedavg-dec", "the edges of 'el-local' have one"),
        ({"name": "list", "graphs": ["ring", "one-peer-exponential"]}, "fedprox-dec", "the edges of 'list' have one"),
        ("one-peer-exponential", "fedrolex", "fedrolex has peers answer each other, so edges need both directions"),
    ],
)
def test_methods_refuse_graphs_that_do_not_suit_them(
    graph: Any, algorithm: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree(models="tiny-cnn", algorithm=algorithm, graph=graph), sort_keys=False))
    line = 1 + [text.startswith("graph:") for text in file.read_text().splitlines()].index(True)
    with pytest.raises(RunFileError) as caught:
        load(file)
    assert f"run.yaml:{line}: graph: " in str(caught.value)
    assert message in str(caught.value)


def test_other_methods_accept_them() -> None:
    averaging = ("dpsgd", "sgp", "dfedavgm", "fedavg", "lg-fedavg", "fedsim", "fedclassavg", "pfedsim", "ditto")
    for algorithm in (
        *averaging,
        "local",
        "fedproto",
        "fedtgp",
        "feddistill",
        "fedgen",
        "fml",
        "fedkd",
        "fedstyle",
        "def-kt",
    ):
        run = run_of(models="tiny-cnn", algorithm=algorithm, graph={"name": "el-local", "receivers": 2})
        assert run.schedule is not None
    for algorithm in (
        "dfml",
        "fedavg-dec",
        "fedprox-dec",
        "fml-dec",
        "def-kt",
        "heterofl",
        "fedrolex",
        "fedfomo",
        "cga",
    ):
        assert run_of(models="tiny-cnn", algorithm=algorithm, graph="matchings").schedule is not None


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ({"name": "el-oracle", "degree": 4}, "round 0: degree 4 needs more than 4 peers; there are 4"),
        ({"name": "el-local", "receivers": 4}, "round 0: 4 receivers need more than 4 peers; there are 4"),
    ],
)
def test_parameters_that_do_not_fit_the_peers_are_errors(graph: Any, message: str) -> None:
    assert message in problem(peers=4, graph=graph)


def test_odd_degree_of_an_odd_number_of_peers_is_an_error() -> None:
    assert "degree or peers must be even" in problem(peers=5, graph={"name": "el-oracle", "degree": 3})


# ---- one's own


class Mine(TimeVaryingGraph):
    """Whatever ``edges`` says."""

    edges: Any = staticmethod(lambda t: [(0, 1)])

    def edges_at(self, t: int, peers: int, seed: int, base: Path) -> Any:
        return type(self).edges(t)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(0, 1), (0,)], "round 0: an edge should be (i, j) or (i, j, weight), not (0,)"),
        ([(0, 1), 5], "not 5"),
        ([(0, 1, 0.5, 2)], "not (0, 1, 0.5, 2)"),
        ([("a", 1)], "not ('a', 1)"),
        ([(0, 3)], "round 0: edge 0-3: no peer 3; the 3 peers are 0 to 2"),
        ([(1, 1)], "edge 1-1 connects a peer to itself"),
        ([(0, 1, float("nan"))], "the weight should be above 0"),
        ([(0, 1, 0.2), (1, 2, 0.2), (1, 0, 0.3)], "edge 0-1 is listed twice; which weight counts?"),
        ([(0, 1)], "not connected; their union has the components 0 1 | 2"),
    ],
)
def test_mistakes_in_ones_own_edges_name_the_round(edges: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mine, "edges", staticmethod(lambda t: edges))
    with pytest.raises(RunFileError) as caught:
        Mine().plan(3, 0, Path(), 2)
    assert message in str(caught.value)


def test_edges_that_differ_between_two_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([[(0, 1)], [(1, 2)]])
    monkeypatch.setattr(Mine, "edges", staticmethod(lambda t: next(drawn)))
    with pytest.raises(RunFileError, match="differ between two calls"):
        Mine().plan(3, 0, Path(), 2)


def test_numbers_of_numpy_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = [(np.int64(0), np.int64(1), np.float64(0.5)), (np.int64(1), np.int64(2), np.float64(0.25))]
    monkeypatch.setattr(Mine, "edges", staticmethod(lambda t: edges))
    _, schedule = Mine().plan(3, 0, Path(), 2)
    assert schedule(0).row(1) == {0: 0.5, 2: 0.25}
