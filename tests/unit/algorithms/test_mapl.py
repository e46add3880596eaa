"""MAPL against its paper: averages of prototypes, rounds by hand, missing and diverged peers, state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from p2pfl.algorithms.mapl import MAPL, Hyper
from p2pfl.algorithms.mapl_prototypes import Prototypes, aggregate
from p2pfl.messaging.topology import Topology
from tests.bodies import complete
from tests.mapl_reference import Vector, hyper, learn_by_hand, make
from tests.support import mean_at, messages, run_rounds

# ---- averaging ------------------------------------------------------------------------------------------------


def rows(*values: float) -> Tensor:
    """One row per class, two equal columns."""
    return torch.tensor([[value, value] for value in values], dtype=torch.float32)


def averaged(
    own: Tensor, classes: tuple[int, ...], received: Mapping[int, Prototypes], w: Sequence[float], me: int
) -> Any:
    weights = torch.tensor(w, dtype=torch.float64)
    return aggregate(Prototypes(own, classes), received, weights, mean_at(me))[:, 0].tolist()


def test_average_is_weighted_and_keeps_rows_of_unseen_classes() -> None:
    received = {0: Prototypes(rows(10, 20, 30, 40), (1,)), 2: Prototypes(rows(100, 200, 300, 400), (1, 2))}
    # class 0: local; 1: both neighbors; 2: peer 2; 3: no peer
    assert averaged(rows(1, 2, 3, 4), (0,), received, [0.25, 0.25, 0.5], 1) == [
        0.25 * 1 + 0.25 * 10 + 0.5 * 100,
        0.25 * 2 + 0.25 * 20 + 0.5 * 200,
        0.25 * 3 + 0.25 * 30 + 0.5 * 300,
        4.0,
    ]


def test_average_renormalizes_weights_without_a_missing_neighbor() -> None:
    received = {0: Prototypes(rows(10), (0,))}
    assert averaged(rows(1), (0,), received, [0.25, 0.25, 0.5], 1) == [pytest.approx(0.5 * 10 + 0.5 * 1)]


def test_average_ignores_a_peer_with_weight_0_and_its_classes() -> None:
    received = {0: Prototypes(rows(math.nan, math.nan), (0, 1)), 2: Prototypes(rows(3, 5), ())}
    assert averaged(rows(1, 2), (0,), received, [0.0, 0.5, 0.5], 1) == [2.0, 2.0]


def test_self_weight_of_0_excludes_the_local_classes() -> None:
    received = {1: Prototypes(rows(3, 5), (1,))}
    assert averaged(rows(1, 2), (0,), received, [0.0, 1.0], 0) == [1.0, 5.0]


def test_average_without_any_weight_keeps_the_local_prototypes() -> None:
    assert averaged(rows(1, 2), (0, 1), {}, [0.0, 1.0], 0) == [1.0, 2.0]


def test_average_does_not_depend_on_the_order_of_arrival() -> None:
    stream = np.random.default_rng(0)
    bodies = {
        j: Prototypes(torch.from_numpy(stream.normal(size=(2, 3)).astype(np.float32)), (0, 1)) for j in range(1, 6)
    }
    w = torch.from_numpy(stream.dirichlet(np.ones(6)))
    own = Prototypes(torch.ones(2, 3), (0,))
    backwards = dict(reversed(bodies.items()))
    assert torch.equal(aggregate(own, bodies, w, mean_at()), aggregate(own, backwards, w, mean_at()))


# ---- rounds by hand ----------------------------------------------------------------------------------


class RecordingMAPL(MAPL):
    """Records what is compared of the head, and the prototypes, after the local training of each round."""

    def setup(self) -> None:
        super().setup()
        weight = self.model.linear_head.weight.detach()
        self.start = weight.clone() if self.hyper.compare == "changes" else torch.zeros_like(weight)
        self.trained: list[tuple[Tensor, Tensor]] = []

    def personalized_model_learning(self) -> None:
        super().personalized_model_learning()
        compared = self.model.linear_head.weight.detach() - self.start
        self.trained.append((compared, self.prototypes.detach().clone()))


def graph_step_by_hand(
    heads: Mapping[int, Tensor], samples: Mapping[int, int], w: Vector, me: int, h: Hyper
) -> Vector:
    """Return the new row, given samples of the whole neighborhood and heads of the peers received from."""
    ids = sorted(heads)

    def s(j: int) -> float:
        a, b = heads[me].double().numpy(), heads[j].double().numpy()
        return float(np.mean([x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in zip(a, b, strict=True)]))

    similarity = np.array([1.0 if j == me else s(j) for j in ids])
    if h.scale_similarity:
        largest = max(similarity[n] for n, j in enumerate(ids) if j != me)
        similarity = np.array([1.0 if j == me else similarity[n] / largest for n, j in enumerate(ids)])
    gamma = np.array([samples[j] for j in ids]) / sum(samples.values())
    new = w.copy()
    new[ids] = learn_by_hand(w[ids], similarity, gamma, ids.index(me), h)
    return new


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "given", [{}, {"preset": "official", "prune": True}, {"graph_steps": 5, "graph_lr": 3.0}], ids=str
)
@pytest.mark.parametrize("edges", [[(0, 1), (1, 2), (0, 2)], [(0, 1), (1, 2)]], ids=["complete", "line"])
def test_rounds_match_algorithm_3(given: dict[str, Any], edges: list[tuple[int, int]]) -> None:
    rounds, h = 4, hyper(warmup=1, **given)
    topology = Topology.from_edges(3, edges)
    peers = make(h, classes_of=[(0, 1), (0, 1), (1,)], of=RecordingMAPL)
    after: dict[tuple[int, int], tuple[Vector, Tensor]] = {}

    def note(peer: Any, t: int) -> None:
        after[peer.me, t] = peer.w.numpy().copy(), peer.prototypes.detach().clone()

    run_rounds(peers, topology, rounds, after=note)
    pruned = False
    for me in range(3):
        neighbors = topology.neighbors[me]
        samples = {j: len(peers[j].data.train) for j in (me, *neighbors)}
        w = np.zeros(3)
        w[[me, *neighbors]] = 1 / (1 + len(neighbors))
        sources = list(neighbors)
        for t in range(rounds):
            if t >= 1:
                heads = {j: peers[j].trained[t][0] for j in (me, *sources)}
                w = graph_step_by_hand(heads, samples, w, me, h)
            expected = sum(w[j] * peers[j].trained[t][1].double() for j in (me, *sources))
            expected[2] = peers[me].trained[t][1][2]  # no peer has samples of class 2
            if not any(w[j] > 0 and 0 in peers[j].data.local_classes for j in (me, *sources)):
                expected[0] = peers[me].trained[t][1][0]
            found_w, found_prototypes = after[me, t]
            np.testing.assert_allclose(found_w, w, atol=1e-7)
            torch.testing.assert_close(found_prototypes.double(), expected, rtol=1e-5, atol=1e-7)
            sources = [j for j in sources if w[j] > 0]
        pruned = pruned or len(sources) < len(neighbors)
    assert pruned or h.graph_lr < 3.0


def test_next_round_trains_the_averaged_prototypes() -> None:
    peers = make(hyper(cgl=False, lr=1e-9), of=RecordingMAPL)
    averages: list[Tensor] = []

    def record(peer: Any, t: int) -> None:
        averages.append(peer.prototypes.detach().clone())

    run_rounds(peers, complete(3), 2, after=record)
    first_round = averages[:3]
    for peer in peers:
        assert any(torch.allclose(peer.trained[1][1], average, atol=1e-6) for average in first_round)
    for average in first_round[1:]:  # equal weights on a complete graph: all peers have the mean
        torch.testing.assert_close(average, first_round[0])


def test_missing_neighbor_keeps_its_weight_and_is_not_averaged() -> None:
    h = hyper(warmup=0, graph_lr=0.1)
    peers = make(h, of=RecordingMAPL)
    traffic = run_rounds(peers, complete(3), 1, silent=[2])
    assert traffic[0][0].missing == {"Head": [2], "Prototypes": [2]}
    uniform = np.full(3, 1 / 3)
    samples = {j: len(peers[j].data.train) for j in (0, 1)}
    for me in (0, 1):
        heads = {j: peers[j].trained[0][0] for j in (0, 1)}
        w = graph_step_by_hand(heads, samples, uniform, me, h)
        assert w[2] == 1 / 3
        np.testing.assert_allclose(peers[me].w.numpy(), w, atol=1e-7)
        expected = sum(w[j] / (2 / 3) * peers[j].trained[0][1].double() for j in (0, 1))
        torch.testing.assert_close(peers[me].prototypes.detach().double(), expected, rtol=1e-5, atol=1e-7)


class Diverging(MAPL):
    """The last peer's parameters become NaN, infinite or huge in its first round of training."""

    value = math.nan

    def personalized_model_learning(self) -> None:
        super().personalized_model_learning()
        if self.me == self.peers - 1:
            with torch.no_grad():
                self.model.linear_head.weight[0, 0] = self.prototypes[0, 0] = self.value


