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
from torch import Tensor, nn

from p2pfl.learning.losses import (
    info_nce,
    prototype_contrastive,
    proximal,
    reweighted_cross_entropy,
    simsiam,
    softmax_log_weights,
    supervised_contrastive,
    supervised_contrastive_inside,
    supervision_loss,
    uniformity,
)

property_of = settings(deadline=None, max_examples=15)

Contrastive = Callable[[Tensor, Tensor, float], Tensor]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / math.sqrt(a @ a) / math.sqrt(b @ b))


def expected_contrastive(p: np.ndarray, labels: list[int], tau: float, inside: bool) -> float:
    total = 0.0
    samples = range(len(p))
    for q in samples:
        denominator = sum(math.exp(cosine(p[q], p[m]) / tau) for m in samples if m != q)
        positives = [r for r in samples if r != q and labels[r] == labels[q]]
        if not positives:
            continue
        if inside:
            total -= math.log(sum(math.exp(cosine(p[q], p[r]) / tau) for r in positives) / denominator)
        else:
            total -= sum(math.log(math.exp(cosine(p[q], p[r]) / tau) / denominator) for r in positives) / len(
                positives
            )
    return total / len(p)


def expected_prototype(p: np.ndarray, labels: list[int], prototypes: np.ndarray, tau: float) -> float:
    total = 0.0
    for q, label in enumerate(labels):
        scores = [math.exp(cosine(p[q], prototype) / tau) for prototype in prototypes]
        total -= math.log(scores[label] / sum(scores))
    return total / len(p)


def expected_uniformity(prototypes: np.ndarray) -> float:
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
def test_contrastive_losses_match_their_formulas(
    loss: Contrastive, inside: bool, batch: tuple[list[int], int, float, int]
) -> None:
    labels, width, tau, seed = batch
    p = noise(len(labels), width, seed)
    found = loss(torch.from_numpy(p), torch.tensor(labels), tau)
    assert found.item() == pytest.approx(expected_contrastive(p, labels, tau, inside), rel=1e-9, abs=1e-12)


@property_of
@given(batches)
def test_prototype_contrastive_matches_its_formula(batch: tuple[list[int], int, float, int]) -> None:
    labels, width, tau, seed = batch
    p, prototypes = noise(len(labels), width, seed), noise(4, width, seed + 1)
    found = prototype_contrastive(torch.from_numpy(p), torch.tensor(labels), torch.from_numpy(prototypes), tau)
    assert found.item() == pytest.approx(expected_prototype(p, labels, prototypes, tau), rel=1e-9, abs=1e-12)


@property_of
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_uniformity_matches_its_formula(classes: int, width: int, seed: int) -> None:
    prototypes = noise(classes, width, seed)
    found = uniformity(torch.from_numpy(prototypes)).item()
    assert found == pytest.approx(expected_uniformity(prototypes), rel=1e-9, abs=1e-12)


def test_uniformity_is_smallest_for_opposite_prototypes() -> None:
    assert uniformity(torch.eye(4)).item() == 0.0
    assert uniformity(torch.ones(4, 2)).item() == pytest.approx(3.0)
    assert uniformity(torch.tensor([[1.0, 0.0], [-2.0, 0.0]])).item() == pytest.approx(-1.0)


@pytest.mark.parametrize("loss", [supervised_contrastive, supervised_contrastive_inside])
def test_sample_without_positives_contributes_zero_to_the_mean(loss: Contrastive) -> None:
    p = torch.from_numpy(noise(4, 3, 0))
    labels = torch.tensor([0, 0, 1, 2])
    expected = expected_contrastive(p.numpy(), [0, 0, 1, 2], 0.2, loss is supervised_contrastive_inside)
    assert loss(p, labels, 0.2).item() == pytest.approx(expected)
    assert loss(p, torch.arange(4), 0.2).item() == 0.0


