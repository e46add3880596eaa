"""FedFomo against its paper: each equation by hand, and whole rounds in numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from p2pfl.algorithms.dpsgd import Parameters
from p2pfl.algorithms.fedfomo import (
    FedFomo,
    Hyper,
    Request,
    chosen,
    exploration_at,
    first_order_weight,
    positive_part,
)
from p2pfl.data import Dataset, Split
from p2pfl.errors import RunFileError
from p2pfl.messaging.topology import Topology
from p2pfl.options import OptionErrors
from p2pfl.run_file.load import from_dict
from p2pfl.simulation.simulate import simulate
from p2pfl.tensors import LIMIT, distance
from tests.conftest import tree
from tests.regression import Matrix, gradient, regression_data, theta
from tests.support import (
    Traffic,
    messages,
    payload,
    peer_data,
    random_dataset,
    run_rounds,
    setting,
    softmax_regression,
)

INPUTS, CLASSES = 4, 3
BYTES = 4 * CLASSES * (INPUTS + 1)
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
ALONE = Topology.from_edges(1, [])


def complete(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, j) for i in range(peers) for j in range(i)])


def make(peers: int = 3, **given: Any) -> list[FedFomo]:
    """Equal softmax regressions. Peer i trains on 6 + 2i samples of private noise and validates on 5 others."""
    h = Hyper.parse({"lr": 0.5, "batch": 64, **given})  # all samples in one batch: an epoch is a step
    return [
        FedFomo(
            h,
            setting(
                me,
                peers,
                softmax_regression(INPUTS, CLASSES, seed=7),
                peer_data(random_dataset(25, classes=CLASSES, seed=me), range(6 + 2 * me), validation=range(20, 25)),
            ),
        )
        for me in range(peers)
    ]


def log_probabilities(x: Matrix, some: Any) -> Matrix:
    scores = regression_data(some)[0] @ x.T
    return np.asarray(scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)))


def validation_loss(peer: FedFomo, x: Matrix) -> float:
    some = peer.data.validation
    return float(-log_probabilities(x, some)[np.arange(len(some)), some.labels].mean())


def descend(peer: FedFomo, x: Matrix) -> Matrix:
    """One full-batch step."""
    return np.asarray(x - peer.hyper.lr * gradient(x, *regression_data(peer.data.train)))


def weights_by_hand(peer: FedFomo, before: Matrix, models: Mapping[int, Matrix]) -> dict[int, float]:
    """w_ij of the paper."""
    loss = validation_loss(peer, before)
    return {
        j: (loss - validation_loss(peer, model)) / float(np.linalg.norm(model - before))
        for j, model in models.items()
    }


def mix_by_hand(before: Matrix, models: Mapping[int, Matrix], w: Mapping[int, float]) -> Matrix:
    """The paper's update of θ."""
    total = sum(max(value, 0.0) for value in w.values())
    result = before
    for j, value in w.items():
        if value > 0:
            result = result + value / total * (models[j] - before)
    return result


def owners(record: Traffic) -> list[int]:
    """Peers whose models have arrived."""
    return sorted(j for j, kinds in record.received.items() if "Parameters" in kinds)


# ---- equations ---------------------------------------------------------------------------------------------


def test_exploration_falls_by_a_constant_down_to_0() -> None:
    h = Hyper.parse({"exploration": 0.3, "exploration_decay": 0.1})
    assert [exploration_at(h, t) for t in range(5)] == pytest.approx([0.3, 0.2, 0.1, 0.0, 0.0], abs=1e-12)


def test_without_exploration_the_largest_affinities_are_chosen_and_unknown_ones_are_0() -> None:
    affinity = {1: 0.5, 2: -0.1, 4: 0.7}
    for seed in range(10):
        draw = np.random.default_rng(seed)
        assert chosen(affinity, (1, 2, 3, 4), 2, 0.0, draw) == (1, 4)
        assert chosen(affinity, (1, 2, 3, 4), 3, 0.0, draw) == (1, 3, 4)
        assert chosen(affinity, (1, 2, 3), 9, 0.5, draw) == (1, 2, 3)
        assert chosen(affinity, (), 2, 0.5, draw) == ()


def test_equal_affinities_are_chosen_equally_often() -> None:
    draw = np.random.default_rng(0)
    counts = np.bincount([chosen({9: 1.0}, range(5), 1, 0.0, draw)[0] for _ in range(1000)], minlength=5)
    assert counts.min() > 150


