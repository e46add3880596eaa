"""DivShare against its paper: fragments and receivers, rounds by hand with and without waiting."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from p2pfl.algorithms.divshare import DivShare, Hyper, divided, drawn, kind_of
from p2pfl.errors import RunFileError
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.run_file.load import from_dict
from p2pfl.tensors import clone
from tests.bodies import complete
from tests.conftest import tree
from tests.in_order import run_in_order
from tests.regression import gradient, regression_data
from tests.support import payload, peer_data, peers_of, random_dataset, run_rounds, setting, softmax_regression

Vector = NDArray[np.float64]
PEERS, NUMBERS = 4, 15
"""A head of 3 x 4 weights and 3 biases."""


def make(peers: int = PEERS, **hyper: Any) -> list[DivShare]:
    """Softmax regressions with different initial values; peer i has 6 + i samples, one batch."""
    h = Hyper.parse({"lr": 0.5, **hyper})
    return peers_of(DivShare, h, lambda me: softmax_regression(4, 3, seed=me), peers, more=1)


def flat(peer: DivShare) -> Vector:
    head = peer.model.linear_head
    return np.asarray(torch.cat([head.weight.detach().reshape(-1), head.bias.detach()]).double().numpy())


def trained(peer: DivShare, x: Vector) -> Vector:
    """Return the parameters after an epoch of one batch, as ``flat`` does."""
    matrix = np.hstack([x[:12].reshape(3, 4), x[12:, None]])
    matrix = matrix - peer.hyper.lr * gradient(matrix, *regression_data(peer.data.train))
    return np.concatenate([matrix[:, :-1].reshape(-1), matrix[:, -1]])


def plan(sender: int, t: int, h: Hyper, topology: Topology, fragments: int) -> dict[int, list[int]]:
    net: Any = SimpleNamespace(seed=0, receivers_of=lambda peer, t: topology.receivers[peer])
    return drawn(net, t, sender, fragments, h.receivers)


# ---- fragments and receivers -------------------------------------------------------------------------------


def test_fragments_are_ranges_of_equal_size() -> None:
    tensors = {"a": torch.arange(5), "b": torch.arange(5, 6), "c": torch.arange(6, 11)}
    found = [{name: x.tolist() for name, x in part.items()} for part in divided(tensors, 4)]
    assert found == [{"a": [0, 1]}, {"a": [2, 3, 4]}, {"b": [5], "c": [6, 7]}, {"c": [8, 9, 10]}]
    (whole,) = divided(tensors, 1)
    assert {name: x.tolist() for name, x in whole.items()} == {name: x.tolist() for name, x in tensors.items()}
    assert [x.data_ptr() for x in whole.values()] == [x.data_ptr() for x in tensors.values()]


@pytest.mark.parametrize(
    ("fragment", "count"), [(1.0, 1), (0.5, 2), (0.3, 4), (0.1, 10), (1 / 3, 3), (0.07, 15), (0.01, 15)]
)
def test_number_of_fragments(fragment: float, count: int) -> None:
    (peer,) = make(1, fragment=fragment)
    parts = peer.fragments_of({"x": torch.arange(NUMBERS)})
    assert len(parts) == len(peer.layouts()) == count  # none is empty
    assert [type(part) for part in parts] == [kind_of(number) for number in range(count)]
    sizes = [len(part.values["x"]) for part in parts]
    assert (sum(sizes), max(sizes) - min(sizes) <= 1) == (NUMBERS, True)


def test_each_fragment_goes_to_different_neighbors_in_random_order() -> None:
    graph, h = complete(9), Hyper(receivers=3)
    plans = [plan(4, t, h, graph, 5) for t in range(400)]
    assert plans[0] == plan(4, 0, h, graph, 5) != plan(5, 0, h, graph, 5)
    assert all(sorted(each) == list(range(5)) for each in plans)
    assert all(len(set(to)) == 3 and to == sorted(to) and 4 not in to for each in plans for to in each.values())
    received = Counter(to for each in plans for to in each[2])
    assert all(100 < count < 200 for count in received.values())  # 400 · 3/8 = 150 on average
    firsts = Counter(next(iter(each)) for each in plans)
    assert all(40 < firsts[number] < 120 for number in range(5))
    line = Topology.from_edges(3, [(0, 1), (1, 2)])
    assert dict(sorted(plan(1, 0, Hyper(), line, 2).items())) == {0: [0, 2], 1: [0, 2]}


# ---- rounds by hand ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fragment", "receivers"), [(0.3, 1), (0.3, 2), (0.1, 6), (1.0, 1)])
def test_each_parameter_is_averaged_over_those_that_send_it(fragment: float, receivers: int) -> None:
    peers, graph = make(fragment=fragment, receivers=receivers), complete(PEERS)
    count = len(peers[0].layouts())
    bounds = list(pairwise(number * NUMBERS // count for number in range(count + 1)))
    x = [flat(peer) for peer in peers]
    for t in range(3):
        x = [trained(peer, x[i]) for i, peer in enumerate(peers)]
        plans = [plan(j, t, peers[0].hyper, graph, count) for j in range(PEERS)]
        averages, weights = np.array(x), np.zeros((PEERS, PEERS))
        for i in range(PEERS):
            for number, (first, end) in enumerate(bounds):
                senders = [j for j in range(PEERS) if i == j or i in plans[j][number]]
                averages[i, first:end] = np.mean([x[j][first:end] for j in senders], axis=0)
                weights[i, senders] += (end - first) / NUMBERS / len(senders)
        x = list(averages)
    traffic = run_rounds(peers, graph, 3)
    for i, peer in enumerate(peers):
        np.testing.assert_allclose(flat(peer), x[i], atol=1e-6)
        assert peer.weights() == pytest.approx({j: weight for j, weight in enumerate(weights[i]) if weight})
        assert [payload(each.sent) for each in traffic[i]] == [4 * NUMBERS * min(receivers, PEERS - 1)] * 3


def test_fragment_of_a_missing_peer_is_left_out() -> None:
    peers = make(3, fragment=0.5)
    x = [trained(peer, flat(peer)) for peer in peers]
    traffic = run_rounds(peers, complete(3), 1, silent=[2])
    np.testing.assert_allclose(flat(peers[0]), (x[0] + x[1]) / 2, atol=1e-6)
    assert traffic[0][0].missing == {"Fragment0": [2], "Fragment1": [2]}


def test_fragment_that_has_diverged_takes_the_neighbors_average() -> None:
    peers = make(3, fragment=0.5)
    with torch.no_grad():
        peers[2].model.linear_head.bias.fill_(1e30)  # in the last fragment; softmax saturates: no gradient is NaN
    x = [trained(peer, flat(peer)) for peer in peers[:2]]
    run_rounds(peers, complete(3), 1)
    for peer in peers:
        np.testing.assert_allclose(flat(peer)[7:], ((x[0] + x[1]) / 2)[7:], atol=1e-6)


def test_momentum_of_a_model_that_has_diverged_is_cleared() -> None:
    peers = make(3, fragment=0.5, momentum=0.9, lr=0.1)
    with torch.no_grad():
        peers[2].model.linear_head.bias.fill_(math.nan)
    run_rounds(peers, complete(3), 1)
    skipped = peers[2].outcomes.skipped["contributions"]
    run_rounds(peers, complete(3), 2)
    assert peers[2].outcomes.skipped["contributions"] == skipped
    assert np.isfinite(flat(peers[2])).all()


# ---- rounds that do not wait -------------------------------------------------------------------------------


def test_each_fragment_that_has_arrived_counts_once_and_of_several_the_newest() -> None:
    peers = make(2, fragment=0.5)
    x = [flat(peer) for peer in peers]
    for _ in range(2):  # peer 0 computes rounds 0 and 1, and nothing has arrived
        x[0] = trained(peers[0], x[0])
    x[1] = (trained(peers[1], x[1]) + x[0]) / 2
    for _ in range(2):
        x[1] = trained(peers[1], x[1])  # nothing new
    taken = run_in_order(peers, complete(2), [0, 0, 1, 1, 1])
    for peer, expected in zip(peers, x, strict=True):
        np.testing.assert_allclose(flat(peer), expected, atol=1e-5)
    rounds = [(take.t, take.kind, dict(take.rounds)) for take in taken[1]]
    assert rounds[:3] == [(0, "Fragment0", {0: [0, 1]}), (0, "Fragment1", {0: [0, 1]}), (1, "Fragment0", {0: []})]


# ---- other models ------------------------------------------------------------------------------------------


class Turned(nn.Module):
    """Weights that are not contiguous, bfloat16; and normalization with statistics in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 20, dtype=torch.bfloat16).reshape(5, 4).T)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized: torch.Tensor = self.norm(x.flatten(1) @ self.weight.float())
        return normalized


