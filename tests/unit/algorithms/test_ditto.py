"""Ditto against its paper: rounds by hand on softmax regression."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from p2pfl.algorithms.ditto import Ditto, DittoHyper
from p2pfl.algorithms.fedavg import FedAvg
from p2pfl.learning import losses
from p2pfl.messaging.topology import Topology
from p2pfl.options import OptionErrors
from p2pfl.tensors import digest, parameters_of
from tests.bodies import net_of
from tests.regression import Matrix, gradient, regression_data, theta
from tests.support import messages, payload, peers_of, run_rounds, softmax_regression

INPUTS, CLASSES = 4, 3
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
COMPLETE = Topology.from_edges(6, [(i, j) for i in range(6) for j in range(i)])
NEIGHBORHOODS = ([0, 1], [0, 1, 2], [1, 2])
PLAIN = {"lr": 0.5, "batch": 64}
"""All samples in one batch, so that an epoch is a step."""


def make(peers: int = 3, **given: Any) -> list[Ditto]:
    """Softmax regressions with different initial values; peer i has 6 + 2i samples."""
    h = DittoHyper.parse({**PLAIN, **given})
    return peers_of(Ditto, h, lambda me: softmax_regression(INPUTS, CLASSES, seed=me), peers, test=range(4))


def models(peers: list[Ditto]) -> tuple[list[Matrix], list[Matrix]]:
    """v and w of each peer."""
    return [theta(peer.model) for peer in peers], [theta(peer.averaged) for peer in peers]


def descend(peer: Any, x: Matrix, steps: int, pull: float = 0.0, center: Matrix | float = 0.0) -> Matrix:
    """Full-batch steps x ← x − η (∇F(x) + pull (x − center))."""
    data = regression_data(peer.data.train)
    for _ in range(steps):
        x = x - peer.hyper.lr * (gradient(x, *data) + pull * (x - center))
    return x


def participants(fraction: float, t: int) -> tuple[int, ...]:
    return net_of(0, COMPLETE, t, 0).participants(fraction)


# ---- equations ---------------------------------------------------------------------------------------------


def test_proximal_term_is_half_lambda_times_the_squared_distance() -> None:
    model = softmax_regression(1, 2)
    with torch.no_grad():
        model.linear_head.weight.copy_(torch.tensor([[1.0], [2.0]]))
        model.linear_head.bias.copy_(torch.tensor([0.0, 3.0]))
    center = {name: torch.ones_like(tensor) for name, tensor in parameters_of(model).items()}
    term = losses.proximal(model, center, 3.0)
    assert term.item() == 3.0 / 2 * (0 + 1 + 1 + 4)
    term.backward()  # type: ignore[no-untyped-call]
    gradient = model.linear_head.bias.grad
    assert gradient is not None
    assert gradient.tolist() == [3.0 * (0 - 1), 3.0 * (3 - 1)]


def test_loss_is_the_loss_on_the_labels_and_the_distance_to_the_averaged_model() -> None:
    (peer,) = make(1, regularization=2.0, loss="focal")
    with torch.no_grad():
        peer.averaged.linear_head.bias.add_(1.0)
    terms = peer.loss(torch.zeros(2, 1, 2, 2), torch.tensor([0, 1]))
    assert list(terms) == ["focal", "prox"]
    assert terms["prox"].item() == pytest.approx(2.0 / 2 * CLASSES)


# ---- rounds ------------------------------------------------------------------------------------------------


def test_rounds_match_algorithm_1_in_each_neighborhood() -> None:
    peers = make(regularization=0.7, local_epochs=2, personal_epochs=3)
    v, w = models(peers)
    traffic = run_rounds(peers, LINE, 3)
    n = [6, 8, 10]
    for _ in range(3):
        v = [descend(peer, v[me], 3, 0.7, w[me]) for me, peer in enumerate(peers)]
        y = [descend(peer, w[me], 2) for me, peer in enumerate(peers)]
        w = [np.average([y[j] for j in group], axis=0, weights=[n[j] for j in group]) for group in NEIGHBORHOODS]
    for me, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), v[me], atol=1e-5)
        np.testing.assert_allclose(theta(peer.averaged), w[me], atol=1e-5)
    assert payload(traffic[1][0].sent) == 2 * 4 * CLASSES * (INPUTS + 1)  # one model to each neighbor, as in FedAvg


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_all_peers_hold_the_servers_model_on_a_complete_graph(participation: float) -> None:
    peers = make(6, participation=participation)
    v, w = models(peers)
    digests: dict[int, set[str]] = {}
    traffic = run_rounds(
        peers,
        COMPLETE,
        4,
        after=lambda peer, t: digests.setdefault(t, set()).add(digest(peer.state_dict()["averaged"])),
    )
    assert [len(digests[t]) for t in range(4)] == [1, 1, 1, 1]
    for t in range(4):
        chosen = participants(participation, t)
        for j in chosen:
            v[j] = descend(peers[j], v[j], 1, 1.0, w[j])
        y = {j: descend(peers[j], w[j], 1) for j in chosen}
        w = [np.average([y[j] for j in chosen], axis=0, weights=[6 + 2 * j for j in chosen])] * 6
        assert all(messages(traffic[j][t].sent) == (5 if j in chosen else 0) for j in range(6))
    for me, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.averaged), w[me], atol=1e-5)
        np.testing.assert_allclose(theta(peer.model), v[me], atol=1e-5)


def test_personal_model_is_that_of_local_training_without_regularization() -> None:
    peers = make(regularization=0.0)
    v, _ = models(peers)
    run_rounds(peers, LINE, 3)
    for me, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), descend(peer, v[me], 3), atol=1e-5)


def test_personal_model_is_evaluated_and_the_averaged_one_beside_it() -> None:
    peers = make()
    run_rounds(peers, LINE, 2)
    x = torch.rand(5, 1, 2, 2)
    for peer in peers:
        assert torch.equal(peer.predict(x), peer.model(x))
        (beside,) = peer.extra_metrics(whole=False)
        assert beside.name == "averaged"
        assert torch.equal(beside.predict(x), peer.averaged(x))
        assert not torch.equal(beside.predict(x), peer.predict(x))
        assert [metric.name for metric in peer.extra_metrics(whole=True)] == ["averaged", "averaged_global"]


def test_both_models_start_equal_and_are_trained_apart() -> None:
    (peer,) = make(1)
    v, w = peer.state_dict()["model"], peer.state_dict()["averaged"]
    assert digest(v) == digest(w)
    assert all(v[name].data_ptr() != w[name].data_ptr() for name in v)


def test_loss_terms_of_both_models_are_recorded_apart() -> None:
    peers = make()
    run_rounds(peers, LINE, 1)
    assert sorted(peers[0].meter.drain()) == ["averaged_ce", "ce", "prox"]


# ---- failures ----------------------------------------------------------------------------------------------


def test_average_skips_a_missing_neighbor() -> None:
    peers = make()
    v, w = models(peers)
    traffic = run_rounds(peers, LINE, 1, silent=[2])
    assert traffic[1][0].missing == {"Shared": [2]}
    y = [descend(peer, w[me], 1) for me, peer in enumerate(peers)]
    np.testing.assert_allclose(theta(peers[1].averaged), (6 * y[0] + 8 * y[1]) / 14, atol=1e-6)
    np.testing.assert_allclose(theta(peers[1].model), descend(peers[1], v[1], 1, 1.0, w[1]), atol=1e-6)


@pytest.mark.parametrize("value", [math.nan, 1e30])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_diverged_averaged_model_is_replaced_and_spoils_no_personal_model(value: float, optimizer: str) -> None:
    peers = make(optimizer=optimizer, lr=0.1)
    v, _ = models(peers)
    with torch.no_grad():
        peers[1].averaged.linear_head.weight[0, 0] = value
    traffic = run_rounds(peers, LINE, 1)
    assert traffic[0][0].missing == {"Shared": [1]}
    np.testing.assert_array_equal(theta(peers[1].model), v[1])
    expected = (6 * theta(peers[0].averaged) + 10 * theta(peers[2].averaged)) / 16
    np.testing.assert_allclose(theta(peers[1].averaged), expected, atol=1e-6)
    traffic = run_rounds(peers, LINE, 2)
    assert traffic[0][1].missing == {}
    assert all(np.isfinite(x).all() for x in [*models(peers)[0], *models(peers)[1]])
    assert not np.array_equal(theta(peers[1].model), v[1])  # trains again


def test_personal_model_whose_training_diverges_is_rolled_back() -> None:
    peers = make(regularization=1e12)
    before = descend(peers[1], theta(peers[1].model), 1)  # in round 0 both models are equal: no proximal term
    traffic = run_rounds(peers, LINE, 3)
    np.testing.assert_allclose(theta(peers[1].model), before, atol=1e-6)
    assert [record.missing for record in traffic[0]] == [{}, {}, {}]  # averaging goes on


# ---- hyper-parameters --------------------------------------------------------------------------------------


def test_defaults_are_those_of_fedavg_and_lambda_1() -> None:
    assert DittoHyper().to_dict() == {**FedAvg.Hyper().to_dict(), "regularization": 1.0, "personal_epochs": None}


@pytest.mark.parametrize(("key", "wrong"), [("regularization", -0.1), ("personal_epochs", 0), ("participation", 0.0)])
def test_values_out_of_range_are_errors(key: str, wrong: float) -> None:
    with pytest.raises(OptionErrors, match=key):
        DittoHyper.parse({key: wrong})


@pytest.mark.parametrize(
    ("given", "steps"), [({"local_epochs": 3}, 3), ({"local_epochs": 3, "personal_epochs": 1}, 1)]
)
def test_personal_epochs_are_the_local_ones_by_default(given: dict[str, int], steps: int) -> None:
    (peer,) = make(1, **given)
    (v,), (w,) = models([peer])
    run_rounds([peer], Topology.from_edges(1, []), 1)
    np.testing.assert_allclose(theta(peer.model), descend(peer, v, steps, 1.0, w), atol=1e-6)
