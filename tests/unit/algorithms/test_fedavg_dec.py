"""Decentralized FedAvg and FedProx against Algorithm 2: rounds in numpy, clusters, every byte, missing peers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2pfl.algorithms.aggregator_roles import Assignment
from p2pfl.algorithms.fedavg_dec import (
    Averaged,
    FedAvgDec,
    FedProxDec,
    Hyper,
    ProxHyper,
    Trained,
    by_architecture,
    mean_model,
)
from p2pfl.errors import Unexpected
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.tensors import buffers_of, digest, has_diverged, parameters_of
from tests.bodies import arrive, net_of
from tests.regression import Matrix, regression_data, theta
from tests.support import mean_at, messages, payload, peer_data, random_dataset, run_rounds, setting

INPUTS, CLASSES = 4, 3
LINE = Topology.from_edges(4, [(0, 1), (1, 2), (2, 3)])


def complete(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, j) for i in range(peers) for j in range(i)])


COMPLETE = complete(4)


def model(name: str) -> Model:
    """``flat`` and ``other`` are softmax regressions; ``normalized`` has statistics. From torch's global RNG."""
    if name == "normalized":
        return Model(name, nn.Sequential(nn.Flatten(), nn.BatchNorm1d(INPUTS)), INPUTS, CLASSES)
    return Model(name, nn.Flatten(), INPUTS, CLASSES)


def make(
    h: Hyper, names: Sequence[str] = ("flat", "other", "flat", "flat"), of: type[FedAvgDec] = FedAvgDec
) -> list[Any]:
    """Peers with these architectures; peer i has 6 + 2 i samples, of two of the classes."""
    peers = []
    for me, name in enumerate(names):
        dataset = random_dataset(3 * (6 + 2 * me), classes=CLASSES, seed=me)
        mine = [n for n in range(len(dataset.train)) if n % CLASSES != me % CLASSES][: 6 + 2 * me]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(me)
            given = setting(me, len(names), model(name), peer_data(dataset, mine))
        peers.append(of(h, replace(given, architectures=tuple(names), build=lambda peer: model(names[peer]))))
    return peers


def assignments(peers: Sequence[FedAvgDec], topology: Topology, rounds: int) -> list[Assignment]:
    net = net_of(0, topology, 0, 0)
    return [peers[0].schedule.assignment(t, net) for t in range(rounds)]


def expected_training(peer: FedAvgDec, w: Matrix, mu: float = 0.0) -> Matrix:
    """Local epochs of a softmax regression with WSM on all samples at once, from w."""
    h, (x, labels) = peer.hyper, regression_data(peer.data.train)
    beta = np.bincount(labels, minlength=CLASSES) / len(x)
    start, velocity = w, np.zeros_like(w)
    for _ in range(h.local_epochs):
        scores = beta * np.exp(x @ w.T)
        residual = scores / scores.sum(axis=1, keepdims=True) - np.eye(CLASSES)[labels]
        velocity = h.momentum * velocity + residual.T @ x / len(x) + h.weight_decay * w + mu * (w - start)
        w = w - h.lr * velocity
    return w


def expected_rounds(
    peers: Sequence[FedAvgDec],
    w: list[Matrix],
    schedule: Sequence[Assignment],
    mu: float = 0.0,
    dead: Sequence[int] = (),
) -> None:
    """Algorithm 2 on ``w``, in place."""
    for assignment in schedule:
        present = [n for n in assignment.participants if n not in dead]
        for n in present:
            w[n] = expected_training(peers[n], w[n], mu)
        if assignment.aggregator in dead:
            continue
        for name in {peers[n].model.name for n in present}:
            cluster = [n for n in present if peers[n].model.name == name]
            samples = [len(peers[n].data.train) for n in cluster]
            mean = np.average([w[n] for n in cluster], axis=0, weights=samples)
            for n in cluster:
                w[n] = mean


# ---- rounds against a reference in numpy ---------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", [COMPLETE, LINE], ids=["complete", "line"])
@pytest.mark.parametrize("mu", [None, 0.5, 2.0])
def test_rounds_follow_algorithm_2(topology: Topology, mu: float | None) -> None:
    local: Any = {"lr": 0.3, "local_epochs": 3}
    peers = make(Hyper(**local)) if mu is None else make(ProxHyper(**local, mu=mu), of=FedProxDec)
    w = [theta(peer.model) for peer in peers]
    run_rounds(peers, topology, 7)
    expected_rounds(peers, w, assignments(peers, topology, 7), mu or 0.0)
    for peer, expected in zip(peers, w, strict=True):
        np.testing.assert_allclose(theta(peer.model), expected, atol=1e-5)