def test_exploration_is_the_fraction_of_random_choices() -> None:
    draw = np.random.default_rng(0)
    best = [chosen({0: 1.0}, range(10), 1, 0.4, draw) == (0,) for _ in range(4000)]
    assert np.mean(best) == pytest.approx(0.6 + 0.4 / 10, abs=0.03)
    everything = {chosen({0: 2.0, 1: 1.0}, range(5), 2, 1.0, draw) for _ in range(500)}
    assert len(everything) == math.comb(5, 2)


def test_distance_is_euclidean_over_all_parameters() -> None:
    zero = {"weight": torch.zeros(2, 2), "bias": torch.zeros(1)}
    assert distance({"weight": torch.full((2, 2), 2.0), "bias": torch.tensor([3.0])}, zero) == 5.0


def test_weight_is_the_fall_of_the_loss_per_distance() -> None:
    assert first_order_weight(3.0, 1.0, 4.0) == 0.5
    assert first_order_weight(1.0, 3.0, 4.0) == -0.5
    assert first_order_weight(1.0, 1.0, 0.0) == 0.0  # the same model


def test_positive_weights_are_scaled_to_sum_1() -> None:
    assert positive_part({2: 0.5, 0: 1.5, 1: -3.0, 3: 0.0}) == {0: 0.75, 2: 0.25}
    assert positive_part({0: -1.0, 1: 0.0}) == {}


def test_validation_loss_is_the_mean_cross_entropy_and_leaves_the_model_alone() -> None:
    peer, other = make(2)
    with torch.no_grad():
        other.model.linear_head.bias.add_(torch.tensor([0.5, -1.0, 2.0]))
    before, parameters = theta(peer.model), dict(other.model.named_parameters())
    assert peer.validation_loss(parameters) == pytest.approx(validation_loss(peer, theta(other.model)), rel=1e-6)
    np.testing.assert_array_equal(theta(peer.model), before)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e9])
def test_useless_validation_losses_count_as_the_largest_one(value: float) -> None:
    (peer,) = make(1)
    theta = {name: torch.full_like(x, value) for name, x in peer.model.named_parameters()}
    theta["head.bias"] = torch.tensor([0.0, value, 0.0])
    assert peer.validation_loss(theta) == LIMIT


# ---- rounds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [complete(4), Topology.from_edges(4, [(0, 1), (1, 2), (2, 3)])])
def test_rounds_match_the_papers_update_over_all_neighbors(topology: Topology) -> None:
    peers = make(4)
    x = [theta(peer.model) for peer in peers]
    affinity: list[dict[int, float]] = [{} for _ in peers]
    rows: list[dict[int, float]] = []
    run_rounds(peers, topology, 3)
    for _ in range(3):
        y = [descend(peer, x[me]) for me, peer in enumerate(peers)]
        rows, mixed = [], []
        for me, peer in enumerate(peers):
            models = {j: y[j] for j in sorted((me, *topology.neighbors[me]))}
            w = weights_by_hand(peer, x[me], models)
            for j in topology.neighbors[me]:
                affinity[me][j] = affinity[me].get(j, 0.0) + w[j]
            total = sum(max(value, 0.0) for value in w.values())
            rows.append({j: value / total for j, value in w.items() if value > 0} or {me: 1.0})
            mixed.append(mix_by_hand(x[me], models, w))
        x = mixed
    for me, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), x[me], atol=1e-5)
        assert peer.affinity == pytest.approx(affinity[me], rel=1e-3, abs=1e-5)
        assert peer.weights() == pytest.approx(rows[me], rel=1e-3, abs=1e-4)
    assert any(len(row) > 1 for row in rows)


def test_only_those_that_asked_receive_a_model_and_they_asked_for_the_largest_affinity() -> None:
    peers = make(5, models=1, exploration=0.0)
    affinities: dict[tuple[int, int], dict[int, float]] = {}

    def remember(peer: Any, t: int) -> None:
        affinities[peer.me, t] = dict(peer.affinity)

    traffic = run_rounds(peers, complete(5), 5, after=remember)
    for me in range(5):
        for t in range(5):
            record = traffic[me][t]
            assert messages(record.sent, "Request") == 4
            (owner,) = owners(record)
            if t > 0:
                before = {j: affinities[me, t - 1].get(j, 0.0) for j in range(5) if j != me}
                assert before[owner] == max(before.values())
    for t in range(5):
        assert sum(payload(traffic[me][t].sent) for me in range(5)) == 5 * BYTES
    asked = {owners(traffic[me][t])[0] for me in range(5) for t in range(5)}
    assert len(asked) > 1


def test_neighbor_whose_model_raises_the_loss_is_asked_after_those_never_asked() -> None:
    peers = make(3, models=1, exploration=0.0)
    peers[0].affinity = {1: -0.5}
    traffic = run_rounds(peers, complete(3), 1)
    assert owners(traffic[0][0]) == [2]