@pytest.mark.parametrize("loss", [supervised_contrastive, supervised_contrastive_inside])
@pytest.mark.parametrize("labels", [[0], [0, 0], [0, 1], [0, 1, 2], [0, 0, 1, 2], [0] * 6])
@pytest.mark.parametrize("temperature", [0.01, 0.2, 100.0])
def test_contrastive_values_and_gradients_are_finite(
    loss: Contrastive, labels: list[int], temperature: float
) -> None:
    p = torch.from_numpy(noise(len(labels), 3, 0)).float()
    if len(labels) > 3:
        p[1] = p[0]  # two equal samples
        p[2] = 0.0  # one without direction
    p.requires_grad_()
    value = loss(p, torch.tensor(labels), temperature)
    value.backward()  # type: ignore[no-untyped-call]
    assert value.isfinite()
    assert p.grad is not None
    assert p.grad.isfinite().all()


@pytest.mark.parametrize("loss", [supervised_contrastive, supervised_contrastive_inside])
def test_contrastive_gradients_match_finite_differences(loss: Contrastive) -> None:
    p = torch.from_numpy(noise(5, 3, 0)).requires_grad_()
    labels = torch.tensor([0, 0, 1, 0, 2])
    assert torch.autograd.gradcheck(lambda x: loss(x, labels, 0.5), p)


def test_prototype_and_uniformity_gradients_match_finite_differences() -> None:
    p, prototypes = (torch.from_numpy(noise(4, 3, seed)).requires_grad_() for seed in (0, 1))
    labels = torch.tensor([0, 3, 1, 0])
    assert torch.autograd.gradcheck(lambda x, xi: prototype_contrastive(x, labels, xi, 0.5), (p, prototypes))
    assert torch.autograd.gradcheck(uniformity, prototypes)


@pytest.mark.parametrize("loss", [supervised_contrastive, supervised_contrastive_inside])
def test_contrastive_losses_are_smaller_for_clustered_classes(loss: Contrastive) -> None:
    together = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    labels, crossed = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    assert loss(together, labels, 0.2) < 0.1 < loss(together, crossed, 0.2)


@pytest.mark.parametrize("loss", [supervised_contrastive, supervised_contrastive_inside])
def test_contrastive_losses_ignore_norms(loss: Contrastive) -> None:
    p = torch.from_numpy(noise(4, 3, 0))
    labels = torch.tensor([0, 0, 1, 1])
    scaled = p * torch.tensor([[0.1], [3.0], [7.0], [100.0]])
    assert loss(scaled, labels, 0.2).item() == pytest.approx(loss(p, labels, 0.2).item())
    xi = torch.from_numpy(noise(2, 3, 1))
    assert prototype_contrastive(scaled, labels, 5 * xi, 0.2).item() == pytest.approx(
        prototype_contrastive(p, labels, xi, 0.2).item()
    )


# ---- unsupervised contrastive losses -------------------------------------------------------------------------

view_pairs = st.tuples(st.integers(2, 6), st.integers(2, 5), st.integers(0, 2**32 - 1))


@property_of
@given(view_pairs, st.sampled_from([0.07, 0.5]))
def test_info_nce_is_the_simclr_loss(drawn: tuple[int, int, int], tau: float) -> None:
    size, width, seed = drawn
    z = noise(2 * size, width, seed)
    expected = 0.0
    for i in range(2 * size):
        scores = {n: math.exp(cosine(z[i], z[n]) / tau) for n in range(2 * size) if n != i}
        expected -= math.log(scores[(i + size) % (2 * size)] / sum(scores.values())) / (2 * size)
    assert float(info_nce(torch.from_numpy(z), tau)) == pytest.approx(expected, rel=1e-9)


@property_of
@given(view_pairs)
def test_simsiam_is_the_negative_cosine_across_views(drawn: tuple[int, int, int]) -> None:
    size, width, seed = drawn
    z, p = noise(2 * size, width, seed), noise(2 * size, width, seed + 1)
    expected = -np.mean([cosine(p[i], z[(i + size) % (2 * size)]) for i in range(2 * size)])
    assert float(simsiam(torch.from_numpy(z), torch.from_numpy(p))) == pytest.approx(expected, rel=1e-9)


