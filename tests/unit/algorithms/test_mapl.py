"""MAPL against its paper: equations against reference code, rounds by hand, every option, payload bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.mapl import MAPL, Head, Hyper, Prototypes, Spent, aggregate
from p2pfl.algorithms.mapl_graph import (
    collaborative_graph_learning,
    confidence,
    graph_loss,
    head_similarity,
    project_to_simplex,
    scaled,
)
from p2pfl.errors import Unexpected
from p2pfl.messaging.topology import Topology
from p2pfl.run_file.options import OptionErrors
from tests.bodies import arrive
from tests.support import Traffic, linear_model, messages, payload, peer_data, random_dataset, run_rounds, setting

property_of = settings(deadline=None, max_examples=100)

Vector = NDArray[np.float64]

FEATURES, CLASSES = 5, 3


def hyper(**given: Any) -> Hyper:
    return Hyper.parse({"projector_hidden": 4, "lr": 0.01, **given})


def complete(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, j) for i in range(peers) for j in range(i)])


def make(
    h: Hyper, peers: int = 3, *, classes_of: Sequence[Sequence[int]] | None = None, of: type[MAPL] = MAPL
) -> list[Any]:
    """Peers with linear backbones on gray noise; peer i has 4 + 2 i samples, of ``classes_of[i]`` if given."""
    made = []
    for me in range(peers):
        dataset = random_dataset(60, classes=CLASSES, seed=me)
        labels = dataset.train.labels
        local = classes_of[me] if classes_of else range(CLASSES)
        chosen = [n for n in range(len(labels)) if labels[n] in local][: 4 + 2 * me]
        model = linear_model(4, FEATURES, CLASSES, seed=me)
        made.append(of(h, setting(me, peers, model, peer_data(dataset, chosen))))
    return made


# ---- projection onto the simplex ---------------------------------------------------------------------------


def project_by_bisection(v: Vector, mass: float) -> Vector:
    """max(v − θ, 0) for the θ at which the entries sum to ``mass``, found by bisection."""
    low, high = v.min() - mass, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > mass else (low, middle)
    return np.asarray(np.maximum(v - high, 0))


vectors = st.lists(st.floats(-3, 3).map(lambda x: round(x, 6)), min_size=1, max_size=12)


@pytest.mark.exhaustive
@property_of
@given(vectors, st.sampled_from([1.0, 0.5, 1e-3, 7.0]))
@example([0.5, 0.5], 1.0)
@example([1.0], 1.0)
@example([-3.0, -3.0, -3.0], 1.0)
def test_projection_matches_bisection(entries: list[float], mass: float) -> None:
    found = project_to_simplex(torch.tensor(entries, dtype=torch.float64), mass).numpy()
    np.testing.assert_allclose(found, project_by_bisection(np.array(entries), mass), atol=1e-12)


@pytest.mark.exhaustive
@property_of
@given(vectors)
def test_projection_is_the_nearest_point_of_the_simplex(entries: list[float]) -> None:
    v = np.array(entries)
    found = project_to_simplex(torch.from_numpy(v)).numpy()
    assert (found >= 0).all()
    assert found.sum() == pytest.approx(1.0, abs=1e-12)
    # x is nearest if and only if <v − x, y − x> <= 0 for all corners y.
    assert all((v - found) @ (corner - found) <= 1e-9 for corner in np.eye(len(v)))


def test_projection_keeps_points_of_the_simplex() -> None:
    w = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64)
    assert torch.equal(project_to_simplex(w), w)


@pytest.mark.parametrize("mass", [0.0, -1e-18, 5e-324, 1e-300, 1e-18, 1e-9])
def test_projection_does_not_exceed_a_tiny_mass(mass: float) -> None:
    found = project_to_simplex(torch.tensor([0.05, 0.01, -0.2], dtype=torch.float64), mass)
    assert (found >= 0).all()
    assert float(found.sum()) <= max(mass, 0.0) + 1e-16


# ---- graph loss ---------------------------------------------------------------------------------

graphs = st.tuples(st.integers(2, 6), st.integers(0, 2**32 - 1))


def random_graph(size: int, seed: int) -> tuple[Vector, Vector, Vector, int]:
    """w on the simplex, s in [-1, 1], γ summing to 1, and the position of i."""
    stream = np.random.default_rng(seed)
    return (
        stream.dirichlet(np.ones(size)),
        stream.uniform(-1, 1, size),
        stream.dirichlet(np.ones(size)),
        int(stream.integers(size)),
    )


def graph_loss_by_hand(w: Vector, s: Vector, gamma: Vector, me: int, h: Hyper) -> float:
    similarity = sum(gamma[j] * -s[j] * w[j] for j in range(len(w)))
    size = math.sqrt(sum(x * x for x in w)) if h.norm == "l2" else sum(abs(x) for x in w)
    degree = sum(w[j] for j in range(len(w)) if j != me)
    return float(h.mu_similarity * similarity + h.mu_regularizer * (h.beta * size - math.log(degree + h.epsilon)))


def gradient_by_hand(w: Vector, s: Vector, gamma: Vector, me: int, h: Hyper) -> Vector:
    norm = w / math.sqrt(float(w @ w)) if h.norm == "l2" else np.sign(w)
    gradient = -h.mu_similarity * gamma * s + h.mu_regularizer * h.beta * norm
    if h.degree_term == "exact":
        others = np.arange(len(w)) != me
        gradient[others] -= h.mu_regularizer / (w[others].sum() + h.epsilon)
    return np.asarray(gradient)


FORMS = [hyper(norm=norm, degree_term=term) for norm, term in product(["l1", "l2"], ["constant", "exact"])]


@pytest.mark.exhaustive
@pytest.mark.parametrize("h", FORMS, ids=lambda h: f"{h.norm}-{h.degree_term}")
@property_of
@given(graphs)
def test_graph_loss_and_its_gradient_match_the_formulas(h: Hyper, graph: tuple[int, int]) -> None:
    w, s, gamma, me = random_graph(*graph)
    variable = torch.from_numpy(w).requires_grad_()
    loss = graph_loss(variable, torch.from_numpy(s), torch.from_numpy(gamma), me, h)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(graph_loss_by_hand(w, s, gamma, me, h), rel=1e-12)
    assert variable.grad is not None
    np.testing.assert_allclose(variable.grad.numpy(), gradient_by_hand(w, s, gamma, me, h), rtol=1e-9, atol=1e-12)


def learn_by_hand(w: Vector, s: Vector, gamma: Vector, me: int, h: Hyper) -> Vector:
    """Algorithm 2 in numpy, with an explicit Adam."""
    mass = w.sum()
    first, second = np.zeros_like(w), np.zeros_like(w)
    for step in range(1, h.graph_steps + 1):
        gradient = gradient_by_hand(w, s, gamma, me, h)
        if h.graph_optimizer == "adam":
            first = h.betas[0] * first + (1 - h.betas[0]) * gradient
            second = h.betas[1] * second + (1 - h.betas[1]) * gradient**2
            unbiased = first / (1 - h.betas[0] ** step), second / (1 - h.betas[1] ** step)
            w = w - h.graph_lr * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
        else:
            w = w - h.graph_lr * gradient
        w = project_by_bisection(w, float(mass))
    return w


LEARNING = [
    *[hyper(graph_steps=steps) for steps in (1, 2, 5, 10, 20)],
    hyper(graph_steps=3, norm="l1", degree_term="exact", graph_lr=0.1),
    hyper(graph_steps=5, beta=0.0, mu_regularizer=0.7, mu_similarity=2.0),
    hyper(preset="official"),
    hyper(preset="official", graph_steps=4),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("h", LEARNING, ids=lambda h: f"{h.preset}-{h.graph_steps}-{h.norm}-{h.degree_term}")
@settings(deadline=None, max_examples=25)
@given(graphs, st.sampled_from([1.0, 0.6]))
def test_graph_learning_matches_algorithm_2(h: Hyper, graph: tuple[int, int], mass: float) -> None:
    w, s, gamma, me = random_graph(*graph)
    w *= mass
    found = collaborative_graph_learning(
        torch.from_numpy(w.copy()), torch.from_numpy(s), torch.from_numpy(gamma), me, h
    )
    np.testing.assert_allclose(found.numpy(), learn_by_hand(w, s, gamma, me, h), atol=1e-10)
    assert not found.requires_grad


def test_graph_learning_does_not_modify_its_arguments() -> None:
    w, s, gamma = (torch.full((3,), 1 / 3, dtype=torch.float64) for _ in range(3))
    found = collaborative_graph_learning(w, s.neg(), gamma, 0, hyper(graph_steps=2))
    assert torch.equal(w, torch.full((3,), 1 / 3, dtype=torch.float64))
    assert found is not w


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["default", "official"])
@pytest.mark.parametrize(("inside", "across"), [(0.5, -0.05), (0.3, 0.0), (0.9, 0.1)])
def test_two_clusters_give_a_block_diagonal_graph(preset: str, inside: float, across: float) -> None:
    peers, h = 10, hyper(preset=preset)
    cluster = np.arange(peers) // 5
    for me in (0, peers - 1):  # one of each cluster
        s = np.where(cluster == cluster[me], inside, across)
        if h.scale_similarity:
            s = s / inside
        s[me] = 1.0
        w = torch.full((peers,), 1 / peers, dtype=torch.float64)
        gamma = torch.full((peers,), 1 / peers, dtype=torch.float64)
        for _ in range(100):
            w = collaborative_graph_learning(w, torch.from_numpy(s), gamma, me, h)
        same = np.flatnonzero((cluster == cluster[me]) & (np.arange(peers) != me))
        assert float(w[cluster != cluster[me]].max()) < 1e-9
        assert float(w[same].max() - w[same].min()) < 1e-9
        assert float(w[same].min()) > 0.01


# ---- head similarity -----------------------------------------------------------------------------------


def test_head_similarity_is_the_mean_cosine_of_the_rows() -> None:
    head = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    other = torch.tensor([[3.0, 0.0], [0.0, -1.0], [0.0, 5.0]])
    assert head_similarity(head, other, "rows") == pytest.approx((1 - 1 + math.sqrt(0.5)) / 3, abs=1e-12)
    flat = (3.0 - 2.0 + 5.0) / math.sqrt(1 + 4 + 2) / math.sqrt(9 + 1 + 25)
    assert head_similarity(head, other, "flat") == pytest.approx(flat, abs=1e-12)
    assert head_similarity(head, other, "off") == 1.0


@pytest.mark.parametrize("form", ["rows", "flat", "off"])
def test_head_similarity_does_not_depend_on_the_scale(form: str) -> None:
    head = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    assert head_similarity(head, 7 * head, form) == pytest.approx(1.0)
    assert head_similarity(head, -head, form) == pytest.approx(1.0 if form == "off" else -1.0)


def test_scaling_makes_the_largest_neighbor_entry_1_and_keeps_the_self_entry() -> None:
    s = torch.tensor([0.2, 1.0, -0.1, 0.4])
    torch.testing.assert_close(scaled(s, 1), torch.tensor([0.5, 1.0, -0.25, 1.0]))


@pytest.mark.parametrize("s", [[-0.2, 1.0, -0.1], [0.0, 1.0, 0.0], [0.0, 1.0]], ids=str)
def test_scaling_keeps_similarities_without_a_positive_one(s: list[float]) -> None:
    assert scaled(torch.tensor(s), 1).tolist() == torch.tensor(s).tolist()
    assert scaled(torch.tensor([1.0]), 0).tolist() == [1.0]  # no neighbors


@pytest.mark.parametrize(
    ("samples", "gamma"),
    [
        ([1, 3], [0.25, 0.75]),
        ([0, 5], [0.0, 1.0]),
        ([0, 0], [0.5, 0.5]),
    ],
)
def test_confidence_is_the_fraction_of_the_samples(samples: list[int], gamma: list[float]) -> None:
    assert confidence(dict(enumerate(samples)), [0, 1]).tolist() == gamma


def test_confidence_is_relative_to_all_known_peers() -> None:
    assert confidence({4: 10, 7: 20, 9: 10}, [4, 7]).tolist() == [0.25, 0.5]


# ---- averaging ------------------------------------------------------------------------------------------------


def rows(*values: float) -> Tensor:
    """One row per class, two equal columns."""
    return torch.tensor([[value, value] for value in values], dtype=torch.float32)


def averaged(
    own: Tensor, classes: tuple[int, ...], received: Mapping[int, Prototypes], w: Sequence[float], me: int
) -> Any:
    return aggregate(Prototypes(own, classes), received, torch.tensor(w, dtype=torch.float64), me)[:, 0].tolist()


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
    assert torch.equal(aggregate(own, bodies, w, 0), aggregate(own, backwards, w, 0))


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


# ---- local losses and their options -----------------------------------------------------------------------


def batch() -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    return torch.rand(8, 1, 2, 2, generator=stream), torch.tensor([0, 1, 2, 0] * 2)


def terms(h: Hyper) -> tuple[MAPL, dict[str, Tensor]]:
    (algorithm,) = make(h, peers=1)
    with torch.no_grad(), algorithm.training():
        return algorithm, algorithm.loss(*batch())


def test_loss_terms_match_algorithm_1() -> None:
    algorithm, found = terms(hyper())
    x, labels = batch()
    with torch.no_grad(), algorithm.training():
        z = algorithm.model.backbone(x)
        p = algorithm.projector(z).double().numpy()
    xi = algorithm.prototypes.detach().double().numpy()
    cos = (p / np.linalg.norm(p, axis=1, keepdims=True)) @ (p / np.linalg.norm(p, axis=1, keepdims=True)).T / 0.2
    near = (p / np.linalg.norm(p, axis=1, keepdims=True)) @ (xi / np.linalg.norm(xi, axis=1, keepdims=True)).T / 0.2
    unit = xi / np.linalg.norm(xi, axis=1, keepdims=True)
    cont = proto = 0.0
    for q in range(8):
        positives = [r for r in range(8) if r != q and labels[r] == labels[q]]
        denominator = sum(math.exp(cos[q, m]) for m in range(8) if m != q)
        cont -= sum(math.log(math.exp(cos[q, r]) / denominator) for r in positives) / len(positives) / 8
        proto -= math.log(math.exp(near[q, labels[q]]) / np.exp(near[q]).sum()) / 8
    uni = sum(float(unit[k] @ unit[r]) for k in range(CLASSES) for r in range(CLASSES) if r != k) / CLASSES
    logits = algorithm.model.head(z.clamp(min=0))
    assert {name: value.item() for name, value in found.items()} == {
        "ce": pytest.approx(cross_entropy(logits, labels).item(), rel=1e-5),
        "cont": pytest.approx(cont, rel=1e-5),
        "proto": pytest.approx(proto, rel=1e-5),
        "uni": pytest.approx(uni, rel=1e-5),
    }


def test_official_loss_terms_match_the_released_code() -> None:
    algorithm, found = terms(hyper(preset="official"))
    x, labels = batch()
    with torch.no_grad(), algorithm.training():
        p = algorithm.projector(algorithm.model.backbone(x)).double().numpy()
    p /= np.linalg.norm(p, axis=1, keepdims=True)
    xi = algorithm.prototypes.detach().double().numpy()
    cont = proto = 0.0
    for q in range(8):
        positives = [r for r in range(8) if r != q and labels[r] == labels[q]]
        denominator = sum(math.exp(p[q] @ p[m] / 100) for m in range(8) if m != q)
        cont -= math.log(sum(math.exp(p[q] @ p[r] / 100) for r in positives) / denominator) / 8
        scores = np.exp(p[q] @ xi.T)  # ξ as it is, temperature 1
        proto -= math.log(scores[labels[q]] / scores.sum()) / 8
    inner = [math.exp(xi[k] @ xi[r] / 100) for k in range(CLASSES) for r in range(CLASSES) if r != k]
    assert found["cont"].item() == pytest.approx(cont, rel=1e-5)
    assert found["proto"].item() == pytest.approx(proto, rel=1e-5)
    assert found["uni"].item() == pytest.approx(sum(inner) / CLASSES, rel=1e-5)


@pytest.mark.parametrize(("option", "term"), [("contrastive", "cont"), ("prototype", "proto"), ("uniformity", "uni")])
@pytest.mark.parametrize("preset", ["default", "paper", "official"])
def test_each_loss_term_can_be_disabled(option: str, term: str, preset: str) -> None:
    _, everything = terms(hyper(preset=preset))
    _, rest = terms(hyper(preset=preset, **{option: False}))
    assert set(everything) - set(rest) == {term}
    assert all(torch.equal(everything[name], value) for name, value in rest.items())


def test_without_extra_terms_training_uses_cross_entropy_alone() -> None:
    (algorithm,) = make(hyper(contrastive=False, prototype=False, uniformity=False), peers=1)
    prototypes = algorithm.prototypes.detach().clone()
    algorithm.personalized_model_learning()
    assert list(algorithm.meter.drain()) == ["ce"]
    assert torch.equal(algorithm.prototypes, prototypes)


def test_all_parts_are_trained() -> None:
    (algorithm,) = make(hyper(), peers=1)
    before = {name: value.detach().clone() for name, value in learned(algorithm).items()}
    algorithm.personalized_model_learning()
    unchanged = [name for name, value in learned(algorithm).items() if torch.equal(value, before[name])]
    # A bias before batch normalisation has no effect on the loss.
    assert set(unchanged) <= {"projector.0.bias"}
    assert algorithm.predict(batch()[0]).shape == (8, CLASSES)


def learned(algorithm: MAPL) -> dict[str, Tensor]:
    return {
        **dict(algorithm.model.named_parameters()),
        **{f"projector.{name}": value for name, value in algorithm.projector.named_parameters()},
        "prototypes": algorithm.prototypes,
    }


@pytest.mark.parametrize(
    ("given", "views"), [({}, 2), ({"contrastive": False}, 2), ({"contrastive": False, "single_view": True}, 1)]
)
def test_batch_has_two_views_per_sample_or_a_single_one(given: dict[str, Any], views: int) -> None:
    (algorithm,) = make(hyper(batch=2, local_epochs=3, **given), peers=1)
    sizes: list[int] = []
    loss = algorithm.loss

    def record(x: Tensor, labels: Tensor) -> Any:
        sizes.append(len(x))
        return loss(x, labels)

    algorithm.loss = record
    algorithm.personalized_model_learning()
    assert sizes == [2 * views] * 2 * 3


def test_a_single_view_needs_two_images_in_a_batch() -> None:
    with pytest.raises(OptionErrors, match="needs batches of two images or more"):
        make(hyper(batch=1, contrastive=False, single_view=True), peers=1)
    assert hyper(contrastive=False, single_view=True).views(2) == 1
    assert hyper(batch=1).views(1) == 2


def test_contrastive_loss_rejects_a_single_view() -> None:
    with pytest.raises(ValueError, match="single_view: true leaves l_cont no second view"):
        hyper(single_view=True)


def test_relu_before_the_head_is_optional() -> None:
    z = torch.tensor([[-1.0, 2.0, -3.0, 4.0, -5.0]])
    (with_relu,), (without,) = make(hyper(), peers=1), make(hyper(head_relu=False), peers=1)
    assert torch.equal(with_relu.classify(z), with_relu.model.head(z.clamp(min=0)))
    assert torch.equal(without.classify(z), without.model.head(z))
    assert not torch.equal(with_relu.classify(z), without.classify(z))


def test_shared_init_makes_heads_projectors_and_prototypes_start_equal() -> None:
    for shared, equal in ((True, True), (False, False)):
        one, other, _ = make(hyper(shared_init=shared, compare="weights"))
        for name in ("head.weight", "head.bias", "projector.0.weight", "projector.3.weight", "prototypes"):
            assert torch.equal(learned(one)[name], learned(other)[name]) is equal
        assert not torch.equal(learned(one)["backbone.1.weight"], learned(other)["backbone.1.weight"])


def test_initial_heads_are_scaled_and_prototypes_bounded() -> None:
    (small,), (whole,) = make(hyper(head_init_scale=0.1), peers=1), make(hyper(), peers=1)
    torch.testing.assert_close(small.model.head.weight, 0.1 * whole.model.head.weight)
    assert torch.equal(small.model.head.bias, whole.model.head.bias)
    bound = 1 / math.sqrt(FEATURES)
    assert 0.5 * bound < small.prototypes.abs().max() <= bound
    assert small.prototypes.shape == (CLASSES, FEATURES)


def test_changes_of_heads_are_compared_whatever_their_common_start() -> None:
    moved = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]] * CLASSES), torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]] * CLASSES)
    across = {}
    for compare, scale in (("changes", 1.0), ("changes", 50.0), ("weights", 50.0)):
        peer, same, other = make(hyper(compare=compare, head_init_scale=scale, warmup=0, graph_lr=0.1))
        for each, change in ((peer, moved[0]), (same, moved[0]), (other, moved[1])):
            each.add_neighbors([j for j in range(3) if j != each.me])
            with torch.no_grad():
                each.model.head.weight.add_(change)
        peer.learn_graph({1: same.local_head(), 2: other.local_head()})
        across[compare, scale] = peer.w
    torch.testing.assert_close(across["changes", 1.0], across["changes", 50.0])
    assert across["changes", 50.0][1] > across["changes", 50.0][2] + 0.01
    assert across["weights", 50.0][1] < across["weights", 50.0][2] + 0.01


def test_changes_cannot_be_compared_without_a_common_start() -> None:
    with pytest.raises(ValueError, match="compare: changes needs heads with a common start"):
        hyper(compare="changes", shared_init=False)


def test_official_preset_starts_each_peer_with_torchs_default_values() -> None:
    one, other, _ = make(hyper(preset="official"))
    assert not torch.equal(one.model.head.weight, other.model.head.weight)
    assert not torch.equal(one.prototypes, other.prototypes)
    (same,) = make(hyper(shared_init=False, compare="weights", betas=(0.5, 0.999)), peers=1)
    assert torch.equal(one.model.head.weight, same.model.head.weight)


def test_optimizer_is_adam_over_all_parameters_and_persists_unless_fresh() -> None:
    for fresh, steps in ((False, 2.0), (True, 1.0)):
        (algorithm,) = make(hyper(fresh_optimizer=fresh, betas=(0.3, 0.7), weight_decay=0.25), peers=1)
        for _ in range(2):
            algorithm.personalized_model_learning()
        (group,) = algorithm.optimizer.param_groups
        assert isinstance(algorithm.optimizer, torch.optim.Adam)
        assert (group["lr"], group["betas"], group["weight_decay"]) == (0.01, (0.3, 0.7), 0.25)
        assert {id(p) for p in group["params"]} == {id(p) for p in learned(algorithm).values()}
        assert {float(state["step"]) for state in algorithm.optimizer.state.values()} == {steps}


def test_state_round_trips() -> None:
    one, other = make(hyper(warmup=0, graph_lr=0.1)), make(hyper(warmup=0, graph_lr=0.1))
    run_rounds(one, complete(3), 2)
    state = one[0].state_dict()
    other[0].load_state_dict(state)
    assert other[0].weights() == one[0].weights()
    assert torch.equal(other[0].prototypes, one[0].prototypes)
    assert isinstance(other[0].prototypes, torch.nn.Parameter)


# ---- messages and options of the graph ------------------------------------------------------------------


def heads_and_prototypes(traffic: Sequence[Sequence[Traffic]], t: int) -> tuple[int, int]:
    return tuple(sum(messages(peer[t].sent, kind) for peer in traffic) for kind in ("Head", "Prototypes"))  # type: ignore[return-value]


def test_heads_are_sent_after_the_warmup() -> None:
    traffic = run_rounds(make(hyper(warmup=2, prune=False)), complete(3), 4)
    assert [heads_and_prototypes(traffic, t) for t in range(4)] == [(0, 6), (0, 6), (6, 6), (6, 6)]


def test_without_cgl_no_head_is_sent_and_weights_stay_uniform() -> None:
    peers = make(hyper(warmup=0, cgl=False))
    traffic = run_rounds(peers, Topology.from_edges(3, [(0, 1), (1, 2)]), 3)
    assert [heads_and_prototypes(traffic, t) for t in range(3)] == [(0, 4)] * 3
    assert peers[0].weights() == {0: 0.5, 1: 0.5}
    assert peers[1].weights() == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})


class Clustered(MAPL):
    """Heads are fixed: those of peers 0 and 1 are equal, and those of all others."""

    def personalized_model_learning(self) -> None:
        super().personalized_model_learning()
        with torch.no_grad():
            self.model.linear_head.weight.fill_(1.0 if self.me < 2 else -1.0)


class EquallyMany(Clustered):
    """Every peer says that it has ten samples."""

    def setup(self) -> None:
        super().setup()
        self.samples = {self.me: 10}

    def local_head(self) -> Head:
        return Head(super().local_head().weight, 10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("prune", [True, False])
def test_pruning_ends_messages_between_peers_with_weight_0(prune: bool) -> None:
    peers = make(hyper(warmup=1, graph_lr=4.0, prune=prune), peers=4, of=Clustered)
    traffic = run_rounds(peers, complete(4), 4)
    assert set(peers[0].weights()) == {0, 1}
    assert set(peers[3].weights()) == {2, 3}
    # Round 1 learns the graph and still sends to all; from round 2 on only within clusters.
    expected = [(0, 12), (12, 12), (4, 4), (4, 4)] if prune else [(0, 12), (12, 12), (12, 12), (12, 12)]
    assert [heads_and_prototypes(traffic, t) for t in range(4)] == expected
    assert [record.sources for record in traffic[0]] == [(1, 2, 3)] * 2 + ([(1,)] * 2 if prune else [(1, 2, 3)] * 2)
    assert [record.receivers for record in traffic[2]] == [(0, 1, 3)] * 2 + ([(3,)] * 2 if prune else [(0, 1, 3)] * 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "change",
    [
        {"similarity": "flat"},
        {"similarity": "off"},
        {"compare": "weights"},
        {"scale_similarity": True},
        {"confidence": False},
        {"norm": "l1"},
        {"degree_term": "exact"},
        {"graph_steps": 2},
        {"graph_lr": 0.05},
        {"graph_optimizer": "adam"},
        {"mu_similarity": 0.2},
        {"mu_regularizer": 0.3},
        {"beta": 0.1},
    ],
    ids=str,
)
def test_every_graph_option_changes_the_graph(change: dict[str, Any]) -> None:
    h = hyper(warmup=0, graph_lr=0.1, prune=False)
    weights = []
    for options in (h, replace(h, **change)):
        peers = make(options)
        run_rounds(peers, complete(3), 2)
        weights.append(peers[0].w)
    assert float(weights[0].sum()) == pytest.approx(1.0)
    assert float(weights[1].sum()) == pytest.approx(1.0)
    assert not torch.allclose(weights[0], weights[1], atol=1e-6)


@pytest.mark.exhaustive
def test_pruned_graph_converges_to_the_unpruned_one() -> None:
    """Because pruned peers' samples still count in γ; otherwise each peer would end alone."""
    rows = []
    for prune in (True, False):
        peers = make(hyper(warmup=0, graph_lr=1.0, prune=prune), peers=6, classes_of=[range(3)] * 6, of=Clustered)
        run_rounds(peers, complete(6), 8)
        rows.append(torch.stack([peer.w for peer in peers]))
    torch.testing.assert_close(*rows)
    assert (rows[0] > 0).sum(1).tolist() == [2, 2, 4, 4, 4, 4]