def test_full_participation_makes_models_of_one_architecture_equal() -> None:
    peers = make(Hyper(participation=1.0), names=("flat", "other", "flat", "other"))
    run_rounds(peers, COMPLETE, 2)
    for a, b in ((0, 2), (1, 3)):
        assert digest(peers[a].model.state_dict()) == digest(peers[b].model.state_dict())
    assert digest(peers[0].model.state_dict()) != digest(peers[1].model.state_dict())


def test_models_of_one_architecture_start_equal() -> None:
    peers = make(Hyper(), names=("flat", "other", "flat", "normalized", "normalized"))
    assert digest(peers[0].model.state_dict()) == digest(peers[2].model.state_dict())
    assert digest(peers[3].model.state_dict()) == digest(peers[4].model.state_dict())


def test_only_models_of_one_architecture_are_averaged() -> None:
    bodies = {
        2: Trained("b", {"w": torch.tensor([4.0])}, 3),
        0: Trained("a", {"w": torch.tensor([1.0])}, 1),
        1: Trained("a", {"w": torch.tensor([5.0])}, 3),
    }
    clusters = by_architecture(bodies)
    assert {name: list(cluster) for name, cluster in clusters.items()} == {"a": [0, 1], "b": [2]}
    assert mean_model(clusters["a"], mean_at())["w"].tolist() == [4.0]
    assert mean_model(clusters["b"], mean_at())["w"].tolist() == [4.0]


@pytest.mark.parametrize(("samples", "mean"), [((0, 0), 3.0), ((0, 7), 5.0)])
def test_mean_model_without_samples_is_unweighted(samples: tuple[int, int], mean: float) -> None:
    bodies = {n: Trained("a", {"w": torch.tensor([w])}, samples[n]) for n, w in ((0, 1.0), (1, 5.0))}
    assert mean_model(bodies, mean_at())["w"].tolist() == [mean]


def test_batch_norm_statistics_stay_local() -> None:
    peers = make(Hyper(participation=1.0), names=("normalized",) * 3)
    traffic = run_rounds(peers, complete(3), 2)
    means = [buffers_of(peer.model)["backbone.1.running_mean"] for peer in peers]
    assert not torch.equal(means[0], means[1])
    numbers = sum(value.numel() for value in parameters_of(peers[0].model).values())
    assert sum(payload(one.sent) for peer in traffic for one in peer) == 2 * 4 * 4 * numbers


# ---- what travels --------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("participation", [0.25, 0.5, 1.0])
def test_two_models_travel_per_sender_and_round(participation: float) -> None:
    peers = make(Hyper(participation=participation))
    traffic = run_rounds(peers, COMPLETE, 4)
    for t, assignment in enumerate(assignments(peers, COMPLETE, 4)):
        assert sum(messages(peer[t].sent, "Trained") for peer in traffic) == len(assignment.senders)
        assert sum(messages(peer[t].sent, "Averaged") for peer in traffic) == len(assignment.senders)
        model_bytes = 4 * CLASSES * (INPUTS + 1)
        assert sum(payload(peer[t].sent) for peer in traffic) == 2 * len(assignment.senders) * model_bytes
        for me in set(range(4)) - set(assignment.participants):
            assert traffic[me][t].sent == traffic[me][t].received == {}


def test_invalid_model_is_rejected_on_arrival() -> None:
    layouts = make(Hyper(), names=("flat", "normalized"))[0].layouts()
    flat, normalized = (parameters_of(model(name)) for name in ("flat", "normalized"))
    assert arrive(Trained("normalized", normalized, 3), layouts).samples == 3
    assert arrive(Averaged(flat), layouts).values.keys() == flat.keys()
    for wrong in (
        Trained("normalized", flat, 3),
        Trained("flat", normalized, 3),
        Trained("resnet18", flat, 3),
        Trained("flat", flat, -1),
        Averaged(normalized),
    ):
        with pytest.raises(Unexpected):
            arrive(wrong, layouts)


