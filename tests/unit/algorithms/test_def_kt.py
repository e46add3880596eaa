"""Def-KT against its algorithm: rounds in numpy, every byte, missing peers, divergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2pfl.algorithms.def_kt import DefKT, Hyper, LocallyTrained
from p2pfl.errors import Unexpected
from p2pfl.messaging.topology import Topology, WeightedTopology
from p2pfl.models import Model
from p2pfl.options import OptionErrors
from p2pfl.tensors import digest
from tests.bodies import arrive, net_of
from tests.regression import Matrix, regression_data, softmax, theta
from tests.support import messages, payload, peer_data, random_dataset, run_rounds, setting, softmax_regression

INPUTS, CLASSES = 4, 3
COMPLETE = Topology.from_edges(4, [(i, j) for i in range(4) for j in range(i)])
LINE = Topology.from_edges(4, [(0, 1), (1, 2), (2, 3)])
CIRCLE = WeightedTopology.averaging(4, [(0, 1), (1, 2), (2, 3), (3, 0)])


def normalized(seed: int) -> Model:
    """A model with batch normalization and dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = (nn.Flatten(), nn.Linear(INPUTS, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3))
        return Model("normalized", nn.Sequential(*layers), 6, CLASSES)


def flat(seed: int) -> Model:
    return softmax_regression(INPUTS, CLASSES, seed)


def make(h: Hyper, model: Callable[[int], Model] = flat, peers: int = 4) -> list[DefKT]:
    """Peers with different initial models; peer i has 6 + 2 i samples, of two of the classes."""
    made = []
    for me in range(peers):
        dataset = random_dataset(3 * (6 + 2 * me), classes=CLASSES, seed=me)
        mine = [n for n in range(len(dataset.train)) if n % CLASSES != me % CLASSES][: 6 + 2 * me]
        made.append(DefKT(h, setting(me, peers, model(me), peer_data(dataset, mine))))
    return made


def pairs(peers: Sequence[DefKT], topology: Topology, rounds: int) -> list[dict[int, int]]:
    net = net_of(0, topology, 0, 0)
    return [peers[0].schedule.pairs(t, net) for t in range(rounds)]


def samples(peer: DefKT) -> tuple[Matrix, Matrix]:
    """Inputs with a 1 for the bias, and labels as unit vectors."""
    x, labels = regression_data(peer.data.train)
    return x, np.eye(CLASSES)[labels]


def expected_training(peer: DefKT, w: Matrix) -> Matrix:
    """Line 2, with all samples in one batch."""
    x, y = samples(peer)
    for _ in range(peer.hyper.local_epochs):
        w = w - peer.hyper.lr * (softmax(x @ w.T) - y).T @ x / len(x)
    return w


def expected_transfer(peer: DefKT, arrived: Matrix, local: Matrix) -> Matrix:
    """Lines 4 and 5; the gradient of KL(q ‖ p) with respect to the logits of p is p − q."""
    x, y = samples(peer)
    for _ in range(peer.hyper.mutual_epochs):
        p, q = softmax(x @ arrived.T), softmax(x @ local.T)
        arrived = arrived - peer.hyper.lr * (p - y + p - q).T @ x / len(x)
        local = local - peer.hyper.lr * (q - y + q - p).T @ x / len(x)
    return arrived


def expected_rounds(
    peers: Sequence[DefKT], w: list[Matrix], drawn: Sequence[dict[int, int]], dead: Sequence[int] = ()
) -> None:
    """The algorithm on ``w``, in place."""
    for each in drawn:
        for a, b in each.items():
            if a not in dead:
                w[a] = expected_training(peers[a], w[a])
                if b not in dead:
                    w[b] = expected_transfer(peers[b], w[a], w[b])


# ---- rounds --------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", [COMPLETE, LINE, CIRCLE], ids=["complete", "line", "directed circle"])
def test_rounds_follow_the_algorithm(topology: Topology) -> None:
    peers = make(Hyper(lr=0.3, local_epochs=2, mutual_epochs=3))
    w = [theta(peer.model) for peer in peers]
    run_rounds(peers, topology, 6)
    drawn = pairs(peers, topology, 6)
    expected_rounds(peers, w, drawn)
    for peer, expected in zip(peers, w, strict=True):
        np.testing.assert_allclose(theta(peer.model), expected, atol=1e-5)
    assert {b for each in drawn for b in each.values()} == {0, 1, 2, 3}


def test_receiver_continues_with_the_model_that_arrived() -> None:
    peers = make(Hyper(lr=1e-6))
    w = [theta(peer.model) for peer in peers]
    run_rounds(peers, COMPLETE, 1)
    for a, b in pairs(peers, COMPLETE, 1)[0].items():
        np.testing.assert_allclose(theta(peers[b].model), w[a], atol=1e-4)
        np.testing.assert_allclose(theta(peers[a].model), w[a], atol=1e-4)


def test_each_pair_sends_one_model() -> None:
    peers = make(Hyper(participation=0.25))
    traffic = run_rounds(peers, COMPLETE, 5)
    for t, each in enumerate(pairs(peers, COMPLETE, 5)):
        ((a, b),) = each.items()
        assert messages(traffic[a][t].sent, "LocallyTrained") == messages(traffic[b][t].received) == 1
        assert payload(traffic[a][t].sent) == 4 * CLASSES * (INPUTS + 1)
        assert all(traffic[me][t].sent == {} for me in set(range(4)) - {a})


def test_statistics_of_batch_normalization_travel_with_the_model() -> None:
    peers = make(Hyper(), normalized)
    for peer in peers:
        peer.local_training = lambda: None  # type: ignore[method-assign]
        peer.mutual_learning = lambda arrived: None  # type: ignore[method-assign]
        backbone: Any = peer.model.backbone
        backbone[2].running_mean += 1.0 + peer.me
    run_rounds(peers, COMPLETE, 1)
    for a, b in pairs(peers, COMPLETE, 1)[0].items():
        assert digest(peers[a].model.state_dict()) == digest(peers[b].model.state_dict())


