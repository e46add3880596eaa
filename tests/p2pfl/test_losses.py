"""Losses against their formulas, written out with loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2pfl.losses import (
    prototype_contrastive,
    reweighted_cross_entropy,
    softmax_log_weights,
    supervised_contrastive,
    supervised_contrastive_inside,
    uniformity,
)

property_of = settings(deadline=None, max_examples=30)

Contrastive = Callable[[Tensor, Tensor, float], Tensor]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / math.sqrt(a @ a) / math.sqrt(b @ b))


def contrastive_by_hand(p: np.ndarray, labels: list[int], tau: float, inside: bool) -> float:
    total = 0.0
    everyone = range(len(p))
    for q in everyone:
        denominator = sum(math.exp(cosine(p[q], p[m]) / tau) for m in everyone if m != q)
        friends = [r for r in everyone if r != q and labels[r] == labels[q]]
        if not friends:
            continue
        if inside:
            total -= math.log(sum(math.exp(cosine(p[q], p[r]) / tau) for r in friends) / denominator)
        else:
            total -= sum(math.log(math.exp(cosine(p[q], p[r]) / tau) / denominator) for r in friends) / len(friends)
    return total / len(p)


def prototype_by_hand(p: np.ndarray, labels: list[int], prototypes: np.ndarray, tau: float) -> float:
    total = 0.0
    for q, label in enumerate(labels):
        scores = [math.exp(cosine(p[q], prototype) / tau) for prototype in prototypes]
        total -= math.log(scores[label] / sum(scores))
    return total / len(p)


def uniformity_by_hand(prototypes: np.ndarray) -> float:
    classes = range(len(prototypes))
    return sum(cosine(prototypes[k], prototypes[r]) for k in classes for r in classes if r != k) / len(prototypes)


def noise(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, columns))


batches = st.tuples(
    st.lists(st.integers(0, 3), min_size=2, max_size=9),
    st.integers(1, 5),
    st.sampled_from([0.07, 0.2, 1.0, 100.0]),
    st.integers(0, 2**32 - 1),
)


@property_of
@given(batches)
@pytest.mark.parametrize(
    ("loss", "inside"),
    [(supervised_contrastive, False), (supervised_contrastive_inside, True)],
    ids=["outside", "inside"],
)
def test_the_contrastive_losses_are_their_double_sums(
    loss: Contrastive, inside: bool, batch: tuple[list[int], int, float, int]
) -> None:
    labels, width, tau, seed = batch
    p = noise(len(labels), width, seed)
    found = loss(torch.from_numpy(p), torch.tensor(labels), tau)
    assert found.item() == pytest.approx(contrastive_by_hand(p, labels, tau, inside), rel=1e-9, abs=1e-12)


@property_of
@given(batches)
def test_the_prototype_loss_is_its_formula(batch: tuple[list[int], int, float, int]) -> None:
    labels, width, tau, seed = batch
    p, prototypes = noise(len(labels), width, seed), noise(4, width, seed + 1)
    found = prototype_contrastive(torch.from_numpy(p), torch.tensor(labels), torch.from_numpy(prototypes), tau)
    assert found.item() == pytest.approx(prototype_by_hand(p, labels, prototypes, tau), rel=1e-9, abs=1e-12)


@property_of
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_uniformity_is_its_formula(classes: int, width: int, seed: int) -> None:
    prototypes = noise(classes, width, seed)
    found = uniformity(torch.from_numpy(prototypes)).item()
    assert found == pytest.approx(uniformity_by_hand(prototypes), rel=1e-9, abs=1e-12)


def test_uniformity_is_least_when_prototypes_point_apart() -> None:
    assert uniformity(torch.eye(4)).item() == 0.0
    assert uniformity(torch.ones(4, 2)).item() == pytest.approx(3.0)
    assert uniformity(torch.tensor([[1.0, 0.0], [-2.0, 0.0]])).item() == pytest.approx(-1.0)


@pytest.mark.parametrize("loss", [supervised_contrastive, supervised_contrastive_inside])
def test_a_sample_without_another_of_its_class_contributes_nothing_but_counts(loss: Contrastive) -> None:
    p = torch.from_numpy(noise(4, 3, 0))
    labels = torch.tensor([0, 0, 1, 2])
    expected = contrastive_by_hand(p.numpy(), [0, 0, 1, 2], 0.2, loss is supervised_contrastive_inside)
    assert loss(p, labels, 0.2).item() == pytest.approx(expected)
    assert loss(p, torch.arange(4), 0.2).item() == 0.0


@pytest.mark.parametrize("loss", [supervised_contrastive, supervised_contrastive_inside])
@pytest.mark.parametrize("labels", [[0], [0, 0], [0, 1], [0, 1, 2], [0, 0, 1, 2], [0] * 6])
@pytest.mark.parametrize("temperature", [0.01, 0.2, 100.0])
def test_values_and_gradients_of_the_contrastive_losses_are_finite(
    loss: Contrastive, labels: list[int], temperature: float
) -> None:
    p = torch.from_numpy(noise(len(labels), 3, 0)).float()
    if len(labels) > 3:
        p[1] = p[0]  # two equal samples
        p[2] = 0.0  # one without direction
    p.requires_grad_()
    value = loss(p, torch.tensor(labels), temperature)
    value.backward()
    assert value.isfinite()
    assert p.grad is not None
    assert p.grad.isfinite().all()


@pytest.mark.parametrize("loss", [supervised_contrastive, supervised_contrastive_inside])
def test_the_contrastive_gradients_are_those_of_finite_differences(loss: Contrastive) -> None:
    p = torch.from_numpy(noise(5, 3, 0)).requires_grad_()
    labels = torch.tensor([0, 0, 1, 0, 2])
    assert torch.autograd.gradcheck(lambda x: loss(x, labels, 0.5), p)


def test_the_prototype_and_uniformity_gradients_are_those_of_finite_differences() -> None:
    p, prototypes = (torch.from_numpy(noise(4, 3, seed)).requires_grad_() for seed in (0, 1))
    labels = torch.tensor([0, 3, 1, 0])
    assert torch.autograd.gradcheck(lambda x, xi: prototype_contrastive(x, labels, xi, 0.5), (p, prototypes))
    assert torch.autograd.gradcheck(uniformity, prototypes)


@pytest.mark.parametrize("loss", [supervised_contrastive, supervised_contrastive_inside])
def test_the_contrastive_losses_prefer_classes_that_lie_together(loss: Contrastive) -> None:
    together = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    labels, crossed = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    assert loss(together, labels, 0.2) < 0.1 < loss(together, crossed, 0.2)


@pytest.mark.parametrize("loss", [supervised_contrastive, supervised_contrastive_inside])
def test_only_directions_matter(loss: Contrastive) -> None:
    p = torch.from_numpy(noise(4, 3, 0))
    labels = torch.tensor([0, 0, 1, 1])
    scaled = p * torch.tensor([[0.1], [3.0], [7.0], [100.0]])
    assert loss(scaled, labels, 0.2).item() == pytest.approx(loss(p, labels, 0.2).item())
    xi = torch.from_numpy(noise(2, 3, 1))
    assert prototype_contrastive(scaled, labels, 5 * xi, 0.2).item() == pytest.approx(
        prototype_contrastive(p, labels, xi, 0.2).item()
    )


# ---- supervision of DFML ------------------------------------------------------------------------------------


def reweighted_by_hand(z: np.ndarray, labels: list[int], beta: list[float]) -> float:
    """Eq. 2, as a mean, in the form in which it is printed."""
    total = 0.0
    for row, label in zip(z, labels, strict=True):
        total -= row[label] - math.log(sum(b * math.exp(score) for b, score in zip(beta, row, strict=True)))
    return total / len(labels)


own_labels = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@property_of
@given(own_labels, st.integers(0, 1000))
def test_wsm_weighs_each_class_by_its_frequency_and_absent_ones_not_at_all(labels: list[int], seed: int) -> None:
    z = noise(len(labels), 6, seed)
    log_weights = softmax_log_weights("wsm", np.array(labels), 6)
    found = reweighted_cross_entropy(torch.from_numpy(z), torch.tensor(labels), log_weights)
    beta = [labels.count(c) / len(labels) for c in range(6)]
    assert float(found) == pytest.approx(reweighted_by_hand(z, labels, beta), abs=1e-6)


@property_of
@given(own_labels, st.integers(0, 1000))
def test_ace_is_the_cross_entropy_among_the_classes_that_occur(labels: list[int], seed: int) -> None:
    z = noise(len(labels), 6, seed)
    found = reweighted_cross_entropy(
        torch.from_numpy(z), torch.tensor(labels), softmax_log_weights("ace", np.array(labels), 6)
    )
    present = sorted(set(labels))
    among = torch.tensor([present.index(label) for label in labels])
    expected = torch.nn.functional.cross_entropy(torch.from_numpy(z[:, present]), among)
    assert float(found) == pytest.approx(float(expected), abs=1e-6)


@property_of
@given(own_labels, st.integers(0, 1000))
def test_ce_is_the_cross_entropy(labels: list[int], seed: int) -> None:
    z, y = torch.from_numpy(noise(len(labels), 6, seed)), torch.tensor(labels)
    found = reweighted_cross_entropy(z, y, softmax_log_weights("ce", np.array(labels), 6))
    assert float(found) == pytest.approx(float(torch.nn.functional.cross_entropy(z, y)), abs=1e-9)


@pytest.mark.parametrize("form", ["wsm", "ace"])
def test_absent_classes_are_not_pushed_down_however_large_their_logits(form: Any) -> None:
    z = torch.tensor([[1.0, 80.0, 0.5], [0.0, -80.0, 2.0]], requires_grad=True)
    labels = torch.tensor([0, 2])
    reweighted_cross_entropy(z, labels, softmax_log_weights(form, labels.numpy(), 3)).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert z.grad[:, 1].tolist() == [0.0, 0.0]
    assert (z.grad[:, [0, 2]] != 0).all()


def test_the_weights_of_a_softmax_are_those_of_all_samples_not_of_the_batch() -> None:
    weights = softmax_log_weights("wsm", np.array([0, 0, 0, 2]), 4)
    assert weights.tolist() == [pytest.approx(math.log(0.75)), -1e9, pytest.approx(math.log(0.25)), -1e9]
    assert softmax_log_weights("ace", np.array([0, 0, 0, 2]), 4).tolist() == [0.0, -1e9, 0.0, -1e9]
    assert softmax_log_weights("ce", np.array([0, 0, 0, 2]), 4).tolist() == [0.0] * 4
