"""FedAvg, LG-FedAvg and DFedAvgM against their papers: rounds by hand on softmax regression."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2pfl.algorithms import dfedavgm
from p2pfl.algorithms.averaging import AnyPart, Participation
from p2pfl.algorithms.dfedavgm import DFedAvgM
from p2pfl.algorithms.fedavg import FedAvg
from p2pfl.algorithms.lg_fedavg import LGFedAvg
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.options import OptionErrors
from p2pfl.tensors import digest, has_diverged
from tests.bodies import net_of
from tests.regression import Matrix, gradient, regression_data, theta
from tests.support import (
    linear_model,
    messages,
    payload,
    peer_data,
    peers_of,
    random_dataset,
    run_rounds,
    setting,
    softmax_regression,
)

INPUTS, CLASSES = 4, 3
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
COMPLETE = Topology.from_edges(6, [(i, j) for i in range(6) for j in range(i)])


def make(method: type[Any], h: Any, peers: int = 3) -> list[Any]:
    """Softmax regressions with different initial values; peer i has 6 + 2i samples."""
    return peers_of(method, h, lambda me: softmax_regression(INPUTS, CLASSES, seed=me), peers)


def descend(peer: Any, x: Matrix, epochs: int, momentum: float = 0.0) -> Matrix:
    """Take full-batch steps on softmax regression, with heavy-ball momentum in the form y + θ (y − y_before)."""
    data = regression_data(peer.data.train)
    before = x
    for _ in range(epochs):
        x, before = x - peer.hyper.lr * gradient(x, *data) + momentum * (x - before), x
    return x


def participants(peers: int, fraction: float, t: int) -> tuple[int, ...]:
    topology = Topology.from_edges(peers, [(i, i + 1) for i in range(peers - 1)])
    return net_of(0, topology, t, 0).participants(fraction)


PLAIN = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.5, "batch": 64}


# ---- fedavg ------------------------------------------------------------------------------------------------


def test_rounds_match_algorithm_1_in_each_neighborhood() -> None:
    peers = make(FedAvg, AnyPart.parse({**PLAIN, "local_epochs": 2}))
    x = [theta(peer.model) for peer in peers]
    run_rounds(peers, LINE, 3)
    n = [6, 8, 10]
    for _ in range(3):
        y = [descend(peer, x[me], 2) for me, peer in enumerate(peers)]
        groups = ([0, 1], [0, 1, 2], [1, 2])
        x = [np.average([y[j] for j in group], axis=0, weights=[n[j] for j in group]) for group in groups]
    for me, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), x[me], atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_all_peers_hold_the_servers_model_on_a_complete_graph(participation: float) -> None:
    peers = make(FedAvg, AnyPart.parse({**PLAIN, "participation": participation}), peers=6)
    x = [theta(peer.model) for peer in peers]
    digests: dict[int, set[str]] = {}
    run_rounds(
        peers, COMPLETE, 4, after=lambda peer, t: digests.setdefault(t, set()).add(digest(peer.state_dict()["model"]))
    )
    assert [len(digests[t]) for t in range(4)] == [1, 1, 1, 1]
    for t in range(4):
        chosen = participants(6, participation, t)
        y = {j: descend(peers[j], x[j], 1) for j in chosen}
        mean = np.average([y[j] for j in chosen], axis=0, weights=[6 + 2 * j for j in chosen])
        x = [mean] * 6
    np.testing.assert_allclose(theta(peers[0].model), x[0], atol=1e-5)


def test_nonparticipants_neither_train_nor_send() -> None:
    peers = make(FedAvg, AnyPart.parse({**PLAIN, "participation": 0.5}), peers=6)
    traffic = run_rounds(peers, COMPLETE, 8)
    numbers = CLASSES * (INPUTS + 1)
    for me in range(6):
        for t in range(8):
            sends = me in participants(6, 0.5, t)
            assert messages(traffic[me][t].sent, "Shared") == (5 if sends else 0)
            assert payload(traffic[me][t].sent) == (5 * 4 * numbers if sends else 0)
            assert messages(traffic[me][t].received) == (2 if sends else 3)


def test_peer_without_participating_sources_keeps_its_model() -> None:
    line = Topology.from_edges(6, [(i, i + 1) for i in range(5)])
    peers = make(FedAvg, AnyPart.parse({**PLAIN, "participation": 0.2}), peers=6)
    before = [theta(peer.model) for peer in peers]
    run_rounds(peers, line, 1)
    (chosen,) = participants(6, 0.2, 0)
    trained = theta(peers[chosen].model)
    for me in range(6):
        expected = trained if abs(me - chosen) <= 1 else before[me]
        np.testing.assert_array_equal(theta(peers[me].model), expected)


def test_average_skips_a_missing_neighbor() -> None:
    peers = make(FedAvg, AnyPart.parse(PLAIN))
    x = [theta(peer.model) for peer in peers]
    traffic = run_rounds(peers, LINE, 1, silent=[2])
    assert traffic[1][0].missing == {"Shared": [2]}
    y = [descend(peer, x[me], 1) for me, peer in enumerate(peers)]
    np.testing.assert_allclose(theta(peers[1].model), (6 * y[0] + 8 * y[1]) / 14, atol=1e-6)


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_diverged_model_is_replaced_by_the_average_of_the_others(value: float) -> None:
    peers = make(FedAvg, AnyPart.parse(PLAIN))
    x = [theta(peer.model) for peer in peers]
    with torch.no_grad():
        peers[1].model.head.weight[0, 0] = value
    run_rounds(peers, LINE, 1)
    y = [descend(peer, x[me], 1) for me, peer in enumerate(peers)]
    np.testing.assert_allclose(theta(peers[0].model), y[0], atol=1e-6)
    np.testing.assert_allclose(theta(peers[1].model), (6 * y[0] + 10 * y[2]) / 16, atol=1e-6)


@pytest.mark.parametrize("optimizer", [{"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "adam"}])
def test_diverged_peer_recovers_and_participates_again(optimizer: dict[str, str | float]) -> None:
    """The optimizer's state must not retain NaN."""
    peers = make(FedAvg, AnyPart.parse({**optimizer, "lr": 0.1}))
    with torch.no_grad():
        peers[1].model.head.weight[0, 0] = torch.nan
    traffic = run_rounds(peers, LINE, 3)
    assert [record.missing for record in traffic[0]] == [{"Shared": [1]}, {}, {}]
    assert all(np.isfinite(theta(peer.model)).all() for peer in peers)


