"""D-PSGD against its paper: rounds by hand on softmax regression, and properties of the mixing matrix."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pfl.algorithms.dpsgd import DPSGD, Hyper, Parameters, average_neighborhood, with_self_weight
from p2pfl.graphs.static import SmallWorld
from p2pfl.messaging.topology import Topology
from p2pfl.options import OptionErrors
from tests.regression import Matrix, gradient, regression_data, theta
from tests.support import mean_at, messages, payload, peers_of, run_rounds, softmax_regression

property_of = settings(deadline=None, max_examples=50)

INPUTS, CLASSES = 4, 3
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
W = np.array([[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]])


def make(h: Hyper, peers: int = 3) -> list[DPSGD]:
    """Softmax regressions with different initial values; peer i has 6 + i samples."""
    return peers_of(DPSGD, h, lambda me: softmax_regression(INPUTS, CLASSES, seed=me), peers, more=1)


def descend(peer: DPSGD, x: Matrix, steps: int) -> Matrix:
    """Take full-batch gradient steps on a peer's samples."""
    for _ in range(steps):
        x = x - peer.hyper.lr * gradient(x, *regression_data(peer.data.train))
    return x


# ---- rounds by hand ----------------------------------------------------------------------------------------


def test_reference_gradient_matches_the_loss() -> None:
    (peer,) = make(Hyper(), peers=1)
    inputs, labels = regression_data(peer.data.train)
    x = torch.tensor(inputs[:, :-1], dtype=torch.float32).reshape(-1, 1, 2, 2)
    peer.loss(x, torch.from_numpy(labels))["ce"].backward()  # type: ignore[no-untyped-call]
    head: Any = peer.model.head
    found = torch.cat([head.weight.grad, head.bias.grad[:, None]], dim=1)
    np.testing.assert_allclose(found, gradient(theta(peer.model), inputs, labels), atol=1e-6)


@pytest.mark.parametrize("steps", [None, 1, 4])
def test_round_averages_old_models_and_adds_the_local_displacement(steps: int | None) -> None:
    peers = make(Hyper(local_steps=steps, lr=0.5))
    x = [theta(peer.model) for peer in peers]
    run_rounds(peers, LINE, 1)
    for me, peer in enumerate(peers):
        # x_i ← Σ_j W_ij x_j − η ∇F_i(x_i); with several steps, their displacement
        moved = descend(peer, x[me], steps or 1) - x[me]
        expected = sum(W[me, j] * x[j] for j in range(3)) + moved
        np.testing.assert_allclose(theta(peer.model), expected, atol=1e-6)


def test_adapt_then_combine_averages_the_trained_models() -> None:
    peers = make(Hyper(local_steps=2, order="atc", lr=0.5))
    trained = [descend(peer, theta(peer.model), 2) for peer in peers]
    run_rounds(peers, LINE, 1)
    for me, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), sum(W[me, j] * trained[j] for j in range(3)), atol=1e-6)


def test_combine_then_adapt_with_epochs_adds_what_they_change() -> None:
    steps, epochs = (make(Hyper.parse({"lr": 0.5, **how})) for how in ({}, {"local_epochs": 1, "order": "cta"}))
    for peers in (steps, epochs):  # one batch of all samples: an epoch is a step
        run_rounds(peers, LINE, 2)
    for left, right in zip(steps, epochs, strict=True):
        np.testing.assert_array_equal(theta(left.model), theta(right.model))


def test_several_rounds_match_algorithm_1() -> None:
    peers = make(Hyper(lr=0.5))
    x = np.array([theta(peer.model) for peer in peers])
    run_rounds(peers, LINE, 5)
    for _ in range(5):
        steps = np.array([0.5 * gradient(x[me], *regression_data(peer.data.train)) for me, peer in enumerate(peers)])
        x = np.einsum("ij,jkl->ikl", W, x) - steps
    for me, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), x[me], atol=1e-5)


@pytest.mark.parametrize("epochs", [1, 3])
def test_local_epochs_averages_the_trained_models(epochs: int) -> None:
    peers = make(Hyper(local_epochs=epochs, lr=0.5))
    trained = [descend(peer, theta(peer.model), epochs) for peer in peers]
    run_rounds(peers, LINE, 1)
    for me, peer in enumerate(peers):
        expected = sum(W[me, j] * trained[j] for j in range(3))
        np.testing.assert_allclose(theta(peer.model), expected, atol=1e-6)


def test_mean_model_follows_the_mean_gradient() -> None:
    peers = make(Hyper(lr=0.5), peers=5)
    topology = Topology.from_edges(5, [(0, 1), (1, 2), (2, 3), (2, 4), (0, 2)])
    for _ in range(3):
        x = [theta(peer.model) for peer in peers]
        gradients = [gradient(x[me], *regression_data(peer.data.train)) for me, peer in enumerate(peers)]
        run_rounds(peers, topology, 1)
        found = np.mean([theta(peer.model) for peer in peers], axis=0)
        np.testing.assert_allclose(found, np.mean(x, axis=0) - 0.5 * np.mean(gradients, axis=0), atol=1e-6)


@pytest.mark.exhaustive
def test_models_converge_to_their_mean_without_gradients() -> None:
    peers = make(Hyper(lr=1e-12))
    mean = np.mean([theta(peer.model) for peer in peers], axis=0)
    run_rounds(peers, LINE, 30)
    for peer in peers:
        np.testing.assert_allclose(theta(peer.model), mean, atol=1e-5)


