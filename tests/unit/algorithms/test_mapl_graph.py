"""MAPL's graph against its paper: projection, loss, learning and similarity by hand, every option."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2pfl.algorithms.mapl import Head, Hyper
from p2pfl.algorithms.mapl_graph import (
    collaborative_graph_learning,
    confidence,
    graph_loss,
    head_similarity,
    project_to_simplex,
    scaled,
)
from tests.bodies import complete
from tests.mapl_reference import (
    CLASSES,
    Clustered,
    Vector,
    gradient_by_hand,
    hyper,
    learn_by_hand,
    make,
    project_by_bisection,
)
from tests.support import run_rounds

property_of = settings(deadline=None, max_examples=100)


# ---- projection onto the simplex ---------------------------------------------------------------------------

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


# ---- options -------------------------------------------------------------------------------------------------


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


def test_without_confidence_sample_counts_do_not_matter() -> None:
    for counted in (True, False):
        peers = make(hyper(warmup=0, graph_lr=0.1, similarity="off", confidence=counted))
        run_rounds(peers, complete(3), 1)
        equal = peers[0].w[1].item() == pytest.approx(peers[0].w[2].item(), abs=1e-12)
        assert equal is not counted


class EquallyMany(Clustered):
    """Every peer says that it has ten samples."""

    def setup(self) -> None:
        super().setup()
        self.samples = {self.me: 10}

    def local_head(self) -> Head:
        return Head(super().local_head().weight, 10)


def test_without_confidence_the_similarity_weighs_m_times_as_much_as_with_equal_samples() -> None:
    """Table 3 in scenarios 1 and 2, whose peers have equally many samples: γ = 1 instead of 1/M."""
    rows = []
    for options in ({"confidence": False}, {"mu_similarity": 0.5 * 4}, {}):
        peers = make(hyper(warmup=0, graph_lr=0.1, **options), peers=4, of=EquallyMany)
        run_rounds(peers, complete(4), 1)
        rows.append(peers[0].w)
    torch.testing.assert_close(rows[0], rows[1])
    assert not torch.allclose(rows[0], rows[2], atol=1e-3)
