"""SWIFT against its paper: weights by hand, rounds by hand on softmax regression, with and without waiting."""

from __future__ import annotations

import copy
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pfl.algorithms.dpsgd import DPSGD
from p2pfl.algorithms.swift import Hyper, Swift, communication_weights
from p2pfl.messaging.topology import Topology
from p2pfl.tensors import digest
from tests.in_order import run_in_order
from tests.regression import Matrix, gradient, regression_data, theta
from tests.support import messages, peers_of, run_rounds, softmax_regression

KITE = [(0, 1), (0, 2), (0, 3), (1, 2)]
"""A triangle 0, 1, 2, and 3 at its corner 0."""
KITE_WEIGHTS = {0: {1: 1 / 4, 2: 1 / 4, 3: 1 / 4}, 1: {0: 1 / 4, 2: 3 / 8}, 2: {0: 1 / 4, 1: 3 / 8}, 3: {0: 1 / 4}}
"""Peer 0 divides 1 among 4; 1 and 2 divide the other 3/4 each among 2. Metropolis weights have 1/3 for 1 and 2."""
HUBS = [(i, hub) for i in (1, 2, 3) for hub in (4, 5, 6)] + [(4 + n % 3, 7 + n) for n in range(18)]
PLENTY = [(0, 1), (0, 2), (0, 3), *HUBS]
"""Peer 0 has 3 neighbors of degree 4, each of which has 3 hubs of degree 9."""


def weights(edges: list[tuple[int, int]]) -> dict[int, dict[int, float]]:
    topology = Topology.from_edges(1 + max(map(max, edges)), edges)
    return {i: communication_weights(i, topology.neighbors.__getitem__) for i in range(topology.peers)}


def make(peers: int, method: type[Any] = Swift, **hyper: Any) -> list[Any]:
    """Softmax regressions with different initial values; peer i has 6 + i samples."""
    h = method.Hyper.parse({"lr": 0.5, **hyper})
    return peers_of(method, h, lambda me: softmax_regression(4, 3, seed=me), peers, more=1)


def descend(peer: Swift, x: Matrix) -> Matrix:
    return x - peer.hyper.lr * gradient(x, *regression_data(peer.data.train))


def mixed(x: list[Matrix], me: int, row: dict[int, float]) -> Matrix:
    return (1 - sum(row.values())) * x[me] + sum(w * x[j] for j, w in row.items())


# ---- weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ([(0, 1), (1, 2), (2, 3), (3, 0)], {i: {(i - 1) % 4: 1 / 3, (i + 1) % 4: 1 / 3} for i in range(4)}),
        (KITE, KITE_WEIGHTS),
        # 1 and 2 have the same degree; 1 divides 4/5 among 2, but 2 divides 3/4 among 2: the smaller one holds.
        ([(0, 1), (0, 3), (0, 4), (0, 5), (1, 2), (2, 6), (6, 7), (6, 8)], {1: {0: 1 / 5, 2: 3 / 8}}),
        # 1 has chosen 1/10 for each hub, and would choose (1 - 3/10) / 2 for 0. Three of these are more than 1.
        (PLENTY, {0: {1: 1 / 4, 2: 1 / 4, 3: 1 / 4}, 1: {0: 1 / 4, 4: 1 / 10, 5: 1 / 10, 6: 1 / 10}}),
    ],
    ids=["ring", "kite", "equal degrees", "capped"],
)
def test_weights_by_hand(edges: list[tuple[int, int]], expected: dict[int, dict[int, float]]) -> None:
    found = weights(edges)
    for i, row in expected.items():
        assert found[i] == pytest.approx(row)


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 25), st.floats(0.0, 1.0), st.integers(0, 1000))
def test_weights_are_symmetric_and_leave_some_to_the_local_model(peers: int, p: float, seed: int) -> None:
    graph = nx.gnp_random_graph(peers, p, seed=seed)
    found = {i: communication_weights(i, lambda j: sorted(graph[j])) for i in graph}
    for i, row in found.items():
        assert list(row) == sorted(graph[i])
        assert sum(row.values()) < 1
        assert all(weight == found[j][i] > 0 for j, weight in row.items())


# ---- rounds that wait --------------------------------------------------------------------------------------


def test_rounds_average_old_models_and_add_the_step() -> None:
    peers = make(4)
    x = [theta(peer.model) for peer in peers]
    run_rounds(peers, Topology.from_edges(4, KITE), 3)
    for _ in range(3):
        x = [mixed(x, i, KITE_WEIGHTS[i]) + descend(peer, x[i]) - x[i] for i, peer in enumerate(peers)]
    for i, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), x[i], atol=1e-5)
        assert peer.weights() == pytest.approx(dict(sorted({**KITE_WEIGHTS[i], i: peer.weights()[i]}.items())))


def test_every_second_round_averages_and_every_round_sends() -> None:
    peers = make(4, average_every=2)
    x = [theta(peer.model) for peer in peers]
    traffic = run_rounds(peers, Topology.from_edges(4, KITE), 4)
    for t in range(4):
        averages = [mixed(x, i, KITE_WEIGHTS[i]) for i in range(4)] if t in (1, 3) else x
        x = [averages[i] + descend(peer, x[i]) - x[i] for i, peer in enumerate(peers)]
    for i, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), x[i], atol=1e-5)
        degree = len(KITE_WEIGHTS[i])
        assert [messages(record.sent) for record in traffic[i]] == [degree] * 4
        assert [messages(record.received) for record in traffic[i]] == [degree] * 4


def test_on_regular_graphs_it_is_d_psgd() -> None:
    ring = Topology.from_edges(5, [(i, (i + 1) % 5) for i in range(5)])
    swift, dpsgd = make(5), make(5, DPSGD)
    for peers in (swift, dpsgd):
        run_rounds(peers, ring, 3)
    for left, right in zip(swift, dpsgd, strict=True):
        assert digest(left.model.state_dict()) == digest(right.model.state_dict())


def test_weight_of_a_missing_neighbor_goes_to_the_local_model() -> None:
    peers = make(4)
    x = [theta(peer.model) for peer in peers]
    run_rounds(peers, Topology.from_edges(4, KITE), 1, silent=[2])
    expected = mixed(x, 1, {0: 1 / 4}) + descend(peers[1], x[1]) - x[1]
    np.testing.assert_allclose(theta(peers[1].model), expected, atol=1e-6)


# ---- rounds that do not wait -------------------------------------------------------------------------------


def test_the_newest_model_that_has_arrived_is_averaged_again_and_again() -> None:
    peers = make(3, average_every=2)
    line = Topology.from_edges(3, [(0, 1), (1, 2)])  # all weights are 1/3
    taken = run_in_order(copies := copy.deepcopy(peers), line, [0, 0, 1, 1, 1, 1])
    # Peer 0 sends this in its round 1. Nothing has arrived there.
    trained = descend(peers[0], theta(peers[0].model))
    np.testing.assert_allclose(theta(copies[0].model), descend(peers[0], trained), atol=1e-6)
    x = theta(peers[1].model)
    for _ in range(2):
        x = descend(peers[1], x)
        x = (2 * x + trained) / 3 + descend(peers[1], x) - x
    np.testing.assert_allclose(theta(copies[1].model), x, atol=1e-5)
    rounds = [[(take.t, dict(take.rounds)) for take in each] for each in taken]
    assert rounds == [[(t, {1: []}) for t in range(2)], [(t, {0: [1], 2: []}) for t in range(4)], []]


def test_epochs_or_steps() -> None:
    assert Hyper.parse({}).steps == 1
    assert Hyper.parse({"local_epochs": 2}).steps is None