@pytest.mark.parametrize("shared", [True, False])
def test_mixed_types_strides_and_statistics(shared: bool) -> None:
    data = [peer_data(random_dataset(6 + me, seed=me)) for me in range(3)]
    h = Hyper.parse({"fragment": 0.4, "share_statistics": shared, "lr": 0.1})
    peers = [DivShare(h, setting(me, 3, Model("turned", Turned(), 5, 3), data[me])) for me in range(3)]
    copies = [DivShare(h, setting(me, 3, Model("turned", Turned(), 5, 3), data[me])) for me in range(3)]
    with torch.no_grad():
        for peer, other in zip(peers, copies, strict=True):
            other.model.load_state_dict(peer.model.state_dict())
    for peer in copies:
        peer.train(epochs=1, batch=h.batch)
    x = [clone(peer.model.state_dict()) for peer in copies]
    run_rounds(peers, complete(3), 1)  # everybody gets every fragment
    for i, peer in enumerate(peers):
        for name, tensor in peer.model.state_dict().items():
            averaged = "num_batches" not in name and (shared or "running" not in name)
            mean = torch.stack([each[name].float() for each in x]).mean(0).to(tensor.dtype)
            torch.testing.assert_close(tensor, mean if averaged else x[i][name])
        assert not peer.model.get_parameter("backbone.weight").is_contiguous()


# ---- run files ---------------------------------------------------------------------------------------------


def test_rules_that_measure_the_loss_of_models_are_refused() -> None:
    with pytest.raises(RunFileError, match=r"aggregation: 'ubar' measures the loss .*divshare sends no whole models"):
        from_dict(tree(algorithm="divshare", models="tiny-cnn", aggregation="ubar"))
