"""FedClassAvg against its paper: the loss term by term, and the server's average of heads by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.fedclassavg import ContrastiveHyper, FedClassAvg
from p2pfl.learning.losses import proximal, supervised_contrastive
from p2pfl.messaging.topology import Topology
from p2pfl.options import OptionErrors
from p2pfl.tensors import clone, digest, parameters_of
from tests.support import linear_model, payload, peers_of, run_rounds, setting

INPUTS, CLASSES = 4, 3
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
COMPLETE = Topology.from_edges(3, [(0, 1), (0, 2), (1, 2)])
STILL: dict[str, Any] = {"lr": 1e-12}
"""So that only averaging changes heads."""


def make(peers: int = 3, **given: Any) -> list[FedClassAvg]:
    """Peer i has 6 + 2i samples, and a backbone of its own."""
    hyper = ContrastiveHyper.parse(given)
    return peers_of(FedClassAvg, hyper, lambda me: linear_model(INPUTS, 2, CLASSES, seed=me), peers)


def bias(peer: FedClassAvg) -> torch.Tensor:
    return peer.model.linear_head.bias.detach()


def fill_biases(peers: list[FedClassAvg]) -> None:
    """Peer i's bias becomes i."""
    for me, peer in enumerate(peers):
        parameters_of(peer.model.linear_head)["bias"].fill_(float(me))


def in_training(peer: FedClassAvg, shift: float) -> FedClassAvg:
    """Move each parameter of the head by ``shift`` from the start of local training."""
    peer.start = clone(peer.shared_part())
    for tensor in peer.shared_part().values():
        tensor.add_(shift)
    return peer


VIEWS = torch.tensor([[0.1, 0.4, 0.9, 0.2], [0.5, 0.3, 0.1, 0.8], [0.2, 0.4, 0.8, 0.2], [0.6, 0.3, 0.0, 0.7]])
"""The first views of two samples, then the second ones."""
LABELS = torch.tensor([0, 1, 0, 1])


# ---- equations


def test_proximal_term_is_the_squared_distance_to_the_start() -> None:
    start = {"weight": torch.tensor([[0.0, 0.0], [1.0, 1.0]]), "bias": torch.tensor([2.0, 0.0])}
    head = torch.nn.Linear(2, 2)
    head.load_state_dict({"weight": torch.tensor([[1.0, 0.0], [1.0, 3.0]]), "bias": torch.tensor([0.0, 0.0])})
    assert proximal(head, start, 2.0).item() == (1 + 4) + 4
    assert proximal(head, start, 2.0, mean=True).item() == 5 / 4 + 4 / 2


@torch.no_grad()
def test_loss_is_the_sum_of_three_terms_by_hand() -> None:
    (peer,) = make(peers=1, mu=0.4, temperature=0.5)
    terms = in_training(peer, 0.5).loss(VIEWS, LABELS)
    z = peer.model.backbone(VIEWS).detach().numpy().astype(float)
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    s = np.exp(unit @ unit.T / 0.5)
    contrast = 0.0
    for q, other in ((0, 2), (1, 3), (2, 0), (3, 1)):  # each view's only positive is the other view
        contrast -= math.log(s[q, other] / (s[q].sum() - s[q, q])) / 4
    assert float(terms["cont"]) == pytest.approx(contrast, rel=1e-5)
    assert float(terms["prox"]) == pytest.approx(0.4 / 2 * (2 * CLASSES + CLASSES) * 0.25)
    assert float(terms["ce"]) == pytest.approx(float(cross_entropy(peer.model(VIEWS), LABELS)))
    assert set(terms) == {"ce", "cont", "prox"}


@torch.no_grad()
def test_official_preset_computes_the_loss_of_the_released_code() -> None:
    (peer,) = make(peers=1, preset="official")
    terms = in_training(peer, 0.5).loss(VIEWS, LABELS)
    z = peer.model.backbone(VIEWS).detach().numpy().astype(float)
    s = np.exp(z @ z.T / 100)
    contrast = 0.0
    for q, other in ((0, 2), (1, 3), (2, 0), (3, 1)):
        contrast -= 100 / 0.07 * math.log(s[q, other] / (s[q].sum() - s[q, q])) / 4
    assert float(terms["cont"]) == pytest.approx(contrast, rel=1e-5)
    assert float(terms["prox"]) == pytest.approx(0.1 / 2 * 2 * 0.25)
    assert float(terms["ce"]) == pytest.approx(float(cross_entropy(peer.model(VIEWS[:2]), LABELS[:2])))
    assert (peer.hyper.betas, peer.hyper.fresh_optimizer) == ((0.5, 0.999), True)


def test_zero_weights_remove_their_terms() -> None:
    (peer,) = make(peers=1, mu=0.0, contrastive=0.0)
    assert set(peer.loss(VIEWS, LABELS)) == {"ce"}


