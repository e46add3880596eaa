"""DFML's equations against its paper: α over its periods, loss factors, distillation, WSL."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pfl.algorithms.dfml import Hyper
from p2pfl.algorithms.mutual_learning import distillation, loss_factors, teacher_weights, wsl_weights
from tests.dfml_reference import Matrix, hyper, model, softmax

property_of = settings(deadline=None, max_examples=15)


# ---- α -------------------------------------------------------------------------------------------------------


def schedule_reference(h: Hyper, periods: int) -> list[float]:
    alphas: list[float] = []
    for number in range(periods):
        length = h.period + number * h.period_increment
        if h.shape == "fixed":
            alphas += [h.alpha_max] * length
            continue
        if h.shape == "falling":
            alphas += [*(h.alpha_max * (1 + np.cos(np.linspace(0, np.pi, length + 1)[:-1])) / 2)]
            continue
        if h.shape == "linear":
            alphas += [*(h.alpha_max * np.linspace(1, 0, length))] if length > 1 else [0.0]
            continue
        rise = length if h.shape == "half" else math.ceil(length / 2)
        up = h.alpha_max * (1 - np.cos(np.linspace(0, np.pi, rise + 1)[1:])) / 2
        down = h.alpha_max * (1 + np.cos(np.linspace(0, np.pi, length - rise + 1)[1:])) / 2
        alphas += [*up, *down]
    return alphas


schedules = st.builds(
    lambda shape, period, increment, most: hyper(
        shape=shape, period=period, period_increment=increment, alpha_max=most
    ),
    st.sampled_from(["half", "full", "fixed", "falling", "linear"]),
    st.integers(1, 12),
    st.integers(0, 5),
    st.integers(0, 100).map(lambda percent: percent / 100),
)


@property_of
@given(schedules)
def test_alpha_follows_a_cosine_in_every_period(h: Hyper) -> None:
    expected = schedule_reference(h, 4)
    np.testing.assert_allclose([h.alpha_at(t) for t in range(len(expected))], expected, atol=1e-12)


def test_alpha_of_the_first_two_periods_of_the_paper() -> None:
    h = Hyper(alpha_max=1.0)
    assert [h.period_of(t) for t in (0, 9, 10, 29, 30)] == [
        range(10),
        range(10),
        range(10, 30),
        range(10, 30),
        range(30, 60),
    ]
    first = [h.alpha_at(t) for t in range(10)]
    assert first[0] == pytest.approx(0.0244717, abs=1e-6)
    assert first[4] == pytest.approx(0.5)
    assert first == sorted(first)
    assert h.alpha_at(10) < 0.01
    assert [h.alpha_at(t) for t in (9, 29, 59)] == [1.0, 1.0, 1.0]


@property_of
@given(schedules.filter(lambda h: h.shape in ("half", "full")))
def test_alpha_reaches_its_maximum_once_per_period(h: Hyper) -> None:
    for number in range(3):
        rounds = h.period_of(sum(h.period + n * h.period_increment for n in range(number)))
        alphas = [h.alpha_at(t) for t in rounds]
        assert max(alphas) == h.alpha_max
        assert all(0.0 <= alpha <= h.alpha_max for alpha in alphas)
        if h.alpha_max > 0.01:
            assert alphas.count(h.alpha_max) == 1


@property_of
@given(schedules.filter(lambda h: h.shape in ("half", "full") and h.alpha_max > 0.01), st.integers(1, 5))
def test_is_among_largest_selects_rounds_with_largest_alpha(h: Hyper, number: int) -> None:
    rounds = h.period_of(h.period)
    chosen = [t for t in rounds if h.is_among_largest(number, t)]
    left = [h.alpha_at(t) for t in rounds if t not in chosen]
    assert all(h.alpha_at(t) > max(left, default=-1.0) - 1e-9 for t in chosen)
    if h.shape == "half":
        assert chosen == list(rounds)[-number:]
    else:  # α may be the same on the way up and down
        assert len(chosen) == min(number, len(rounds))


def test_loss_factors_match_equation_10() -> None:
    assert loss_factors(0.3, "both") == (0.7, 0.3)
    assert loss_factors(0.3, "supervision") == (0.7, 1.0)
    assert loss_factors(0.3, "distillation") == (1.0, 0.3)
    assert loss_factors(0.3, "common") == (0.3, 0.3)


# ---- distillation --------------------------------------------------------------------------------------------


def divergence(p: Matrix, q: Matrix) -> float:
    return float(sum(p[k] * math.log(p[k] / q[k]) for k in range(len(p))))


@property_of
@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 7), st.integers(0, 2**32 - 1))
def test_distillation_loss_and_gradient_match_equation_3(models: int, batch: int, classes: int, seed: int) -> None:
    stream = np.random.default_rng(seed)
    z = stream.normal(scale=3.0, size=(models, batch, classes))
    sizes = [int(size) for size in stream.integers(1, 10**6, size=models)]
    n = int(stream.integers(models))
    student = torch.tensor(z[n], requires_grad=True)
    phi = torch.tensor(sizes, dtype=torch.float64)
    phi[n] = 0.0
    found = distillation(student, torch.from_numpy(z).log_softmax(2), phi)
    found.backward()  # type: ignore[no-untyped-call]

    p, others = softmax(z), [q for q in range(models) if q != n]
    share = {q: sizes[q] / sum(sizes[u] for u in others) for q in others}
    expected = sum(share[q] * divergence(p[q][x], p[n][x]) for q in others for x in range(batch)) / batch
    gradient = sum(share[q] * (p[n] - p[q]) for q in others) / batch
    assert float(found.detach()) == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert student.grad is not None
    np.testing.assert_allclose(student.grad.numpy(), gradient, atol=1e-6)


def test_wsl_weights_samples_less_where_the_teacher_is_less_certain() -> None:
    student, labels = torch.zeros(3, 2), torch.tensor([0, 0, 0])
    teachers = torch.tensor([[[0.0, 0.0], [2.0, 0.0], [-2.0, 0.0]], [[100.0, 0.0]] * 3]).log_softmax(2)
    equal, right, wrong = wsl_weights(student, teachers, labels)[0].tolist()
    assert equal == pytest.approx(1 - math.exp(-1))
    assert right == pytest.approx(1 - math.exp(-math.log(2) / math.log(1 + math.exp(-2))))
    assert wrong < equal < right
    assert wsl_weights(student, teachers, labels)[1].tolist() == [1.0] * 3


def test_distillation_without_teachers_is_zero() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    loss = distillation(logits, torch.randn(2, 2, 3).log_softmax(2), torch.zeros(2))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize(("form", "expected"), [("size", [15.0, 43.0, 0.0, 43.0]), ("equal", [1.0, 1.0, 0.0, 1.0])])
def test_teacher_weights_are_sizes_or_equal_and_zero_for_itself(form: Any, expected: list[float]) -> None:
    models = [model(name, seed=0) for name in ("flat", "linear", "flat", "linear")]
    assert teacher_weights(models, by_size=form == "size")[2].tolist() == expected
