"""FedSim against its paper: simultaneous steps on both parts, and the plain mean of heads by hand."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.averaging import Participation, Shared
from p2pfl.algorithms.fedsim import FedSim
from p2pfl.messaging.topology import Topology
from p2pfl.options import OptionErrors
from p2pfl.tensors import clone, digest, parameters_of
from tests.support import linear_model, messages, payload, peers_of, run_rounds, setting

INPUTS, CLASSES = 4, 3
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
COMPLETE = Topology.from_edges(3, [(0, 1), (0, 2), (1, 2)])
STILL: dict[str, Any] = {"lr": 1e-12}
"""So that only averaging changes heads."""


def make(peers: int = 3, **given: Any) -> list[FedSim]:
    """Peer i has 6 + 2i samples, and a backbone of its own."""
    hyper = Participation.parse({"batch": 64, **given})
    return peers_of(FedSim, hyper, lambda me: linear_model(INPUTS, 2, CLASSES, seed=me), peers)


def fill_biases(peers: list[FedSim]) -> None:
    """Peer i's bias becomes i."""
    for me, peer in enumerate(peers):
        peer.shared_part()["bias"].fill_(float(me))


def biases(peers: list[FedSim]) -> list[float]:
    """The peers' first biases; all of a peer's are equal."""
    for peer in peers:
        assert len(set(peer.shared_part()["bias"].tolist())) == 1
    return [float(peer.shared_part()["bias"][0]) for peer in peers]


def step(peer: FedSim, lr: float) -> dict[str, torch.Tensor]:
    """Return the parameters after one full-batch step from the current ones on all of them."""
    model = copy.deepcopy(peer.model)
    ((x, labels),) = peer.data.sweep(peer.data.train)
    cross_entropy(model(x), labels).backward()  # type: ignore[no-untyped-call]
    return {name: (p - lr * p.grad).detach() for name, p in model.named_parameters() if p.grad is not None}


def test_rounds_on_a_complete_graph_are_the_papers() -> None:
    peers = make(lr=0.5)
    servers = [
        FedSim(peer.hyper, setting(me, 3, copy.deepcopy(peer.model), peer.data)) for me, peer in enumerate(peers)
    ]
    run_rounds(peers, COMPLETE, 2)
    for _ in range(2):
        trained = [step(server, 0.5) for server in servers]
        for name in ("head.weight", "head.bias"):
            mean = torch.stack([parameters[name] for parameters in trained]).mean(0)
            for parameters in trained:
                parameters[name] = mean
        for server, parameters in zip(servers, trained, strict=True):
            server.model.load_state_dict(parameters)
    assert len({digest(dict(peer.shared_part())) for peer in peers}) == 1
    for peer, server in zip(peers, servers, strict=True):
        for name, tensor in parameters_of(peer.model).items():
            torch.testing.assert_close(tensor, server.model.state_dict()[name], rtol=0, atol=1e-5)
    assert digest(peers[0].model.backbone.state_dict()) != digest(peers[1].model.backbone.state_dict())


def test_heads_start_equal_and_backbones_do_not() -> None:
    peers = make()
    assert len({digest(dict(peer.shared_part())) for peer in peers}) == 1
    assert len({digest(peer.model.backbone.state_dict()) for peer in peers}) == 3


def test_own_head_is_the_trained_one_from_before_the_mean() -> None:
    peers = make(**STILL)
    fill_biases(peers)
    run_rounds(peers, COMPLETE, 1)
    np.testing.assert_allclose(biases(peers), [1.0, 1.0, 1.0], rtol=1e-6)
    for me, peer in enumerate(peers):
        (metric,) = peer.extra_metrics(whole=False)
        assert metric.name == "own_head"
        np.testing.assert_allclose(peer.own_head.bias.detach(), np.full(CLASSES, me), atol=1e-6)
        x = torch.ones(2, INPUTS)
        torch.testing.assert_close(metric.predict(x), peer.own_head(peer.model.backbone(x)), rtol=0, atol=0)
        assert not torch.allclose(metric.predict(x), peer.predict(x)) or me == 1  # whose head is the mean
        assert [found.name for found in peer.extra_metrics(whole=True)] == ["own_head", "own_head_global"]


def test_own_head_of_a_peer_that_diverged_is_the_last_finite_one() -> None:
    peers = make(**STILL)
    before = clone(parameters_of(peers[2].own_head))
    peers[2].shared_part()["weight"][0, 0] = torch.nan
    run_rounds(peers, LINE, 1)
    for name, tensor in parameters_of(peers[2].own_head).items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_mean_on_a_sparse_graph_ignores_sample_counts() -> None:
    peers = make(**STILL)
    fill_biases(peers)
    traffic = run_rounds(peers, LINE, 1)
    np.testing.assert_allclose(biases(peers), [0.5, 1.0, 1.5], rtol=1e-6)
    assert payload(traffic[0][0].sent) == 4 * (2 * CLASSES + CLASSES)


def test_no_sample_count_is_sent_or_accepted() -> None:
    (peer,) = make(peers=1)
    assert peer.local_part().samples == 1
    (layout,) = peer.layouts()
    assert layout.plain["samples"].mismatch(1) is None
    assert "must be in 1 to 1, got 6" in str(layout.plain["samples"].mismatch(6))
    assert layout.body is Shared


def test_mean_skips_a_missing_neighbor() -> None:
    peers = make(**STILL)
    fill_biases(peers)
    traffic = run_rounds(peers, LINE, 1, silent=[2])
    assert traffic[1][0].missing == {"Shared": [2]}
    np.testing.assert_allclose(biases(peers[:2]), [0.5, 0.5], rtol=1e-6)


def test_mean_skips_a_neighbor_whose_head_diverged_and_replaces_it() -> None:
    peers = make(**STILL)
    fill_biases(peers)
    peers[2].shared_part()["weight"][0, 0] = torch.nan
    traffic = run_rounds(peers, LINE, 1)
    assert traffic[1][0].missing == {"Shared": [2]}
    np.testing.assert_allclose(biases(peers), [0.5, 0.5, 1.0], rtol=1e-6)
    assert all(bool(peer.shared_part()["weight"].isfinite().all()) for peer in peers)


def test_local_training_that_diverges_is_rolled_back() -> None:
    peers = [*make(lr=0.01)[:2], make(lr=1e30)[2]]
    before = clone(parameters_of(peers[2].model.backbone))
    traffic = run_rounds(peers, LINE, 2)
    assert traffic[1][0].missing == traffic[1][1].missing == {}
    for name, tensor in parameters_of(peers[2].model.backbone).items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_peers_that_do_not_take_part_receive_the_mean() -> None:
    peers = make(participation=0.7, **STILL)
    fill_biases(peers)
    traffic = run_rounds(peers, COMPLETE, 1)
    senders = [me for me in range(3) if messages(traffic[me][0].sent, "Shared")]
    assert len(senders) == 2
    np.testing.assert_allclose(biases(peers), [sum(senders) / 2] * 3, rtol=1e-6)


def test_participation_is_a_fraction_above_0() -> None:
    for wrong in (0.0, 1.5):
        with pytest.raises(OptionErrors, match="participation"):
            FedSim.Hyper.parse({"participation": wrong})