def test_proximal_term_keeps_the_head_near_its_start() -> None:
    def moved(mu: float) -> float:
        (peer,) = make(peers=1, mu=mu, lr=0.01, local_epochs=20, contrastive=0.0)
        start = clone(peer.shared_part())
        run_rounds([peer], Topology.from_edges(1, []), 1)
        return proximal(peer.model.linear_head, start, 2.0).item()

    assert moved(100.0) < moved(0.0) / 2


def test_local_training_has_two_views_and_trains_backbone_and_head() -> None:
    (peer,) = make(peers=1, lr=0.01)
    before = copy.deepcopy(peer.model.state_dict())
    sizes = []
    loss = peer.loss
    peer.loss = lambda x, labels: sizes.append((len(x), len(labels))) or loss(x, labels)  # type: ignore[func-returns-value, method-assign]
    run_rounds([peer], Topology.from_edges(1, []), 1)
    assert sizes == [(12, 12)]
    assert all(not torch.equal(tensor, before[name]) for name, tensor in peer.model.state_dict().items())


def test_fresh_optimizer_forgets_earlier_rounds() -> None:
    def steps(fresh: bool) -> float:
        (peer,) = make(peers=1, fresh_optimizer=fresh)
        run_rounds([peer], Topology.from_edges(1, []), 3)
        return float(peer.optimizer.state[peer.model.linear_head.bias]["step"])

    assert (steps(True), steps(False)) == (1.0, 3.0)


def test_contrast_of_inner_products_differs_from_that_of_cosines_by_the_norms() -> None:
    unit = torch.nn.functional.normalize(VIEWS, dim=1)
    assert float(supervised_contrastive(unit, LABELS, 0.5, cosine=False)) == pytest.approx(
        float(supervised_contrastive(VIEWS, LABELS, 0.5))
    )
    twice = supervised_contrastive(2 * unit, LABELS, 0.5, cosine=False)
    assert float(twice) == pytest.approx(float(supervised_contrastive(VIEWS, LABELS, 0.125)))


# ---- rounds


def test_all_heads_are_the_servers_on_a_complete_graph() -> None:
    peers = make(batch=64, lr=0.01)
    alone = [
        FedClassAvg(peer.hyper, setting(me, 3, copy.deepcopy(peer.model), peer.data)) for me, peer in enumerate(peers)
    ]
    run_rounds(peers, COMPLETE, 1)
    for peer in alone:
        peer.local_training()
    heads = [parameters_of(peer.model.linear_head) for peer in alone]
    assert len({digest(dict(peer.shared_part())) for peer in peers}) == 1
    for name, tensor in peers[0].shared_part().items():
        server = sum(n * head[name].double() for n, head in zip((6, 8, 10), heads, strict=True)) / 24
        np.testing.assert_allclose(tensor, server, atol=1e-6)
    for peer, other in zip(peers, alone, strict=True):
        assert digest(peer.model.backbone.state_dict()) == digest(other.model.backbone.state_dict())


def test_peers_on_a_sparse_graph_average_heads_of_their_neighborhoods() -> None:
    peers = make(**STILL)
    fill_biases(peers)
    traffic = run_rounds(peers, LINE, 1)
    for peer, value in zip(peers, (8 / 14, (8 + 20) / 24, (8 + 20) / 18), strict=True):
        np.testing.assert_allclose(bias(peer), np.full(CLASSES, value), rtol=1e-6)
    assert payload(traffic[0][0].sent) == 4 * (2 * CLASSES + CLASSES)


def test_average_skips_a_missing_neighbor() -> None:
    peers = make(**STILL)
    fill_biases(peers)
    traffic = run_rounds(peers, LINE, 1, silent=[2])
    assert traffic[1][0].missing == {"Shared": [2]}
    np.testing.assert_allclose(bias(peers[1]), np.full(CLASSES, 8 / 14), rtol=1e-6)


def test_average_skips_a_neighbor_whose_model_diverged() -> None:
    peers = make(**STILL)
    fill_biases(peers)
    parameters_of(peers[2].model)["head.weight"][0, 0] = torch.nan
    traffic = run_rounds(peers, LINE, 1)
    assert traffic[1][0].missing == {"Shared": [2]}
    np.testing.assert_allclose(bias(peers[1]), np.full(CLASSES, 8 / 14), rtol=1e-6)


def test_local_training_that_diverges_is_rolled_back() -> None:
    peers = [*make(lr=0.01)[:2], make(lr=1e30)[2]]
    before = clone(parameters_of(peers[2].model.backbone))
    traffic = run_rounds(peers, LINE, 2)
    assert traffic[1][0].missing == traffic[1][1].missing == {}
    for name, tensor in parameters_of(peers[2].model.backbone).items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mu": -0.1}, "mu"),
        ({"temperature": 0.0}, "temperature"),
        ({"contrastive": -1.0}, "contrastive"),
        ({"similarity": "dot"}, "similarity"),
        ({"participation": 0.0}, "participation"),
        ({"preset": "paper"}, "preset"),
        ({"momentum": 0.5}, "momentum has no effect"),
    ],
)
def test_wrong_hyper_parameters_are_errors(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionErrors, match=message):
        ContrastiveHyper.parse(given)