def test_diverged_peer_gets_finite_statistics_also_in_a_round_in_which_it_does_not_participate() -> None:
    def normalized(seed: int) -> Model:
        return Model("normalized", nn.Sequential(nn.Flatten(), nn.BatchNorm1d(INPUTS)), INPUTS, CLASSES)

    h = AnyPart.parse({"participation": 0.5})
    peers = [
        FedAvg(h, setting(me, 6, normalized(me), peer_data(random_dataset(8, classes=CLASSES, seed=me))))
        for me in range(6)
    ]
    others = participants(6, 0.5, 0)
    diverged = peers[min({*range(6)} - {*others})]
    with torch.no_grad():
        diverged.model.head.weight[0, 0] = math.nan
        diverged.model.backbone[1].running_var[0] = math.nan
    run_rounds(peers, COMPLETE, 1)
    assert not any(map(has_diverged, diverged.model.state_dict().values()))


def test_participation_is_a_fraction_above_0() -> None:
    for wrong in (0.0, 1.5):
        with pytest.raises(OptionErrors, match="participation"):
            AnyPart.parse({"participation": wrong})


# ---- lg-fedavg ---------------------------------------------------------------------------------------------


def test_lg_fedavg_averages_heads_and_keeps_backbones_local() -> None:
    h = Participation.parse({**PLAIN, "lr": 1e-12})  # so that only averaging changes parameters
    peers = [
        LGFedAvg(h, setting(me, 3, linear_model(INPUTS, 2, CLASSES, seed=me), peer_data(random_dataset(6 + 2 * me))))
        for me in range(3)
    ]
    heads = [copy.deepcopy(peer.model.head.state_dict()) for peer in peers]
    for name in ("weight", "bias"):  # as if sent by a server
        assert torch.equal(heads[0][name], heads[1][name])
        assert torch.equal(heads[0][name], heads[2][name])
    with torch.no_grad():
        for me, peer in enumerate(peers):
            peer.model.linear_head.bias.fill_(float(me))
    backbones = [copy.deepcopy(peer.model.backbone.state_dict()) for peer in peers]
    traffic = run_rounds(peers, LINE, 1)
    for peer, value in zip(peers, (8 / 14, (8 + 20) / 24, (8 + 20) / 18), strict=True):
        np.testing.assert_allclose(peer.model.linear_head.bias.detach(), np.full(CLASSES, value), rtol=1e-6)
    for peer, backbone in zip(peers, backbones, strict=True):
        for name, tensor in peer.model.backbone.state_dict().items():
            torch.testing.assert_close(tensor, backbone[name])
    assert payload(traffic[0][0].sent) == 4 * (2 * CLASSES + CLASSES)


def test_lg_fedavg_trains_backbone_and_head_together() -> None:
    h = Participation.parse(PLAIN)
    peer = LGFedAvg(
        h, setting(0, 1, linear_model(INPUTS, 2, CLASSES), peer_data(random_dataset(12, classes=CLASSES)))
    )
    before = copy.deepcopy(peer.model.state_dict())
    run_rounds([peer], Topology.from_edges(1, []), 1)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in peer.model.state_dict().items())


# ---- dfedavgm ----------------------------------------------------------------------------------------------


def test_dfedavgm_averages_models_trained_with_fresh_momentum() -> None:
    w = np.array([[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]])
    peers = make(DFedAvgM, dfedavgm.Hyper(local_epochs=3, lr=0.5, momentum=0.9))
    x = [theta(peer.model) for peer in peers]
    traffic = run_rounds(peers, LINE, 2)
    for _ in range(2):
        z = [descend(peer, x[me], 3, momentum=0.9) for me, peer in enumerate(peers)]
        x = [sum(w[me, j] * z[j] for j in range(3)) for me in range(3)]
    for me, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), x[me], atol=1e-5)
    assert sum(payload(record.sent) for peer in traffic for record in peer) == 2 * 2 * 2 * 4 * CLASSES * (INPUTS + 1)
    assert peers[0].weights() == pytest.approx({0: 2 / 3, 1: 1 / 3})


def test_dfedavgm_adds_a_missing_neighbors_weight_to_the_local_model() -> None:
    peers = make(DFedAvgM, dfedavgm.Hyper(lr=0.5, momentum=0.0))
    x = [theta(peer.model) for peer in peers]
    run_rounds(peers, LINE, 1, silent=[2])
    z = [descend(peer, x[me], 1) for me, peer in enumerate(peers)]
    np.testing.assert_allclose(theta(peers[1].model), 2 / 3 * z[1] + 1 / 3 * z[0], atol=1e-6)
