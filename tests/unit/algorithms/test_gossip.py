"""Gossip learning against its paper: merges by age, who sends to whom, and rounds by hand on softmax regression."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from p2pfl import rng
from p2pfl.algorithms.gossip import Gossip, Hyper, drawn, merge_weights, senders_of
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.net import Net
from p2pfl.messaging.newest import Take
from p2pfl.messaging.topology import Topology, WeightedTopology
from tests.regression import Matrix, gradient, regression_data, theta
from tests.support import messages, peers_of, run_rounds, softmax_regression

INPUTS, CLASSES = 4, 3
TRIANGLE = Topology.from_edges(3, [(0, 1), (1, 2), (0, 2)])
PAIR = Topology.from_edges(2, [(0, 1)])


def make(peers: int = 3, **hyper: Any) -> list[Gossip]:
    """Softmax regressions with different initial values; peer i has 6 + i samples, which are one batch."""
    h = Hyper.parse({"lr": 0.5, "local_epochs": 2, **hyper})
    return peers_of(Gossip, h, lambda me: softmax_regression(INPUTS, CLASSES, seed=me), peers, more=1, rounds=9)


def trained(peer: Gossip, x: Matrix) -> Matrix:
    for _ in range(2):
        x = x - 0.5 * gradient(x, *regression_data(peer.data.train))
    return x


def net_at(topology: Topology, seed: int = 0, me: int = 0) -> Net:
    return Net(cast(Any, SimpleNamespace(neighborhood=Neighborhood(me, topology))), 0, seed)


# ---- line 2


@pytest.mark.parametrize(
    ("me", "ages", "weights", "age"),
    [
        (0, {0: 5}, {0: 1.0}, 5),
        (0, {0: 3, 1: 1}, {0: 3 / 4, 1: 1 / 4}, 3),
        # 1/4 of the first one; then 4/7 of the second one, since 3 is the age of the first merge, not 4
        (0, {0: 3, 1: 1, 2: 4}, {0: 3 / 4 * 3 / 7, 1: 1 / 4 * 3 / 7, 2: 4 / 7}, 4),
        (1, {0: 3, 1: 1, 2: 4}, {0: 3 / 4 * 3 / 7, 1: 1 / 4 * 3 / 7, 2: 4 / 7}, 4),
        (2, {0: 3, 1: 1, 2: 4}, {0: 3 / 7 * 4 / 5, 1: 1 / 5, 2: 4 / 7 * 4 / 5}, 4),
        (0, {0: 0, 1: 0}, {0: 1 / 2, 1: 1 / 2}, 0),
        (0, {0: 0, 1: 2}, {0: 0.0, 1: 1.0}, 2),
        (0, {0: 2, 1: 0}, {0: 1.0, 1: 0.0}, 2),
        (3, {1: 1, 2: 3}, {1: 1 / 4, 2: 3 / 4}, 3),  # the local model has diverged
    ],
)
def test_models_are_merged_one_after_another_by_their_ages(
    me: int, ages: dict[int, int], weights: dict[int, float], age: int
) -> None:
    found, after = merge_weights(ages, me)
    assert (list(found), after) == (sorted(ages), age)
    assert found == pytest.approx(weights)


# ---- line 1


def test_all_peers_draw_the_same_receiver_among_those_of_the_sender() -> None:
    numbers = [rng.shared(7, "gossip.receivers", t).random(3) for t in range(4)]
    for me in range(3):
        net = net_at(TRIANGLE, 7, me)
        for t, row in enumerate(numbers):
            for sender in range(3):
                others = [j for j in range(3) if j != sender]
                assert list(drawn(net, t, sender)) == [others[int(row[sender] >= 0.5)]]


def test_each_receiver_is_drawn_as_often() -> None:
    net = net_at(Topology.from_edges(5, [(0, j) for j in range(1, 5)]))
    counts = np.bincount([drawn(net, t, 0)[0] for t in range(2000)], minlength=5)
    assert counts[0] == 0
    assert (abs(counts[1:] - 500) < 100).all()  # five standard deviations


def test_a_peer_sends_along_directed_edges_only_and_knows_its_senders() -> None:
    net = net_at(WeightedTopology.averaging(4, [(0, 1), (2, 1), (1, 2)]))
    assert [list(drawn(net, 0, sender)) for sender in range(4)] == [[1], [2], [1], []]
    assert [list(senders_of(net, me, 0)) for me in range(4)] == [[], [0, 2], [1], []]


# ---- rounds by hand


def test_rounds_send_merge_and_train() -> None:
    peers, rounds = make(), 3
    x, ages = [theta(peer.model) for peer in peers], [0, 0, 0]
    traffic = run_rounds(peers, TRIANGLE, rounds)
    net = net_at(TRIANGLE)
    for t in range(rounds):
        before, old, to = list(x), list(ages), [drawn(net, t, j)[0] for j in range(3)]
        for me, peer in enumerate(peers):
            w, age = before[me], old[me]
            for j in (j for j in range(3) if to[j] == me):
                w = (age * w + old[j] * before[j]) / (age + old[j]) if age + old[j] else (w + before[j]) / 2
                age = max(age, old[j])
            x[me], ages[me] = trained(peer, w), age + 2
            assert messages(traffic[me][t].sent) == 1
            assert set(traffic[me][t].received) == {j for j in range(3) if to[j] == me}
    assert ages == [2 * rounds] * 3
    for me, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), x[me], atol=1e-5)
        assert peer.age == ages[me]


def test_weights_are_those_of_the_last_merge() -> None:
    peers = make(2)
    run_rounds(peers, PAIR, 1)
    assert [peer.weights() for peer in peers] == [{0: 0.5, 1: 0.5}] * 2


def test_of_several_models_of_a_sender_the_newest_is_merged_and_none_twice() -> None:
    """Peer 0 is through before peer 1 begins, which then has models of age 0, 2, 4 and 6."""
    peers = make(2)
    x = [theta(peer.model) for peer in peers]
    states: dict[int, list[tuple[Matrix, int, Any]]] = {0: [], 1: []}
    run_rounds(
        peers,
        PAIR,
        4,
        after=lambda peer, t: states[peer.me].append((theta(peer.model), peer.age, peer.weights())),  # type: ignore[attr-defined]
        orders={
            0: [Take(t, "Aged", {1: []}) for t in range(4)],
            1: [
                Take(0, "Aged", {0: [0, 1, 2]}),
                *(Take(t, "Aged", {0: []}) for t in (1, 2)),
                Take(3, "Aged", {0: [3]}),
            ],
        },
    )
    alone = [x[0]]
    for _ in range(4):
        alone.append(trained(peers[0], alone[-1]))
    for t, (model, age, weights) in enumerate(states[0]):
        np.testing.assert_allclose(model, alone[t + 1], atol=1e-5)
        assert (age, weights) == (2 * (t + 1), {0: 1.0})
    expected = alone[2]  # age 4, of round 2, beside 0
    ages = []
    for t, (model, age, weights) in enumerate(states[1]):
        if t == 3:  # 10 = 4 + 3 rounds of 2 steps, beside 6
            expected = (10 * expected + 6 * alone[3]) / 16
            assert weights == pytest.approx({0: 6 / 16, 1: 10 / 16})
        expected = trained(peers[1], expected)
        np.testing.assert_allclose(model, expected, atol=1e-5)
        ages.append(age)
    assert ages == [6, 8, 10, 12]


def test_the_age_of_a_model_that_went_through_the_rounds_of_all_peers_is_accepted() -> None:
    (layout,) = make(3)[0].layouts()
    allowed = layout.plain["age"].range
    assert allowed is not None
    assert allowed.start == 0
    assert 3 * 9 * 2 * 1000 in allowed  # peers, rounds, epochs, and batches of one sample
    assert -1 not in allowed


# ---- models that have diverged


def test_a_model_that_has_diverged_is_replaced_by_what_arrives_and_dropped_by_its_receivers() -> None:
    peers = make(2, momentum=0.9)
    x = theta(peers[0].model)
    with torch.no_grad():
        peers[1].model.linear_head.weight[0, 0] = torch.nan
    for parameter in peers[1].model.parameters():
        peers[1].optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, torch.nan)
    peers[0].age, peers[1].age = 6, 100
    traffic = run_rounds(peers, PAIR, 1)
    assert [peer.weights() for peer in peers] == [{0: 1.0}, {0: 1.0}]
    assert [peer.age for peer in peers] == [8, 8]
    assert traffic[0][0].received.keys() == {1}
    for peer in peers:
        first = x - 0.5 * (velocity := gradient(x, *regression_data(peer.data.train)))
        expected = first - 0.5 * (0.9 * velocity + gradient(first, *regression_data(peer.data.train)))
        np.testing.assert_allclose(theta(peer.model), expected, atol=1e-5)


def test_a_model_that_has_diverged_stays_where_nothing_arrives() -> None:
    (peer,) = make(1)
    with torch.no_grad():
        peer.model.linear_head.weight[0, 0] = torch.nan
    run_rounds([peer], Topology.from_edges(1, []), 1)
    assert (peer.weights(), peer.age) == ({}, 2)


def test_samples_decide_how_fast_a_model_ages() -> None:
    peers = make(2, batch=4, local_epochs=1)  # 6 and 7 samples
    assert [peer.steps for peer in peers] == [2, 2]
    assert [peer.steps for peer in make(2, batch=3, local_epochs=2)] == [4, 4]  # a last batch of one is skipped
