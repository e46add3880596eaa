"""Topology, and the generators of graphs in graphs.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pfl.errors import RunFileError
from p2pfl.graphs import GRAPHS
from p2pfl.graphs.static import Bridge, Complete, Edges, ErdosRenyi, FromFile, Torus
from p2pfl.messaging.topology import Topology

HERE = Path()

# No deadline: a slow or busy machine is no failure.
property_of = settings(deadline=None, max_examples=40)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    peers = draw(st.integers(1, 12))
    pairs = [(i, j) for i in range(peers) for j in range(i)]
    return Topology.from_edges(peers, draw(st.lists(st.sampled_from(pairs))) if pairs else [])


def as_networkx(topology: Topology) -> nx.Graph:
    graph = nx.Graph(topology.edges)
    graph.add_nodes_from(range(topology.peers))
    return graph


def build(name: str, peers: int, seed: int = 0, base: Path = HERE, **given: Any) -> Topology:
    return GRAPHS.find(name).parse(given).build(peers, seed, base)


# ---- Topology ----------------------------------------------------------------------------------------------


@property_of
@given(topologies())
def test_neighbors_are_mutual_ascending_and_consistent_with_the_edges(topology: Topology) -> None:
    for i, near in enumerate(topology.neighbors):
        assert list(near) == sorted(set(near) - {i})
        assert all(i in topology.neighbors[j] for j in near)
        assert topology.degree(i) == len(near)
    assert topology.edges == [(i, j) for i, near in enumerate(topology.neighbors) for j in near if i < j]
    assert Topology.from_edges(topology.peers, [(j, i) for i, j in topology.edges]) == topology


@property_of
@given(topologies())
def test_metropolis_weights_are_symmetric_doubly_stochastic_and_follow_the_formula(topology: Topology) -> None:
    weights = topology.mixing_matrix()
    assert weights.dtype == np.float64
    np.testing.assert_array_equal(weights, weights.T)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0)
    assert (weights >= 0).all()
    for i in range(topology.peers):
        for j in range(topology.peers):
            if i != j:
                linked = j in topology.neighbors[i]
                expected = 1 / (1 + max(topology.degree(i), topology.degree(j))) if linked else 0.0
                assert weights[i, j] == expected


@property_of
@given(topologies())
def test_the_spectral_gap_is_zero_if_and_only_if_the_graph_is_disconnected(topology: Topology) -> None:
    assert (topology.spectral_gap > 1e-9) == topology.connected
    assert topology.spectral_gap <= 1.0


def test_the_spectral_gap_of_complete_graphs_and_rings() -> None:
    assert build("complete", 5).spectral_gap == pytest.approx(1.0)  # one step averages
    # A ring's metropolis matrix is circulant: eigenvalues (1 + 2 cos(2 pi k / n)) / 3.
    assert build("ring", 8).spectral_gap == pytest.approx(1 - (1 + 2 * np.cos(np.pi / 4)) / 3)


@property_of
@given(topologies())
def test_components_partition_the_peers(topology: Topology) -> None:
    assert sorted(sum(topology.components, ())) == list(range(topology.peers))
    component_of = {peer: component for component in topology.components for peer in component}
    assert all(component_of[i] == component_of[j] for i, j in topology.edges)
    assert topology.connected == (len(topology.components) == 1)
    assert (topology.diameter is None) == (not topology.connected)


@property_of
@given(topologies())
def test_the_spanning_tree_is_breadth_first_from_the_lowest_id(topology: Topology) -> None:
    parent, children, *_ = topology.spanning_tree
    assert len(parent) == len(children) == topology.peers
    for component in topology.components:
        depth = nx.single_source_shortest_path_length(as_networkx(topology), component[0])
        assert parent[component[0]] is None
        for peer in component[1:]:
            above = parent[peer]
            assert above in topology.neighbors[peer]
            assert depth[above] == depth[peer] - 1
            assert peer in children[above]
    assert sum(map(len, children)) == topology.peers - len(topology.components)
    assert all(list(ids) == sorted(ids) for ids in children)


# ---- generators --------------------------------------------------------------------------------------------


def test_small_graphs_have_the_expected_edges() -> None:
    assert build("complete", 4).edges == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert build("ring", 4).edges == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert build("ring", 2).edges == [(0, 1)]
    assert build("line", 4).edges == [(0, 1), (1, 2), (2, 3)]
    assert build("star", 4).edges == [(0, 1), (0, 2), (0, 3)]
    assert build("edges", 3, edges=[[2, 1], [0, 1], [1, 2]]).edges == [(0, 1), (1, 2)]


def test_a_single_peer_has_no_neighbors() -> None:
    topology = build("complete", 1)
    assert topology.neighbors == ((),)
    assert topology.connected
    assert topology.diameter == 0
    assert topology.spectral_gap == 1.0
    assert topology.mixing_matrix() == [[1.0]]
    assert topology.spanning_tree == ((None,), ((),), (0,), (0,), (1,))


def test_a_torus_is_as_square_as_possible() -> None:
    topology = build("torus", 12)  # 3 x 4
    assert {topology.degree(peer) for peer in range(12)} == {4}
    assert topology.neighbors[0] == (1, 3, 4, 8)
    assert build("torus", 12, rows=2).neighbors[0] == (1, 5, 6)  # a side of 2 has one edge, not two
    assert build("torus", 12, cols=6) == build("torus", 12, rows=2)
    assert build("torus", 4).edges == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert build("torus", 7, rows=1) == build("ring", 7)


def test_a_bridge_joins_the_median_peers_of_two_cliques() -> None:
    topology = Bridge().build(10, 0, HERE)
    across = [(i, j) for i, j in topology.edges if i % 2 != j % 2]
    assert across == [(4, 5)]
    assert len(topology.edges) == 10 + 10 + 1
    assert Bridge().build(2, 0, HERE).edges == [(0, 1)]


def test_random_graphs_have_the_expected_degrees_and_edges() -> None:
    regular = build("regular", 10, degree=3)
    assert {regular.degree(peer) for peer in range(10)} == {3}
    assert build("small-world", 10, degree=4, p=0.0).neighbors[0] == (1, 2, 8, 9)
    assert len(build("barabasi-albert", 10, links=2).edges) == 16
    assert len(build("erdos-renyi", 10, p=1.0).edges) == 45


RANDOM: dict[str, dict[str, Any]] = {
    "regular": {"degree": 3},
    "erdos-renyi": {"p": 0.4},
    "small-world": {"degree": 4, "p": 0.5},
    "barabasi-albert": {"links": 2},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RANDOM)
@property_of
@given(seed=st.integers(0, 2**32))
def test_random_graphs_are_connected_and_determined_by_the_seed(name: str, seed: int) -> None:
    topology = build(name, 12, seed, **RANDOM[name])
    assert topology.connected
    assert topology == build(name, 12, seed, **RANDOM[name])


@pytest.mark.parametrize("name", RANDOM)
def test_random_graphs_depend_on_the_seed(name: str) -> None:
    assert len({build(name, 12, seed, **RANDOM[name]) for seed in range(5)}) > 1


def test_sparse_random_graphs_are_redrawn_until_connected() -> None:
    sparse: dict[str, Any] = {"p": 0.12}
    first = [build("erdos-renyi", 16, seed, allow_disconnected=True, **sparse) for seed in range(20)]
    assert not all(topology.connected for topology in first)
    assert all(build("erdos-renyi", 16, seed, **sparse).connected for seed in range(20))


# ---- invalid parameters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "peers", "given", "message"),
    [
        ("regular", 4, {"degree": 4}, "degree 4 needs more than 4 peers; there are 4"),
        ("regular", 5, {"degree": 3}, "degree 3 with 5 peers: degree or peers must be even"),
        ("small-world", 9, {"degree": 3, "p": 0.1}, "degree 3 is odd"),
        ("small-world", 4, {"degree": 4, "p": 0.1}, "needs more than 4 peers"),
        ("barabasi-albert", 3, {"links": 3}, "links 3 needs more than 3 peers"),
        ("torus", 7, {}, "7 peers make no grid of at least 2 x 2"),
        ("torus", 12, {"rows": 5}, "12 peers do not fill a torus of 5 x ?"),
        ("torus", 4, {"cols": 8}, "4 peers do not fill a torus of ? x 8"),
        ("bridge", 1, {}, "at least 2 peers"),
        ("edges", 3, {"edges": [[0, 1], [1, 3]]}, "edge 1-3: no peer 3; the 3 peers are 0 to 2"),
        ("edges", 3, {"edges": [[0, 1], [-1, 2]]}, "edge -1-2: no peer -1"),
        ("edges", 3, {"edges": [[0, 1], [2, 2]]}, "edge 2-2 connects a peer to itself"),
        ("erdos-renyi", 9, {"p": 0.0}, "none of 100 draws is connected"),
    ],
)
def test_invalid_parameters_are_rejected(name: str, peers: int, given: dict[str, Any], message: str) -> None:
    with pytest.raises(RunFileError) as caught:
        build(name, peers, **given)
    assert message in str(caught.value)


def test_a_disconnected_graph_is_rejected_with_its_components_unless_allowed() -> None:
    edges = ((0, 1), (1, 2), (2, 3), (3, 4), (6, 7))
    with pytest.raises(RunFileError) as caught:
        Edges(edges=edges).build(11, 0, HERE)
    assert "0 1 2 3 … (5 peers) | 5 | 6 7 | 8 | and 2 more; add edges" in str(caught.value)
    assert "allow_disconnected: true" in str(caught.value)
    assert not Edges(edges=edges, allow_disconnected=True).build(11, 0, HERE).connected


# ---- files -------------------------------------------------------------------------------------------------


def test_an_edge_list_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "net.txt").write_text("# two hops\n0 1\n\n1,2  # comma\n2;3\n")
    assert build("file", 4, base=tmp_path, path="net.txt") == build("line", 4)


def test_a_graphml_file_is_read(tmp_path: Path) -> None:
    nx.write_graphml(nx.cycle_graph(5), tmp_path / "net.graphml")
    assert build("file", 5, base=tmp_path, path="net.graphml") == build("ring", 5)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("a.txt", "0 1\n1 x\n", "a.txt:2: 'x' is not a peer; the 3 peers are 0 to 2"),
        ("a.txt", "0 1\n1 3\n", "a.txt:2: '3' is not a peer"),
        ("a.txt", "0 1 0.5\n", "a.txt:1: expected two peer ids, found '0 1 0.5'"),
        ("a.txt", "0 1\n", "not connected; it has the components 0 1 | 2"),
        ("a.graphml", "no xml", "a.graphml: not GraphML"),
        ("a.graphml", "<graphml/>", "a.graphml: not GraphML"),
        (
            "a.graphml",
            "\n".join(nx.generate_graphml(nx.DiGraph([(0, 1), (1, 2)]))),
            "a.graphml: the graph is directed",
        ),
        (
            "a.graphml",
            "\n".join(nx.generate_graphml(nx.Graph([("alice", "bob")]))),
            "a.graphml: 'alice' is not a peer",
        ),
    ],
)
def test_unusable_files_are_rejected_with_a_reason(tmp_path: Path, file: str, text: str, message: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(RunFileError) as caught:
        build("file", 3, base=tmp_path, path=file)
    assert message in str(caught.value)


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"none\.txt: cannot be read: No such file"):
        build("file", 3, base=tmp_path, path="none.txt")


def test_a_resolved_section_builds_the_same_graph_without_other_files(tmp_path: Path) -> None:
    (tmp_path / "net.txt").write_text("0 1\n1 2\n")
    from_file = FromFile(path=Path("net.txt"))
    topology = from_file.build(3, 0, tmp_path)
    section = from_file.resolved("file", topology)
    assert section == {"name": "edges", "allow_disconnected": False, "edges": [[0, 1], [1, 2]]}
    assert build(section.pop("name"), 3, base=tmp_path / "elsewhere", **section) == topology
    assert Torus(rows=3).resolved("torus", topology) == {
        "name": "torus", "allow_disconnected": False, "rows": 3, "cols": None
    }  # fmt: skip
    assert Complete().resolved("complete", topology) == {"name": "complete", "allow_disconnected": False}
    assert ErdosRenyi(p=0.5).to_dict() == {"allow_disconnected": False, "p": 0.5}