def test_models_with_tied_weights_are_exchanged() -> None:
    def tied(seed: int) -> Model:
        first, second = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)
        second.weight = first.weight
        return Model("tied", nn.Sequential(nn.Flatten(), first, nn.ReLU(), second), INPUTS, CLASSES)

    peers = make(Hyper(lr=0.1), tied)
    schedule = pairs(peers, COMPLETE, 2)
    assert schedule[0]
    before = digest(peers[next(iter(schedule[0].values()))].model.state_dict())
    traffic = run_rounds(peers, COMPLETE, 2)
    assert [record.missing for records in traffic for record in records] == [{}] * 8
    receiver = peers[next(iter(schedule[0].values()))]
    assert digest(receiver.model.state_dict()) != before
    _, first, _, second = receiver.model.backbone.children()
    assert first.weight is second.weight


def test_invalid_model_is_rejected_on_arrival() -> None:
    flat, other = make(Hyper())[0], make(Hyper(), normalized)[0]
    body = flat.local_model()
    assert arrive(body, flat.layouts()).parameters.keys() == body.parameters.keys()
    halved = {name: tensor[:2] for name, tensor in body.parameters.items()}
    for wrong in (other.local_model(), LocallyTrained({}, {}), LocallyTrained(halved, {})):
        with pytest.raises(Unexpected):
            arrive(wrong, flat.layouts())


# ---- missing peers and divergence ----------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [0, 2])
def test_dead_peer_is_skipped(dead: int) -> None:
    peers = make(Hyper(lr=0.3))
    w = [theta(peer.model) for peer in peers]
    traffic = run_rounds(peers, COMPLETE, 5, silent=[dead])
    drawn = pairs(peers, COMPLETE, 5)
    expected_rounds(peers, w, drawn, dead=[dead])
    for me in set(range(4)) - {dead}:
        np.testing.assert_allclose(theta(peers[me].model), w[me], atol=1e-5)
    missed = [(t, each[dead]) for t, each in enumerate(drawn) if dead in each]
    assert missed
    assert [(t, me) for t in range(5) for me in range(4) if me != dead and traffic[me][t].missing] == missed


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_receiver_keeps_its_model_if_that_of_its_sender_has_diverged(value: float) -> None:
    peers = make(Hyper(lr=0.3))
    w = [theta(peer.model) for peer in peers]
    a, b = next(iter(pairs(peers, COMPLETE, 1)[0].items()))
    peers[a].local_training = lambda: None  # type: ignore[method-assign]
    with torch.no_grad():
        peers[a].model.linear_head.bias[1] = value
    traffic = run_rounds(peers, COMPLETE, 1)
    np.testing.assert_array_equal(theta(peers[b].model), w[b])
    assert traffic[b][0].missing == {"LocallyTrained": [a]}


def test_peer_whose_training_diverges_restores_its_model() -> None:
    peers = make(Hyper(lr=1e20))
    w = [theta(peer.model) for peer in peers]
    run_rounds(peers, COMPLETE, 3)
    for peer, before in zip(peers, w, strict=True):
        np.testing.assert_array_equal(theta(peer.model), before)


def test_diverged_local_model_recovers_with_the_one_that_arrives() -> None:
    peers = make(Hyper(lr=0.3))
    w = [theta(peer.model) for peer in peers]
    a, b = next(iter(pairs(peers, COMPLETE, 1)[0].items()))
    with torch.no_grad():
        peers[b].model.linear_head.bias[1] = math.nan
    run_rounds(peers, COMPLETE, 1)
    expected, (x, y) = expected_training(peers[a], w[a]), samples(peers[b])
    expected = expected - 0.3 * (softmax(x @ expected.T) - y).T @ x / len(x)  # no teacher
    np.testing.assert_allclose(theta(peers[b].model), expected, atol=1e-5)


# ---- options -------------------------------------------------------------------------------------------------


@cache
def option_outcome(**given: Any) -> list[str]:
    peers = make(Hyper.parse({"batch": 4, "lr": 0.1, **given}), normalized)
    run_rounds(peers, COMPLETE, 3)
    return [digest(peer.state_dict()) for peer in peers]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "given",
    [
        *({"participation": 0.25}, {"local_epochs": 2}, {"mutual_epochs": 2}, {"batch": 3}, {"lr": 0.05}),
        *({"momentum": 0.9}, {"weight_decay": 0.1}, *({"supervision": form} for form in ("wsm", "ace", "masked"))),
        {"optimizer": "adam"},
    ],
    ids=lambda given: ", ".join(f"{key} {value}" for key, value in given.items()),
)
def test_every_option_changes_the_outcome(given: dict[str, Any]) -> None:
    assert option_outcome(**given) != option_outcome()


@pytest.mark.parametrize(
    "given",
    [{"participation": 0.6}, {"participation": 0}, {"mutual_epochs": 0}, {"patience": 0}, {"supervision": "kl"}],
)
def test_invalid_option_is_an_error(given: dict[str, Any]) -> None:
    (key,) = given
    with pytest.raises(OptionErrors, match=key):
        Hyper.parse(given)


def test_patience_prolongs_waits_but_changes_nothing_else() -> None:
    default, longer = make(Hyper()), make(replace(Hyper(), patience=7.0))
    assert longer[0].schedule.deadline_factor == 7.0
    run_rounds(default, COMPLETE, 2)
    run_rounds(longer, COMPLETE, 2)
    assert [digest(a.state_dict()) for a in default] == [digest(b.state_dict()) for b in longer]