def test_weight_of_a_missing_neighbor_goes_to_the_local_model() -> None:
    peers = make(Hyper(lr=0.5))
    x = [theta(peer.model) for peer in peers]
    traffic = run_rounds(peers, LINE, 1, silent=[2])
    assert traffic[1][0].missing == {"Parameters": [2]}
    expected = 2 / 3 * x[1] + 1 / 3 * x[0] - 0.5 * gradient(x[1], *regression_data(peers[1].data.train))
    np.testing.assert_allclose(theta(peers[1].model), expected, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("value", [math.nan, 1e30, -1e9])
@pytest.mark.parametrize("amount", ["local_steps", "local_epochs"])
def test_diverged_peer_does_not_affect_its_neighbors(amount: str, value: float) -> None:
    without, beside = (make(Hyper.parse({"lr": 0.5, amount: 1})) for _ in range(2))
    with torch.no_grad():
        beside[2].model.linear_head.weight[0, 0] = value
    run_rounds(without, LINE, 3, silent=[2])
    traffic = run_rounds(beside, LINE, 3)
    assert [record.missing for record in traffic[1]] == [{"Parameters": [2]}] * 3
    for left, right in zip(without[:2], beside[:2], strict=True):
        np.testing.assert_array_equal(theta(left.model), theta(right.model))


def test_sends_only_parameters() -> None:
    peers = make(Hyper())
    traffic = run_rounds(peers, LINE, 2)
    numbers = CLASSES * (INPUTS + 1)
    assert [[messages(record.sent, "Parameters") for record in peer] for peer in traffic] == [[1, 1], [2, 2], [1, 1]]
    assert sum(payload(record.sent) for peer in traffic for record in peer) == 2 * 2 * 2 * 4 * numbers
    (layout,) = peers[0].layouts()
    assert {key: str(spec) for (_, key), spec in layout.tensors.items()} == {
        "head.weight": "float32[3, 4]",
        "head.bias": "float32[3]",
    }


def test_momentum_and_weight_decay_match_sgd() -> None:
    (peer,) = make(Hyper(lr=0.5, momentum=0.5, weight_decay=0.1, local_steps=2), peers=1)
    x = theta(peer.model)
    start, velocity = x, np.zeros_like(x)
    run_rounds([peer], Topology.from_edges(1, []), 1)
    for _ in range(2):
        velocity = 0.5 * velocity + gradient(x, *regression_data(peer.data.train)) + 0.1 * x
        x = x - 0.5 * velocity
    np.testing.assert_allclose(theta(peer.model), x, atol=1e-6)
    assert not np.allclose(x, start)


# ---- mixing matrix --------------------------------------------------------------------------------------------


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    peers = draw(st.integers(2, 9))
    pairs = [(i, j) for i in range(peers) for j in range(i)]
    return Topology.from_edges(peers, draw(st.lists(st.sampled_from(pairs))))


@property_of
@given(topologies())
def test_rows_make_up_the_metropolis_matrix(topology: Topology) -> None:
    matrix = np.zeros((topology.peers, topology.peers))
    for me in range(topology.peers):
        neighbors = topology.neighbors[me]
        row = topology.row(me)
        assert set(row) == set(neighbors)
        complete = with_self_weight(row, me)
        matrix[me, list(complete)] = list(complete.values())
    np.testing.assert_allclose(matrix, topology.mixing_matrix(), atol=1e-15)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-15)
    np.testing.assert_allclose(matrix.sum(axis=0), 1.0)
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0)
    assert (matrix >= -1e-15).all()


def test_self_weight_on_the_group_ring_of_l2cs_paper_is_one_eleventh() -> None:
    """Each of 100 peers has the 10 nearest ones as neighbors (Li et al., section 4)."""
    topology = SmallWorld(degree=10, p=0.0).build(100, seed=3, base=Path())
    for me in (0, 42, 99):
        neighbors = topology.neighbors[me]
        assert {(j - me + 5) % 100 for j in neighbors} == set(range(11)) - {5}
        row = topology.row(me)
        assert with_self_weight(row, me) == pytest.approx(dict.fromkeys((me, *neighbors), 1 / 11))


def test_weights_include_the_self_weight() -> None:
    peers = make(Hyper())
    assert peers[1].weights() == {1: 1.0}
    run_rounds(peers, LINE, 1)
    assert peers[0].weights() == pytest.approx({0: 2 / 3, 1: 1 / 3})
    assert peers[1].weights() == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})


def test_average_does_not_depend_on_the_order_of_arrival() -> None:
    stream = np.random.default_rng(0)
    models = {j: {"x": torch.from_numpy(stream.normal(size=50).astype(np.float32))} for j in range(6)}
    row = {j: 0.15 for j in range(6) if j != 3}
    received = {j: Parameters(model) for j, model in models.items() if j != 3}
    averages = [{"x": models[3]["x"].clone()} for _ in range(2)]
    average_neighborhood(mean_at(3), averages[0], received, row)
    average_neighborhood(mean_at(3), averages[1], dict(reversed(received.items())), row)
    found = averages[0]["x"]
    assert torch.equal(found, averages[1]["x"])
    expected = torch.zeros(50)
    for j in range(6):
        expected = expected + models[j]["x"] * (0.15 if j != 3 else 1 - 5 * 0.15)
    torch.testing.assert_close(found, expected)


def test_rejects_both_local_steps_and_local_epochs() -> None:
    with pytest.raises(OptionErrors, match="give local_steps or local_epochs, not both"):
        Hyper.parse({"local_steps": 1, "local_epochs": 1})