def test_without_confidence_sample_counts_do_not_matter() -> None:
    for counted in (True, False):
        peers = make(hyper(warmup=0, graph_lr=0.1, similarity="off", confidence=counted))
        run_rounds(peers, complete(3), 1)
        equal = peers[0].w[1].item() == pytest.approx(peers[0].w[2].item(), abs=1e-12)
        assert equal is not counted


def test_without_confidence_the_similarity_weighs_m_times_as_much_as_with_equal_samples() -> None:
    """Table 3 in scenarios 1 and 2, whose peers have equally many samples: γ = 1 instead of 1/M."""
    rows = []
    for options in ({"confidence": False}, {"mu_similarity": 0.5 * 4}, {}):
        peers = make(hyper(warmup=0, graph_lr=0.1, **options), peers=4, of=EquallyMany)
        run_rounds(peers, complete(4), 1)
        rows.append(peers[0].w)
    torch.testing.assert_close(rows[0], rows[1])
    assert not torch.allclose(rows[0], rows[2], atol=1e-3)


# ---- message budget --------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(("budget", "rounds"), [(1, 1), (8, 1), (9, 2), (24, 3), (25, 4)])
def test_all_peers_end_in_the_round_that_reaches_the_budget(budget: int, rounds: int) -> None:
    peers = make(hyper(cgl=False, message_budget=budget), peers=4)
    traffic = run_rounds(peers, Topology.from_edges(4, [(0, 1), (1, 2), (2, 3), (3, 0)]), 6)
    assert [len(peer) for peer in traffic] == [rounds] * 4
    assert sum(messages(record.sent, "Prototypes") for peer in traffic for record in peer) == 8 * rounds
    assert [peer.spent for peer in peers] == [2 * rounds] * 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrong", [-1, -(2**63), 12 * 3, 2**63 - 100])
