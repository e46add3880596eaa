"""MAPL's local training: each loss term by hand, views, initial values, optimizer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.mapl import MAPL, Hyper
from p2pfl.options import OptionErrors
from tests.mapl_reference import CLASSES, FEATURES, hyper, make


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


@pytest.mark.exhaustive
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
