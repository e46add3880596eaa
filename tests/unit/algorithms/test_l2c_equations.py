"""L2C's equations against its paper: gradients by autograd, weights, aggregate, which sources are kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.l2c import (
    L2C,
    directional_derivative,
    logit_gradient,
    mixing_weights,
    strongest,
    validation_gradient,
)
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.tensors import parameters_of
from tests.l2c_peers import CLASSES, INPUTS, aggregated, data_of, hyper
from tests.regression import gradient, regression_data, theta
from tests.support import linear_model, run_rounds, setting, softmax_regression

property_of = settings(deadline=None, max_examples=20)


# ---- line 18: the gradient of the weights --------------------------------------------------------------------


@st.composite
def aggregates(draw: st.DrawFn) -> tuple[int, int, float]:
    return draw(st.integers(1, 6)), draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0.0, 0.3, 3.0]))


@pytest.mark.exhaustive
@property_of
@given(aggregates())
@example((1, 0, 0.0))
def test_closed_form_gradient_equals_autograd_through_the_aggregate(drawn: tuple[int, int, float]) -> None:
    peers, seed, spread = drawn
    generator = torch.Generator().manual_seed(seed)
    model = linear_model(INPUTS, 5, CLASSES, seed=seed % 1000)
    data = data_of(seed % 50)
    before = {name: tensor.clone() for name, tensor in parameters_of(model).items()}
    updates = {
        j: {name: torch.randn(x.shape, generator=generator) * 0.1 for name, x in before.items()} for j in range(peers)
    }
    logits = (torch.randn(peers, generator=generator, dtype=torch.float64) * spread).requires_grad_()

    # Everything in one graph: softmax, aggregate, network, loss.
    w = logits.softmax(0)
    expected = {name: x - sum(w[j].float() * updates[j][name] for j in updates) for name, x in before.items()}
    (x, labels), *rest = data.sweep(data.validation)
    assert not rest
    cross_entropy(functional_call(model, expected, x), labels).backward()  # type: ignore[no-untyped-call]

    # The closed form.
    row = mixing_weights(logits, range(peers))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(aggregated(before, updates, row)[name])
    _, g = validation_gradient(model, data)
    derivatives = torch.tensor([directional_derivative(g, updates[j]) for j in range(peers)], dtype=torch.float64)
    found = logit_gradient(torch.tensor(list(row.values()), dtype=torch.float64), derivatives)
    assert logits.grad is not None
    np.testing.assert_allclose(found.numpy(), logits.grad.numpy(), rtol=1e-3, atol=2e-7)


@property_of
@given(st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(-5.0, 5.0)), min_size=1, max_size=8))
def test_logit_gradient_is_softmax_jacobian_times_weight_gradient(
    pairs: list[tuple[float, float]],
) -> None:
    w, d = np.array(pairs).T
    w = w / w.sum()
    found = logit_gradient(torch.from_numpy(w), torch.from_numpy(d.copy())).numpy()
    jacobian = np.diag(w) - np.outer(w, w)
    np.testing.assert_allclose(found, jacobian @ -d, atol=1e-12)
    assert abs(found.sum()) < 1e-12  # adding a constant to all logits changes nothing


def test_validation_gradient_is_independent_of_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = softmax_regression(INPUTS, CLASSES, seed=1), data_of(0)
    inputs, labels = regression_data(data.validation)
    for batch in (512, 2):
        monkeypatch.setattr("p2pfl.learning.peer_data.EVALUATION_BATCH", batch)
        loss, g = validation_gradient(model, data)
        found = torch.cat([g["head.weight"], g["head.bias"][:, None]], dim=1)
        np.testing.assert_allclose(found, gradient(theta(model), inputs, labels), atol=1e-6)
        scores = inputs @ theta(model).T
        expected = np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(5), labels])
        assert loss == pytest.approx(expected, abs=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_validation_gradient_uses_evaluation_mode() -> None:
    class Dropping(torch.nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            assert not self.training
            return super().forward(x)

    model = Model("drop", torch.nn.Sequential(torch.nn.Flatten(), Dropping(0.5)), INPUTS, CLASSES)
    peer = L2C(hyper(local_epochs=1), setting(0, 1, model, data_of(0)))
    peer.train = lambda **options: None  # type: ignore[method-assign]
    run_rounds([peer], Topology.from_edges(1, []), 1)


def test_unused_and_frozen_parameters_have_zero_gradient() -> None:
    model = softmax_regression(INPUTS, CLASSES)
    model.unused = torch.nn.Parameter(torch.ones(2))
    model.head.bias.requires_grad_(False)
    _, g = validation_gradient(model, data_of(0))
    assert g["unused"].tolist() == [0.0, 0.0]
    assert g["head.bias"].tolist() == [0.0] * CLASSES
    assert g["head.weight"].any()


def test_directional_derivatives_are_summed_in_float64() -> None:
    g = {"a": torch.ones(3), "b": torch.tensor([2.0])}
    update = {"a": torch.tensor([1e8, 1.0, -1e8]), "b": torch.tensor([0.5])}
    assert directional_derivative(g, update) == 2.0
    assert directional_derivative(g, {name: tensor.bfloat16() for name, tensor in update.items()}) == 2.0


# ---- lines 13, 16, 21 ----------------------------------------------------------------------------------------


@property_of
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=8), st.floats(-1e4, 1e4))
def test_weights_are_softmax_over_present_peers(entries: list[float], shift: float) -> None:
    logits = torch.tensor([99.0, *entries, 99.0], dtype=torch.float64)
    ids = range(1, 1 + len(entries))
    found = mixing_weights(logits + shift, list(reversed(ids)))
    assert list(found) == list(ids)
    expected = np.exp(np.array(entries) - max(entries))
    np.testing.assert_allclose(list(found.values()), expected / expected.sum(), rtol=1e-9)


def test_aggregate_subtracts_weighted_updates() -> None:
    stream = np.random.default_rng(0)
    before = {"x": torch.from_numpy(stream.normal(size=(5, 7)).astype(np.float32)), "y": torch.tensor(2.0)}
    updates = {
        j: {"x": torch.from_numpy(stream.normal(size=(5, 7)).astype(np.float32)), "y": torch.tensor(float(j))}
        for j in (4, 0, 2)
    }
    w = {0: 0.5, 2: 0.125, 4: 0.375}
    found = aggregated(before, updates, w)
    expected = before["x"].double() - sum(w[j] * updates[j]["x"].double() for j in w)
    torch.testing.assert_close(found["x"].double(), expected, rtol=0, atol=1e-6)
    assert found["y"].item() == 2.0 - 0.25 - 1.5
    assert torch.equal(found["x"], aggregated(before, dict(sorted(updates.items())), w)["x"])


def test_aggregate_of_bfloat16_updates_is_float32() -> None:
    before, half = {"x": torch.full((3,), 1.0)}, {"x": torch.full((3,), 1 / 256).bfloat16()}
    found = aggregated(before, {0: half, 1: half}, {0: 0.5, 1: 0.5})["x"]
    assert found.dtype == torch.float32
    assert found.tolist() == [1.0 - 1 / 256] * 3


def test_helpful_neighbor_gains_weight_and_harmful_one_loses() -> None:
    g = {"x": torch.tensor([1.0, -1.0])}  # downhill is (-1, 1), and θ moves by −Δ
    derivatives = [directional_derivative(g, {"x": torch.tensor(way)}) for way in ([1.0, -1.0], [-1.0, 1.0])]
    with_, against = logit_gradient(torch.tensor([0.5, 0.5]).double(), torch.tensor(derivatives).double()).tolist()
    assert with_ < 0 < against  # Adam goes against the gradient


@property_of
@given(st.dictionaries(st.integers(0, 20), st.sampled_from([0.0, 0.1, 0.2, 0.3]), min_size=1), st.integers(0, 12))
def test_pruning_keeps_sources_with_largest_weights(w: dict[int, float], count: int) -> None:
    found = strongest(w, w, count)
    assert list(found) == sorted(found)
    assert len(found) == min(count, len(w))
    removed = set(w) - set(found)
    assert all((w[j], -j) > (w[k], -k) for j in found for k in removed)


def test_source_without_weight_is_pruned_first() -> None:
    assert strongest({0: 0.5, 2: 0.25}, [2, 3], 1) == (2,)
    assert strongest({0: 0.5, 2: 0.25}, [2, 3], 0) == ()