def test_an_impossible_count_of_a_neighbor_does_not_end_the_run(wrong: int) -> None:
    peers = make(hyper(cgl=False, message_budget=24), peers=4)
    peers[3].spent = wrong  # it sends another 3 in each round
    traffic = run_rounds(peers, complete(4), 3)
    assert [len(peer) for peer in traffic] == [3] * 4


def test_pruned_messages_do_not_count_toward_the_budget() -> None:
    peers = make(hyper(warmup=0, graph_lr=4.0, message_budget=12 + 4 + 4), peers=4, of=Clustered)
    traffic = run_rounds(peers, complete(4), 9)
    assert [len(peer) for peer in traffic] == [3] * 4


def test_without_a_budget_no_counts_are_sent() -> None:
    peers = make(hyper())
    traffic = run_rounds(peers, complete(3), 2)
    assert sum(messages(record.sent, "Spent") for peer in traffic for record in peer) == 0
    assert not any(peer.finished for peer in peers)


# ---- bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edges", [[(0, 1), (1, 2), (0, 2)], [(0, 1), (1, 2)]], ids=["complete", "line"])
def test_payload_bytes_match_table_7(edges: list[tuple[int, int]]) -> None:
    traffic = run_rounds(make(hyper(warmup=1, prune=False)), Topology.from_edges(3, edges), 3)
    d_p = d_z = FEATURES
    prototypes, head = d_p * CLASSES, d_z * CLASSES
    for t, numbers in enumerate([prototypes, prototypes + head, prototypes + head]):
        for side in ("sent", "received"):
            assert sum(payload(getattr(peer[t], side)) for peer in traffic) == 4 * 2 * len(edges) * numbers


@pytest.mark.parametrize(
    "body",
    [
        Head(torch.zeros(CLASSES, FEATURES), -1),
        Head(torch.zeros(CLASSES, FEATURES + 1), 1),
        Prototypes(torch.zeros(CLASSES, FEATURES), (0, CLASSES)),
        Prototypes(torch.zeros(CLASSES, FEATURES), (-1,)),
        Prototypes(torch.zeros(CLASSES, FEATURES), (0,) * (CLASSES + 1)),
        Spent(torch.zeros(2, dtype=torch.int64)),
    ],
    ids=["negative count", "wrong shape", "class too large", "negative class", "too many classes", "wrong rank"],
)
def test_rejects_messages_with_wrong_shapes_counts_or_classes(body: Any) -> None:
    (algorithm,) = make(hyper(), peers=1)
    with pytest.raises(Unexpected):
        arrive(body, algorithm.layouts())
