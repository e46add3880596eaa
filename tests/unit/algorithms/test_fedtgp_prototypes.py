"""FedTGP's trainable prototypes against its paper: margin and loss by brute force, training by autograd."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn.functional import one_hot

from p2pfl.algorithms.fedtgp import TrainablePrototypes, acl_gradient, adaptive_margin
from p2pfl.algorithms.prototypes import margins
from tests.fedtgp_reference import CLASSES, FEATURES, Array, acl_loss, apart, hyper

property_of = settings(deadline=None, max_examples=50)


# ---- line 10: margin -----------------------------------------------------------------------------------


@property_of
@given(st.integers(2, 9), st.integers(0, 2**32 - 1), st.sampled_from([0.5, 3.0, 100.0]))
def test_margin_matches_the_formulas(classes: int, seed: int, threshold: float) -> None:
    centers = np.random.default_rng(seed).normal(scale=2, size=(classes, 3))
    all_pairs = apart(centers)
    nearest = [min(d for (i, _), d in all_pairs.items() if i == c) for c in range(classes)]
    for form, expected in (
        ("adaptive", min(max(nearest), threshold)),
        ("pairwise-max", min(max(all_pairs.values()), threshold)),
        ("fixed", threshold),
        ("none", 0.0),
    ):
        found = adaptive_margin(torch.from_numpy(centers), hyper(margin=form, threshold=threshold))
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("classes", [0, 1])
def test_margin_is_0_with_fewer_than_two_classes(classes: int) -> None:
    centers = torch.ones(classes, 3)
    assert adaptive_margin(centers, hyper()) == 0.0
    assert adaptive_margin(centers, hyper(margin="pairwise-max")) == 0.0


# ---- line 11: loss and gradient --------------------------------------------------------------------


def acl_by_hand(values: Array, labels: Sequence[int], prototypes: Array, margin: float) -> float:
    """Eq. 10, term by term, divided by the number of terms."""
    total = 0.0
    for value, label in zip(values, labels, strict=True):
        positive = math.exp(-(math.dist(value, prototypes[label]) + margin))
        others = sum(math.exp(-math.dist(value, row)) for k, row in enumerate(prototypes) if k != label)
        total -= math.log(positive / (positive + others))
    return total / len(values)


problems = st.tuples(
    st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1), st.floats(0, 10)
)


def problem(rows: int, classes: int, width: int, seed: int) -> tuple[Array, NDArray[np.int64], Array]:
    stream = np.random.default_rng(seed)
    values, prototypes = stream.normal(size=(rows, width)), stream.normal(size=(classes, width))
    return values, stream.integers(classes, size=rows), prototypes


@property_of
@given(problems)
def test_reference_loss_matches_eq_10(drawn: tuple[int, int, int, int, float]) -> None:
    *sizes, margin = drawn
    values, labels, prototypes = problem(*sizes)
    found = acl_loss(torch.from_numpy(values), torch.from_numpy(labels), torch.from_numpy(prototypes), margin)
    assert found.item() == pytest.approx(acl_by_hand(values, labels.tolist(), prototypes, margin), rel=1e-9, abs=1e-9)


@pytest.mark.exhaustive
@property_of
@given(problems)
@example((3, 4, 2, 0, 100.0))
def test_gradient_matches_autograd(drawn: tuple[int, int, int, int, float]) -> None:
    *sizes, margin = drawn
    values, labels, prototypes = map(torch.from_numpy, problem(*sizes))
    variable = prototypes.clone().requires_grad_()
    acl_loss(values, labels, variable, margin).backward()  # type: ignore[no-untyped-call]
    targets = one_hot(labels, len(prototypes)).double()
    torch.testing.assert_close(acl_gradient(values, targets, prototypes, margin), variable.grad)


def test_gradient_is_finite_at_a_local_prototype() -> None:
    prototypes = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    targets = torch.eye(2)
    found = acl_gradient(prototypes[:1], targets[:1], prototypes, 3.0)
    assert torch.isfinite(found).all()
    assert torch.equal(found[0], torch.zeros(2))
    assert torch.equal(acl_gradient(torch.zeros(1, 2), targets[1:], prototypes, 0.0)[1], torch.zeros(2))


@pytest.mark.parametrize("margin", [0.0, 3.0, 30.0])
def test_gradient_at_a_local_prototype_includes_the_rest_of_the_batch(margin: float) -> None:
    torch.manual_seed(1)
    prototypes = (4.0 * torch.randn(3, 2, dtype=torch.float64)).requires_grad_()
    values = torch.stack([prototypes[0].detach(), torch.randn(2, dtype=torch.float64)])
    labels = torch.tensor([0, 1])
    acl_loss(values, labels, prototypes, margin).backward()  # type: ignore[no-untyped-call]
    found = acl_gradient(values, one_hot(labels, 3).to(values.dtype), prototypes.detach(), margin)
    assert prototypes.grad is not None
    torch.testing.assert_close(found, prototypes.grad)
    assert float(found[0].norm()) > 0


@pytest.mark.parametrize("transform", [True, False])
@pytest.mark.parametrize("margin", [0.0, 2.5])
def test_training_matches_sgd_on_the_loss(transform: bool, margin: float) -> None:
    torch.manual_seed(0)
    values, labels = torch.randn(11, FEATURES), torch.arange(11) % CLASSES
    orders = [torch.randperm(11) for _ in range(6)]
    found = TrainablePrototypes(CLASSES, FEATURES, transform)
    expected = copy.deepcopy(found)
    start = found().detach().clone()
    found.fit(values, labels, margin, orders, batch=4, lr=0.2)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.2)
    for order in orders:
        for first in range(0, 11, 4):  # batches of 4, 4 and 3
            chosen = order[first : first + 4]
            optimizer.zero_grad()
            acl_loss(values[chosen], labels[chosen], expected(), margin).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert not torch.allclose(found(), start, atol=0.1)
    for parameter, reference in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, reference, rtol=1e-4, atol=1e-5)


def test_trainable_prototypes_are_two_layers_over_a_vector_per_class() -> None:
    with_layers, bare = TrainablePrototypes(CLASSES, FEATURES, True), TrainablePrototypes(CLASSES, FEATURES, False)
    shapes = {name: tuple(parameter.shape) for name, parameter in with_layers.named_parameters()}
    d = FEATURES
    assert shapes == {
        "vectors": (CLASSES, d),
        "inner.weight": (d, d),
        "inner.bias": (d,),
        "outer.weight": (d, d),
        "outer.bias": (d,),
    }
    assert [name for name, _ in bare.named_parameters()] == ["vectors"]
    assert torch.equal(bare(), bare.vectors)


def test_trained_prototypes_stay_apart_where_means_shrink() -> None:
    """Fig. 1b: peers map the classes to different points, so that the means are close to each other."""
    stream = np.random.default_rng(0)
    points = 4 * np.eye(8)[[stream.permutation(8)[:3] for _ in range(5)]] + stream.normal(scale=0.1, size=(5, 3, 8))
    values = torch.from_numpy(points.reshape(15, 8)).float()
    labels = torch.arange(15) % 3
    best = max(float(margins(values[first : first + 3]).min()) for first in range(0, 15, 3))
    means = torch.stack([values[labels == k].mean(0) for k in range(3)])
    assert float(margins(means).min()) < 0.8 * best
    torch.manual_seed(0)
    trained = TrainablePrototypes(3, 8, True)
    orders = [torch.from_numpy(stream.permutation(15)) for _ in range(150)]
    trained.fit(values, labels, adaptive_margin(means, hyper()), orders, batch=5, lr=0.05)
    assert float(margins(trained().detach()).min()) > best