# ---- missing peers and divergence ----------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("dead", [0, 3])
def test_dead_peer_is_skipped(dead: int) -> None:
    peers = make(Hyper(participation=1.0, lr=0.3))
    w = [theta(peer.model) for peer in peers]
    traffic = run_rounds(peers, COMPLETE, 4, silent=[dead])
    expected_rounds(peers, w, assignments(peers, COMPLETE, 4), dead=[dead])
    for me in set(range(4)) - {dead}:
        np.testing.assert_allclose(theta(peers[me].model), w[me], atol=1e-5)
        missing = traffic[me][0].missing
        assert missing == ({"Averaged": [0]} if dead == 0 else {"Trained": [3]} if me == 0 else {})


def test_aggregator_does_not_adopt_an_average_that_overflows() -> None:
    largest = torch.finfo(torch.float32).max
    counts = {n: 6 + 2 * n for n in range(7)}  # their rounded weights add up to more than 1
    models = {n: Trained("", {"w": torch.tensor(largest)}, count) for n, count in counts.items()}
    assert mean_model(models, mean_at())["w"] > largest
    peers = make(Hyper(participation=1.0, fixed_aggregator=True), names=["flat"] * 7)
    for peer in peers:
        peer.local_training = lambda: None
        peer.model.head.weight.data[0, 0] = largest
    run_rounds(peers, complete(7), 1)
    assert all(np.isfinite(theta(peer.model)).all() for peer in peers)


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_diverged_model_is_skipped(value: float) -> None:
    peers = make(Hyper(participation=1.0, fixed_aggregator=True, lr=0.3))
    with torch.no_grad():
        peers[2].model.head.bias[1] = value
    w = [theta(peer.model) for peer in peers]
    traffic = run_rounds(peers, COMPLETE, 3)
    expected_rounds(peers, w, assignments(peers, COMPLETE, 3), dead=[2])
    for me in (0, 1, 3):
        np.testing.assert_allclose(theta(peers[me].model), w[me], atol=1e-5)
    assert [traffic[me][0].missing for me in range(4)] == [{"Trained": [2]}, {}, {}, {}]


def test_aggregator_that_has_diverged_continues_with_finite_statistics() -> None:
    peers = make(Hyper(participation=1.0, fixed_aggregator=True, lr=0.3), ["normalized"] * 4)
    with torch.no_grad():
        peers[0].model.head.bias[1] = math.nan
        peers[0].model.backbone[1].running_mean[0] = math.nan
    run_rounds(peers, COMPLETE, 2)
    assert not any(map(has_diverged, peers[0].model.state_dict().values()))
    torch.testing.assert_close(parameters_of(peers[0].model), parameters_of(peers[1].model))


# ---- options -------------------------------------------------------------------------------------------------


@cache
def option_outcome(**given: Any) -> list[str]:
    peers = make(ProxHyper.parse({"batch": 4, "lr": 0.3, "mu": 1.0, **given}), of=FedProxDec)
    run_rounds(peers, COMPLETE, 4)
    return [digest(peer.state_dict()) for peer in peers]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "given",
    [
        {"participation": 0.25},
        {"fixed_aggregator": True},
        {"local_epochs": 2},
        {"batch": 3},
        {"lr": 0.1},
        {"momentum": 0.0},
        {"weight_decay": 0.0},
        {"supervision": "ce"},
        {"supervision": "ace"},
        {"supervision": "masked"},
        {"mu": 0.5},
        {"optimizer": "adam"},
    ],
    ids=lambda given: ", ".join(f"{key} {value}" for key, value in given.items()),
)
def test_every_option_changes_the_outcome(given: dict[str, Any]) -> None:
    assert option_outcome(**given) != option_outcome()


def test_fedprox_with_mu_0_is_fedavg() -> None:
    prox, plain = make(ProxHyper(mu=0.0, batch=4), of=FedProxDec), make(Hyper(batch=4))
    run_rounds(prox, COMPLETE, 4)
    run_rounds(plain, COMPLETE, 4)
    assert [digest(peer.state_dict()) for peer in prox] == [digest(peer.state_dict()) for peer in plain]


def test_local_accuracy_uses_validation_samples() -> None:
    (peer, *_) = make(Hyper())
    (measure,) = peer.extra_metrics(whole=True)
    assert (measure.name, measure.samples) == ("local", peer.data.validation)