@pytest.mark.exhaustive
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_diverged_peer_does_not_affect_the_others(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Diverging, "value", value)
    h = hyper(warmup=1, graph_lr=0.1, prune=False)
    without, beside = make(h), make(h, of=Diverging)
    run_rounds(without, complete(3), 3, silent=[2])
    traffic = run_rounds(beside, complete(3), 3)
    assert traffic[0][2].missing == {"Head": [2], "Prototypes": [2]}
    for left, right in zip(without[:2], beside[:2], strict=True):
        assert left.weights() == right.weights()
        assert left.weights()[2] == 1 / 3  # as before it diverged
        assert torch.equal(left.prototypes, right.prototypes)
        assert torch.equal(left.model.head.weight, right.model.head.weight)
    # Its graph stays unchanged: its head cannot be compared.
    assert beside[2].weights() == dict.fromkeys(range(3), 1 / 3)


def test_peer_without_neighbors_trains_alone() -> None:
    peers = make(hyper(warmup=0), peers=2)
    traffic = run_rounds(peers, Topology.from_edges(2, []), 2)
    assert [messages(record.sent) for peer in traffic for record in peer] == [0] * 4
    assert peers[0].weights() == {0: 1.0}


def test_state_round_trips() -> None:
    one, other = make(hyper(warmup=0, graph_lr=0.1)), make(hyper(warmup=0, graph_lr=0.1))
    run_rounds(one, complete(3), 2)
    state = one[0].state_dict()
    other[0].load_state_dict(state)
    assert other[0].weights() == one[0].weights()
    assert torch.equal(other[0].prototypes, one[0].prototypes)
    assert isinstance(other[0].prototypes, torch.nn.Parameter)
