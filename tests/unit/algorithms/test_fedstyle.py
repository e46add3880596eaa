"""FedStyle against its paper: whole rounds in float64, what travels, who is averaged, statistics and projectors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from p2pfl.algorithms.fedavg_ssl import Content, FedAvgSSL
from p2pfl.algorithms.fedstyle import FedStyle
from p2pfl.learning.evaluation import evaluate
from p2pfl.messaging.net import Net
from p2pfl.messaging.topology import Topology
from p2pfl.tensors import clone, digest, has_diverged
from tests.fedstyle_reference import (
    ALONE,
    FEATURES,
    LINE,
    SIDE,
    Reference,
    StyleReference,
    agree,
    complete,
    hyper,
    make,
    network,
    participants,
    reference_rounds,
    styled,
)
from tests.support import messages, payload, peer_data, run_rounds, setting

# ---- whole rounds against a reference ------------------------------------------------------------------------


SWITCHES: dict[str, dict[str, Any]] = {
    "simclr": {},
    "simsiam": {"loss": "simsiam", "hidden": 3, "output": 2},
    "generator trained": {"train_generator": True, "style_weight": 2.0},
    "untrained style net": {"style_epochs": 0},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SWITCHES)
def test_rounds_follow_the_papers_algorithms(name: str) -> None:
    h = hyper(**SWITCHES[name])
    expected = [StyleReference(peer) for peer in make(h)]
    peers = make(h)
    start = Reference.of(peers[0].content)
    run_rounds(peers, LINE, 3)
    reference_rounds(expected, LINE, 3)
    for peer, reference in zip(peers, expected, strict=True):
        assert (
            min(float((reference.local[name] - start[name]).abs().max()) for name in start) > 1e-3
        )  # more than allowed
        agree(peer.content, reference.local)
        agree(peer.averaged, reference.w)
        agree(peer.infusion.style_net, reference.style)
        agree(peer.infusion.generator, reference.generator)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_complete_graph_yields_the_papers_global_model(fraction: float) -> None:
    h = hyper(participation=fraction)
    expected = [StyleReference(peer) for peer in make(h, 6)]
    peers = make(h, 6)
    digests: dict[int, set[str]] = {}

    def remember(peer: Any, t: int) -> None:
        digests.setdefault(t, set()).add(digest(peer.averaged.state_dict()))

    run_rounds(peers, complete(6), 3, after=remember)
    assert [len(digests[t]) for t in range(3)] == [1, 1, 1]
    reference_rounds(expected, complete(6), 3, fraction)
    for peer, reference in zip(peers, expected, strict=True):
        agree(peer.averaged, reference.w)
        agree(peer.content, reference.local)


@pytest.mark.exhaustive
def test_style_leaves_sample_order_views_and_initial_values_unchanged() -> None:
    """So that the baseline differs in style infusion only."""
    infused = make(hyper(batch=3, style_weight=0.0))
    plain = make(hyper(FedAvgSSL, batch=3), of=FedAvgSSL)
    run_rounds(infused, LINE, 2)
    run_rounds(plain, LINE, 2)
    for one, other in zip(infused, plain, strict=True):
        agree(one.content, Reference.of(other.content))


# ---- what travels --------------------------------------------------------------------------------------------

BACKBONE = SIDE * SIDE * FEATURES + FEATURES
CONTENT = BACKBONE + (FEATURES * 3 + 3) + (3 * 3 + 3)
"""Numbers in f_c, and in f_c and g_c, of these tests."""


@pytest.mark.exhaustive
def test_idle_peers_only_receive() -> None:
    peers = make(hyper(participation=0.5), 6)
    contents: dict[int, list[str]] = {me: [] for me in range(6)}

    def remember(peer: Any, t: int) -> None:
        contents[peer.me].append(digest(peer.content.state_dict()))

    traffic = run_rounds(peers, complete(6), 6, after=remember)
    chosen = [participants(6, 0.5, t) for t in range(6)]
    for me in range(6):
        for t in range(6):
            takes_part = me in chosen[t]
            assert messages(traffic[me][t].sent, "Content") == (5 if takes_part else 0)
            assert payload(traffic[me][t].sent) == (5 * 4 * CONTENT if takes_part else 0)
            assert messages(traffic[me][t].received) == len(set(chosen[t]) - {me})
            if t > 0:
                assert (contents[me][t] != contents[me][t - 1]) == takes_part


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("given", "kind", "numbers"),
    [
        ({}, "linear", CONTENT),
        ({"share_projector": False}, "linear", BACKBONE),
        ({"train_generator": True}, "linear", CONTENT),
        ({"loss": "simsiam"}, "linear", CONTENT + 2 * (3 * 3 + 3)),
        ({}, "normalised", CONTENT + 4 * FEATURES),
        ({"share_statistics": False}, "normalised", CONTENT + 2 * FEATURES),
    ],
)
def test_only_content_net_and_projector_travel(given: dict[str, Any], kind: str, numbers: int) -> None:
    peers = make(hyper(**given), kind=kind)
    traffic = run_rounds(peers, LINE, 2)
    for t in range(2):
        assert [payload(one[t].sent) for one in traffic] == [4 * numbers * degree for degree in (1, 2, 1)]
    (layout,) = peers[0].layouts()
    parts = {str(name).partition(".")[0] for _, name in layout.tensors}
    assert parts <= {"backbone", "projector", "predictor"}


def test_missing_neighbor_is_excluded_from_the_average() -> None:
    expected = [StyleReference(peer) for peer in make(hyper())]
    peers = make(hyper())
    traffic = run_rounds(peers, LINE, 1, silent=[2])
    assert traffic[1][0].missing == {"Content": [2]}
    for reference in expected[:2]:
        reference.extract()
        reference.train()
    mean = {name: (4 * expected[0].local[name] + 6 * expected[1].local[name]) / 10 for name in expected[0].local}
    agree(peers[1].averaged, mean)
    assert peers[1].weights() == pytest.approx({0: 0.4, 1: 0.6})


def test_peer_without_participating_neighbors_keeps_its_average() -> None:
    line = Topology.from_edges(6, [(i, i + 1) for i in range(5)])
    peers = make(hyper(participation=0.2), 6)
    before = [digest(peer.averaged.state_dict()) for peer in peers]
    run_rounds(peers, line, 1)
    (chosen,) = participants(6, 0.2, 0)
    assert [digest(peer.averaged.state_dict()) != one for peer, one in zip(peers, before, strict=True)] == [
        abs(me - chosen) <= 1 for me in range(6)
    ]
    assert peers[chosen].weights() == {chosen: 1.0}


def test_first_round_waits_for_style_extraction(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    exchange = Net.exchange

    async def spy(net: Net, body: Content, among: Any = None, deadline_factor: float = 1.0) -> Any:
        asked.append(deadline_factor)
        return await exchange(net, body, among, deadline_factor)

    monkeypatch.setattr(Net, "exchange", spy)
    run_rounds(make(hyper(style_epochs=6), 1), ALONE, 3)
    assert asked == [4.0, 1.0, 1.0]


def test_neighbors_wait_for_the_style_extraction_of_a_late_joiner() -> None:
    peer = make(hyper(style_epochs=6), 1)[0]
    peer.style_extracted = True
    rounds = {1: 0, 2: 5}
    net = Mock(sources=[1, 2], rounds_since_join=rounds.__getitem__)
    assert peer.deadline_factor(net) == 4.0
    rounds[1] = 1
    assert peer.deadline_factor(net) == 1.0


def test_peer_without_samples_adopts_the_average() -> None:
    peers = make(hyper())
    peers[0] = FedStyle(hyper(), setting(0, 3, network("linear"), peer_data(styled(10, 0), [], test=range(4))))
    run_rounds(peers, LINE, 2)
    assert peers[0].weights() == {0: 0.0, 1: 1.0}
    agree(peers[0].averaged, Reference.of(peers[1].content))
    assert evaluate(peers[0].predict, peers[0].data, peers[0].data.test) is not None


@pytest.mark.exhaustive
@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_diverged_local_net_is_excluded_from_the_average(value: float) -> None:
    peers = make(hyper(lr=1e-9))
    with torch.no_grad():
        for parameters in (peers[1].content, peers[1].averaged):
            parameters.backbone[1].weight[0, 0] = value
    traffic = run_rounds(peers, LINE, 2)
    assert "Content" in traffic[0][0].missing
    assert traffic[0][1].missing == {}
    for peer in peers:
        assert not any(map(has_diverged, peer.averaged.state_dict().values()))
        assert not any(map(has_diverged, peer.infusion.generator.state_dict().values()))


@pytest.mark.exhaustive
def test_style_net_that_diverges_is_replaced_by_the_untrained_one(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = make(hyper(lr=1e-9))
    untrained = clone(peers[1].infusion.style_net.state_dict())
    make_optimizer = type(peers[1].hyper).make_optimizer
    calls = iter(range(1000))

    def far_too_fast(h: Any, parameters: Any) -> Any:
        return make_optimizer(replace(h, lr=1e30) if next(calls) == 0 else h, parameters)

    with monkeypatch.context() as patch:
        patch.setattr(type(peers[1].hyper), "make_optimizer", far_too_fast)
        peers[1].extract_style()
    assert digest(peers[1].infusion.style_net.state_dict()) == digest(untrained)
    run_rounds(peers, LINE, 2)
    for peer in peers:
        assert not any(map(has_diverged, peer.state_dict()["content"].values()))


# ---- statistics, projectors, initial values ------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("shared", [True, False])
def test_statistics_are_averaged_or_stay_local(shared: bool) -> None:
    peers = make(hyper(share_statistics=shared), kind="normalised")
    run_rounds(peers, complete(3), 2)
    local = [dict(peer.content.named_buffers())["backbone.2.running_mean"] for peer in peers]
    averaged = [dict(peer.averaged.named_buffers())["backbone.2.running_mean"] for peer in peers]
    mean = sum((4 + 2 * j) * local[j] for j in range(3)) / 18
    for j in range(3):
        torch.testing.assert_close(averaged[j], mean if shared else local[j])
    assert not torch.equal(local[0], local[1])


def test_projectors_stay_local_without_share_projector() -> None:
    peers: list[Any] = make(hyper(share_projector=False))
    start = peers[0].content.projector[0].weight.detach().clone()
    run_rounds(peers, complete(3), 2)
    kept = [peer.content.projector[0].weight for peer in peers]
    assert not torch.equal(kept[0], kept[1])
    assert all(torch.equal(peer.averaged.projector[0].weight, start) for peer in peers)
    assert len({digest(peer.averaged.backbone.state_dict()) for peer in peers}) == 1


def test_widths_follow_from_features_and_content_nets_start_equal() -> None:
    one, two = make(hyper())[:2]
    assert one.widths == (FEATURES, 3, 3)
    assert make(hyper(hidden=None, output=None))[0].widths == (FEATURES, FEATURES // 2, FEATURES // 4)
    assert [tuple(layer.weight.shape) for layer in one.infusion.generator if isinstance(layer, nn.Linear)] == [
        (3, 2 * FEATURES),
        (FEATURES, 3),
    ]
    assert digest(one.content.state_dict()) == digest(two.content.state_dict()) == digest(one.averaged.state_dict())
    assert digest(one.infusion.generator.state_dict()) != digest(two.infusion.generator.state_dict())