def test_simsiam_has_no_gradient_through_the_projections() -> None:
    z, p = (torch.from_numpy(noise(6, 4, seed)).requires_grad_() for seed in (0, 1))
    simsiam(z, p).backward()  # type: ignore[no-untyped-call]
    assert z.grad is None
    assert p.grad is not None


# ---- supervision of DFML ------------------------------------------------------------------------------------


def expected_reweighted(z: np.ndarray, labels: list[int], beta: list[float]) -> float:
    """Eq. 2, as a mean, in the form in which it is printed."""
    total = 0.0
    for row, label in zip(z, labels, strict=True):
        total -= row[label] - math.log(sum(b * math.exp(score) for b, score in zip(beta, row, strict=True)))
    return total / len(labels)


local_labels = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@property_of
@given(local_labels, st.integers(0, 1000))
def test_wsm_weights_classes_by_frequency(labels: list[int], seed: int) -> None:
    z = noise(len(labels), 6, seed)
    log_weights = softmax_log_weights("wsm", np.array(labels), 6)
    found = reweighted_cross_entropy(torch.from_numpy(z), torch.tensor(labels), log_weights)
    beta = [labels.count(c) / len(labels) for c in range(6)]
    assert float(found) == pytest.approx(expected_reweighted(z, labels, beta), abs=1e-6)


@property_of
@given(local_labels, st.integers(0, 1000))
def test_ace_and_masked_are_cross_entropy_over_the_classes_of_batch_and_peer(labels: list[int], seed: int) -> None:
    local, batch = labels, labels[: -(-len(labels) // 2)]
    z = noise(len(batch), 6, seed)
    for form, among in (("ace", batch), ("masked", local)):
        loss = supervision_loss(form, np.array(local), 6, torch.device("cpu"))  # type: ignore[arg-type]
        present = sorted(set(among))
        targets = torch.tensor([present.index(label) for label in batch])
        expected = torch.nn.functional.cross_entropy(torch.from_numpy(z[:, present]), targets)
        assert float(loss(torch.from_numpy(z), torch.tensor(batch))) == pytest.approx(float(expected), abs=1e-6)


@property_of
@given(local_labels, st.integers(0, 1000))
def test_ce_is_cross_entropy(labels: list[int], seed: int) -> None:
    z, y = torch.from_numpy(noise(len(labels), 6, seed)), torch.tensor(labels)
    found = reweighted_cross_entropy(z, y, softmax_log_weights("ce", np.array(labels), 6))
    assert float(found) == pytest.approx(float(torch.nn.functional.cross_entropy(z, y)), abs=1e-9)


@pytest.mark.parametrize("form", ["wsm", "ace", "masked"])
def test_absent_classes_get_no_gradient(form: Any) -> None:
    z = torch.tensor([[1.0, 80.0, 0.5], [0.0, -80.0, 2.0]], requires_grad=True)
    labels = torch.tensor([0, 2])
    supervision_loss(form, labels.numpy(), 3, z.device)(z, labels).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert z.grad[:, 1].tolist() == [0.0, 0.0]
    assert (z.grad[:, [0, 2]] != 0).all()


def test_softmax_log_weights_of_known_labels() -> None:
    weights = softmax_log_weights("wsm", np.array([0, 0, 0, 2]), 4)
    assert weights.tolist() == [pytest.approx(math.log(0.75)), -1e9, pytest.approx(math.log(0.25)), -1e9]
    assert softmax_log_weights("masked", np.array([0, 0, 0, 2]), 4).tolist() == [0.0, -1e9, 0.0, -1e9]
    assert softmax_log_weights("ce", np.array([0, 0, 0, 2]), 4).tolist() == [0.0] * 4


def test_the_proximal_term_leaves_out_disabled_entries() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-torch.inf, 3.0]]))
    center = {"weight": torch.tensor([[-torch.inf, 1.0]])}
    term = proximal(model, center, weight=2.0)
    term.backward()  # type: ignore[no-untyped-call]
    assert term.item() == 4.0
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[0.0, 4.0]]