@pytest.mark.exhaustive
def test_random_choices_differ_between_peers_and_rounds_and_repeat_in_another_run() -> None:
    runs = []
    for _ in range(2):
        peers = make(6, models=2, exploration=1.0, exploration_decay=0.0)
        traffic = run_rounds(peers, complete(6), 4)
        runs.append([[owners(record) for record in each] for each in traffic])
    assert runs[0] == runs[1]
    assert all(len({tuple(asked) for asked in each}) > 1 for each in runs[0])
    assert len({str(each) for each in runs[0]}) == 6


def mislabeled(peers: int = 1, **given: Any) -> list[FedFomo]:
    """Peers that train on label 0 and validate on the same image with label 1."""
    images = np.full((2, 1, 2, 2), 255, dtype=np.uint8)
    split = Split(images, np.array([0, 1]))
    dataset = Dataset("one image", split, split, CLASSES, mean=(0.0,), std=(1.0,), mirror=False)
    h = Hyper.parse({"lr": 0.5, "batch": 64, **given})
    return [
        FedFomo(h, setting(me, peers, softmax_regression(INPUTS, CLASSES), peer_data(dataset, [0], validation=[1])))
        for me in range(peers)
    ]


def test_peer_returns_to_its_model_if_none_lowers_the_loss() -> None:
    peers = mislabeled(2)
    before = theta(peers[0].model)
    run_rounds(peers, complete(2), 2)
    np.testing.assert_array_equal(theta(peers[0].model), before)
    assert peers[0].weights() == {0: 1.0}
    assert peers[0].affinity[1] < 0


def test_peer_alone_keeps_training() -> None:
    peers = make(1)
    x = theta(peers[0].model)
    run_rounds(peers, ALONE, 1)
    np.testing.assert_allclose(theta(peers[0].model), descend(peers[0], x), atol=1e-6)
    assert peers[0].weights() == {0: 1.0}
    assert peers[0].diagnostics() == {"validation_loss": pytest.approx(validation_loss(peers[0], x), rel=1e-5)}


# ---- failures ----------------------------------------------------------------------------------------------


def test_model_of_a_missing_neighbor_is_not_waited_for() -> None:
    peers = make()
    x = theta(peers[0].model)
    traffic = run_rounds(peers, LINE, 1, silent=[2])
    assert traffic[1][0].missing == {"Request": [2]}
    models = {j: descend(peers[j], x) for j in (0, 1)}
    w = weights_by_hand(peers[1], x, models)
    np.testing.assert_allclose(theta(peers[1].model), mix_by_hand(x, models, w), atol=1e-5)
    assert sorted(peers[1].affinity) == [0]


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_diverged_neighbor_is_no_candidate(value: float) -> None:
    peers = make()
    x = theta(peers[0].model)
    with torch.no_grad():
        peers[2].model.linear_head.weight[0, 0] = value
    traffic = run_rounds(peers, LINE, 1)
    assert traffic[1][0].missing == {"Parameters": [2]}
    models = {j: descend(peers[j], x) for j in (0, 1)}
    w = weights_by_hand(peers[1], x, models)
    np.testing.assert_allclose(theta(peers[1].model), mix_by_hand(x, models, w), atol=1e-5)
    assert sorted(peers[1].affinity) == [0]


def test_training_that_diverges_is_rolled_back() -> None:
    peers = make(lr=1e12)
    x = theta(peers[0].model)
    traffic = run_rounds(peers, LINE, 2)
    for peer in peers:
        np.testing.assert_array_equal(theta(peer.model), x)
    assert [record.missing for record in traffic[1]] == [{}, {}]


# ---- messages and hyper-parameters -------------------------------------------------------------------------


def test_requests_name_peers_of_the_run_only() -> None:
    request, model = make()[0].layouts()
    assert (request.body, model.body) == (Request, Parameters)
    assert request.mismatch({}, {"peers": (0, 2)}) is None
    assert "must be in 0 to 2" in str(request.mismatch({}, {"peers": (0, 3)}))
    assert "at most 3" in str(request.mismatch({}, {"peers": (0, 1, 2, 0)}))


@pytest.mark.parametrize(
    ("key", "wrong"), [("models", 0), ("exploration", 1.5), ("exploration", -0.1), ("exploration_decay", -1.0)]
)
def test_values_out_of_range_are_errors(key: str, wrong: float) -> None:
    with pytest.raises(OptionErrors, match=key):
        Hyper.parse({key: wrong})


def test_peers_without_validation_samples_are_an_error() -> None:
    with pytest.raises(RunFileError, match="validation"):
        simulate(from_dict(tree(algorithm="fedfomo", models="tiny-cnn")))
