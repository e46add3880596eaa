"""pFedSim against its paper: FedAvg's rounds, then weights and averages of the server by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from p2pfl.algorithms.fedavg import FedAvg
from p2pfl.algorithms.pfedsim import PFedSim, SimilarityHyper, similarity_weights
from p2pfl.messaging.topology import Topology
from p2pfl.options import OptionErrors
from p2pfl.tensors import clone, digest, parameters_of
from tests.support import linear_model, messages, payload, peers_of, run_rounds, setting

INPUTS, FEATURES, CLASSES = 4, 2, 3
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
COMPLETE = Topology.from_edges(3, [(0, 1), (0, 2), (1, 2)])
STILL: dict[str, Any] = {"lr": 1e-12}
"""So that only averaging changes models."""
PERSONAL: dict[str, Any] = {"generalization": 0.0}
"""Round 0 has only local training; from round 1 on backbones are averaged."""
SELF = -math.log(1 - 0.9999)


def make(method: type[Any] = PFedSim, peers: int = 3, rounds: int = 4, **given: Any) -> list[Any]:
    """Peer i has 6 + 2i samples. Models are equal at the start."""
    hyper = method.Hyper.parse({"batch": 64, **given})
    return peers_of(method, hyper, lambda me: linear_model(INPUTS, FEATURES, CLASSES), peers, rounds=rounds)


ROWS = ([[1.0, 0.0]] * CLASSES, [[3.0, 4.0]] * CLASSES, [[0.0, 2.0]] * CLASSES)
"""Heads with the cosines 0.6 (0 and 1), 0 (0 and 2) and 0.8 (1 and 2)."""


def spread(peers: list[Any]) -> None:
    """Give peer i the head ``ROWS[i]``, and a backbone whose bias is i."""
    for me, peer in enumerate(peers):
        parameters_of(peer.model)["head.weight"].copy_(torch.tensor(ROWS[me]))
        parameters_of(peer.model)["backbone.1.bias"].fill_(float(me))


def biases(peers: list[Any]) -> list[float]:
    """The first biases of the backbones."""
    return [float(parameters_of(peer.model)["backbone.1.bias"][0]) for peer in peers]


# ---- equations


def test_weights_are_minus_the_logarithm_of_one_minus_the_similarity() -> None:
    heads = {2: torch.tensor(ROWS[2]), 0: torch.tensor(ROWS[0]), 1: torch.tensor(ROWS[1])}
    phi = {0: -math.log(0.4), 1: SELF, 2: -math.log(0.2)}
    weights = similarity_weights(heads, 1)
    assert list(weights) == [0, 1, 2]
    assert weights == pytest.approx({j: value / sum(phi.values()) for j, value in phi.items()}, rel=1e-6)


def test_similarity_is_the_mean_of_the_rows_cosines() -> None:
    heads = {0: torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 1: torch.tensor([[2.0, 0.0], [1.0, 0.0]])}
    phi = -math.log(1 - (1 + 0) / 2)
    assert similarity_weights(heads, 0) == pytest.approx({0: SELF / (SELF + phi), 1: phi / (SELF + phi)})


def test_opposite_heads_have_the_weight_0() -> None:
    head = torch.tensor(ROWS[1])
    assert similarity_weights({0: head, 1: -head}, 0) == {0: 1.0, 1: 0.0}


def test_equal_heads_have_equal_and_finite_weights() -> None:
    head = torch.tensor(ROWS[1])
    assert similarity_weights({0: head, 1: 2 * head, 2: head}, 1) == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})


# ---- rounds


def test_first_half_of_the_rounds_is_fedavgs() -> None:
    peers, others = make(lr=0.5), make(FedAvg, lr=0.5)
    models: dict[int, list[str]] = {}

    def keep(peer: Any, t: int) -> None:
        models.setdefault(t, []).append(digest(peer.model.state_dict()))

    traffic = run_rounds(peers, COMPLETE, 4, after=keep)
    run_rounds(others, COMPLETE, 2)
    assert set(models[1]) == {digest(others[0].model.state_dict())}
    assert len(set(models[2])) == 3
    kinds = [sorted(traffic[0][t].sent[1]) if messages(traffic[0][t].sent) else [] for t in range(4)]
    assert kinds == [["Shared"], ["Shared"], [], ["Trained"]]


@pytest.mark.parametrize(("fraction", "rounds", "first"), [(0.0, 10, 0), (0.29, 100, 29), (0.5, 5, 2), (1.0, 7, 7)])
def test_generalization_is_a_fraction_of_the_runs_rounds(fraction: float, rounds: int, first: int) -> None:
    (peer,) = make(peers=1, rounds=rounds, generalization=fraction)
    assert peer.personalizes_from == first


def test_personalized_models_are_the_servers_on_a_complete_graph() -> None:
    peers = make(lr=0.1, **PERSONAL)
    spread(peers)
    servers = [
        PFedSim(peer.hyper, setting(me, 3, copy.deepcopy(peer.model), peer.data)) for me, peer in enumerate(peers)
    ]
    run_rounds(peers, COMPLETE, 3)
    for t in range(3):
        if t > 0:
            before = [clone(parameters_of(server.model)) for server in servers]
            for me, server in enumerate(servers):
                heads = [parameters["head.weight"].double().numpy() for parameters in before]
                norms = [np.linalg.norm(head, axis=1) for head in heads]
                phi = np.empty(3)
                for j in range(3):
                    cosines = (heads[me] * heads[j]).sum(1) / norms[me] / norms[j]
                    phi[j] = -math.log(1 - (0.9999 if j == me else max(0.0, cosines.mean())))
                for name, tensor in parameters_of(server.model).items():
                    if name.startswith("backbone"):
                        tensor.copy_(sum(phi[j] / phi.sum() * before[j][name].double() for j in range(3)))
        for server in servers:
            server.local_training()
    for peer, server in zip(peers, servers, strict=True):
        for name, tensor in parameters_of(peer.model).items():
            torch.testing.assert_close(tensor, parameters_of(server.model)[name], rtol=0, atol=1e-5)


def test_heads_stay_local_and_their_biases_are_not_sent() -> None:
    peers = make(**STILL, **PERSONAL)
    spread(peers)
    heads = [clone(parameters_of(peer.model.head)) for peer in peers]
    traffic = run_rounds(peers, COMPLETE, 2)
    for peer, head in zip(peers, heads, strict=True):
        torch.testing.assert_close(parameters_of(peer.model.head), head)
    numbers = FEATURES * (INPUTS + 1) + CLASSES * FEATURES
    assert [payload(record.sent) for record in traffic[0]] == [0, 2 * 4 * numbers]


def test_backbones_on_a_sparse_graph_are_averaged_in_each_neighborhood() -> None:
    peers = make(**STILL, **PERSONAL)
    spread(peers)
    run_rounds(peers, LINE, 2)
    a, b = -math.log(0.4), -math.log(0.2)
    expected = [a / (a + SELF), (SELF + 2 * b) / (a + SELF + b), (b + 2 * SELF) / (b + SELF)]
    np.testing.assert_allclose(biases(peers), expected, rtol=1e-5)
    assert peers[0].weights() == pytest.approx({0: SELF / (a + SELF), 1: a / (a + SELF)}, rel=1e-6)


def test_average_skips_a_missing_neighbor() -> None:
    peers = make(**STILL, **PERSONAL)
    spread(peers)
    traffic = run_rounds(peers, LINE, 2, silent=[2])
    assert traffic[1][1].missing == {"Trained": [2]}
    a = -math.log(0.4)
    np.testing.assert_allclose(biases(peers)[1], SELF / (a + SELF), rtol=1e-5)


def test_average_skips_a_neighbor_whose_model_diverged() -> None:
    peers = make(**STILL, **PERSONAL)
    spread(peers)
    parameters_of(peers[2].model)["head.weight"][0, 0] = torch.nan
    traffic = run_rounds(peers, LINE, 2)
    assert traffic[1][1].missing == {"Trained": [2]}
    a = -math.log(0.4)
    np.testing.assert_allclose(biases(peers)[1], SELF / (a + SELF), rtol=1e-5)


@pytest.mark.parametrize("generalization", [0.0, 1.0])
def test_local_training_that_diverges_is_rolled_back(generalization: float) -> None:
    peers = [*make(generalization=generalization)[:2], make(lr=1e30, generalization=generalization)[2]]
    traffic = run_rounds(peers, LINE, 3)
    assert [record.missing for record in traffic[1]] == [{}, {}, {}]
    assert all(bool(tensor.isfinite().all()) for tensor in peers[2].model.state_dict().values())


def test_peers_that_do_not_take_part_keep_their_models() -> None:
    peers = make(participation=0.7, **PERSONAL)
    spread(peers)
    models = [digest(peer.model.state_dict()) for peer in peers]
    changed: dict[int, list[int]] = {0: [], 1: []}

    def compare(peer: Any, t: int) -> None:
        if (now := digest(peer.model.state_dict())) != models[peer.me]:
            changed[t].append(peer.me)
        models[peer.me] = now

    traffic = run_rounds(peers, COMPLETE, 2, after=compare)
    assert len(changed[0]) == len(changed[1]) == 2
    assert sorted(changed[1]) == [me for me in range(3) if messages(traffic[me][1].sent, "Trained")]


def test_peer_without_participating_neighbors_trains_alone() -> None:
    apart = Topology.from_edges(2, [])
    peers = make(peers=2, **PERSONAL)
    run_rounds(peers, apart, 2)
    assert [peer.weights() for peer in peers] == [{0: 1.0}, {1: 1.0}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"generalization": -0.1}, "generalization"),
        ({"generalization": 1.1}, "generalization"),
        ({"participation": 0.0}, "participation"),
    ],
)
def test_wrong_hyper_parameters_are_errors(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionErrors, match=message):
        SimilarityHyper.parse(given)
