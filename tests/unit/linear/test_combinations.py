"""Distances are exact where vectors nearly cancel out; combinations are what they stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from p2pfl.linear.combinations import Combinations, Span, derive, span_of, terms_of
from p2pfl.linear.sums import squared_distances
from p2pfl.tensors import Tensors, weighted_sum


def models(n: int, *, dtype: torch.dtype = torch.float32, spread: float = 1e-3) -> list[dict[str, Tensor]]:
    stream = torch.Generator().manual_seed(n)
    start = torch.randn(40, generator=stream, dtype=torch.float64)
    drawn = [start + spread * torch.randn(40, generator=stream, dtype=torch.float64) for _ in range(n)]
    return [{"w": x[:36].view(4, 9).to(dtype), "b": x[36:39].to(dtype), "s": x[39].to(dtype)} for x in drawn]


def exact(one: Tensors, other: Tensors) -> float:
    pairs = [(x, y) for name in one for x, y in zip(one[name].flatten(), other[name].flatten(), strict=True)]
    return float(sum((Fraction(float(x)) - Fraction(float(y))) ** 2 for x, y in pairs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("huge", [0, 3, None])
def test_distances_of_near_ones_are_exact_beside_a_huge_one(dtype: torch.dtype, huge: int | None) -> None:
    given = models(6, dtype=dtype, spread=1e-6)
    given[5] = {name: x.clone() for name, x in given[4].items()}
    if huge is not None:
        given[huge] = {name: 9e5 + x for name, x in given[huge].items()}
    found, broken = squared_distances(given)
    assert not any(broken)
    expected = [[exact(x, y) for y in given] for x in given]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=0)
    assert found[4, 5] == 0.0


def test_distances_of_float64_beyond_its_squares_are_infinite() -> None:
    given = models(3, dtype=torch.float64)
    given[0]["b"] += 1e200
    found, broken = squared_distances(given)
    assert not any(broken)
    assert found[0].tolist() == [0.0, math.inf, math.inf]
    assert found[1, 2] == pytest.approx(exact(given[1], given[2]))


def test_vectors_without_entries_are_equal() -> None:
    found, broken = squared_distances([{}, {"n": torch.tensor(3)}])
    assert (found.tolist(), broken) == ([[0.0, 0.0], [0.0, 0.0]], [False, False])


WEIGHTS = np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5]])


def explicit(span: Span, weights: Any) -> dict[str, Tensor]:
    center = span.models[0] if span.center is None else span.center
    return {
        name: c.double() + sum(w * (x[name].double() - c.double()) for w, x in zip(weights, span.models, strict=True))
        for name, c in center.items()
    }


@pytest.mark.parametrize("factor", [1.0, 0.25, -3.0])
def test_combinations_and_their_distances_are_those_of_the_vectors(factor: float) -> None:
    given = models(4)
    span = Span(given[:3], given[3] if factor != 1.0 else None)
    found = derive(dict(enumerate([*given[:3], given[2]])), span, factor * WEIGHTS)
    expected = [explicit(span, factor * row) for row in WEIGHTS]
    for j, tensors in found.items():
        for name, x in tensors.items():
            torch.testing.assert_close(x.double(), expected[j][name], rtol=1e-6, atol=1e-6)
    distances = [[exact(x, y) for y in expected] for x in expected]
    np.testing.assert_allclose(span.squares(factor * WEIGHTS), distances, rtol=1e-6, atol=1e-18)


def test_what_is_combined_again_keeps_to_what_was_received() -> None:
    given = models(4)
    span = Span(given[:3], given[3])
    tensors = derive(dict(enumerate(given[:3])), span, 0.5 * np.eye(3))
    assert span_of([*tensors.values(), given[0]]) is None
    assert span_of(list(tensors.values())) is not None
    terms = terms_of([(1 / 3, x) for x in tensors.values()])
    assert [x for _, x in terms] == [*given[:3], given[3]]
    assert [w for w, _ in terms] == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    summed = weighted_sum(terms)
    for name, x in weighted_sum([(1 / 3, x) for x in tensors.values()]).items():
        torch.testing.assert_close(summed[name], x)


def test_tensors_are_computed_once_for_all_and_one_of_each_is_kept() -> None:
    reading: list[str] = []

    class Counted(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            reading.append(name)
            return super().__getitem__(name)

    given: Mapping[int, Tensors] = {j: Counted(x) for j, x in enumerate(models(3))}
    found = derive(given, Span(list(given.values())), np.full((3, 3), 1 / 3))
    for name in ("w", "b"):
        reading.clear()
        for tensors in found.values():
            tensors[name]
        assert set(reading) == {name}
        assert len(reading) <= 4  # that of the first once more, for its type


def test_integers_stay_and_masks_stay_infinite() -> None:
    mask = torch.tensor([0.0, -math.inf])
    given = {j: {"n": torch.tensor(j), "m": mask + torch.tensor([float(j), 0.0])} for j in range(3)}
    weights = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])
    found = derive(given, Span(list(given.values())), weights)
    assert [int(x["n"]) for x in found.values()] == [0, 1, 2]
    assert [x["m"].tolist() for x in found.values()] == [[0.5, -math.inf], [1.5, -math.inf], [1.0, -math.inf]]
    assert [x for _, x in terms_of([(1.0, found[0])])] == [found[0]]


def test_equal_entries_stay_equal_to_the_bit_around_a_center() -> None:
    given = models(3)
    span = Span(given, given[0])
    rows = Combinations(span, np.array([[0.0, 0.0, 0.3]])).rows("w")
    assert rows is not None
    span.models = [{**x, "w": given[0]["w"]} for x in given]
    rows = Combinations(span, np.array([[0.1, 0.2, 0.3]])).rows("w")
    assert rows is not None
    assert torch.equal(rows[0], given[0]["w"])
