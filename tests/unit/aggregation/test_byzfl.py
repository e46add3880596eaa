"""Rules give what the library ByzFL gives on the same vectors, up to rounding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from p2pfl.aggregation import AGGREGATIONS, Contributions, RuleList
from p2pfl.aggregation.rule import Rule
from p2pfl.tensors import equal

byzfl = pytest.importorskip("byzfl")

Vectors = NDArray[np.float64]

SIZES = [(4, 1), (5, 1), (7, 2), (10, 2), (11, 3), (13, 4)]
"""n, f."""


def vectors(n: int, f: int) -> Vectors:
    """Return n vectors, [n, 30], the last f of which differ more than the others."""
    stream = np.random.default_rng(n)
    drawn = stream.normal(size=(n, 30))
    drawn[n - f :] += 2.0 * stream.normal(size=30)
    return drawn


def combined(rule: Rule, x: Vectors, *, state: dict[str, Any] | None = None, dtype: Any = torch.float64) -> Vectors:
    """Combine the rows of ``x``, cut into three tensors; the first is the peer's own."""
    rows = [torch.tensor(row, dtype=dtype) for row in x]
    tensors = {j: {"a": row[:12].view(3, 4), "b": row[12], "c": row[13:]} for j, row in enumerate(rows)}
    given = Contributions(tensors, equal(tensors), 0, tensors[0], "Model", 0, 10, {} if state is None else state)
    found = rule.combine(rule.transform(given))
    joined: Vectors = torch.cat([found[name].reshape(-1) for name in ("a", "b", "c")]).double().numpy()
    return joined


def rule(name: str, **parameters: Any) -> Rule:
    return AGGREGATIONS[name].parse(parameters)


@pytest.fixture
def exact_eigenvectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ByzFL's single step of the power method, whose start is random, at the eigenvector itself."""

    def dominant(dimension: int) -> Vectors:
        caller = sys._getframe(1).f_locals
        diffs = caller["diffs"]
        weights = caller.get("c", np.ones(len(diffs)))
        eigenvectors: Vectors = np.linalg.eigh((weights[:, None] * diffs).T @ diffs)[1]
        return eigenvectors[:, -1]

    monkeypatch.setattr(np.random, "randn", dominant)


ORACLES: dict[str, Callable[[int], Any]] = {
    "median": lambda f: byzfl.Median(),
    "trimmed-mean": lambda f: byzfl.TrMean(f),
    "monna": lambda f: byzfl.MoNNA(f, idx=0),
    "mda": lambda f: byzfl.MDA(f),
    "smea": lambda f: byzfl.SMEA(f),
    "caf": lambda f: byzfl.CAF(f),
}


CASES = [(name, n, f) for name in ORACLES for n, f in SIZES]
CASES.remove(("caf", 11, 3))
"""There, ByzFL scales by the farthest of all contributions, a removed one, and this rule by the farthest one left."""


@pytest.mark.usefixtures("exact_eigenvectors")
@pytest.mark.parametrize(("name", "n", "f"), CASES)
@pytest.mark.parametrize(("dtype", "precision"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_rule_agrees(name: str, n: int, f: int, dtype: torch.dtype, precision: float) -> None:
    x = vectors(n, f)
    expected = ORACLES[name](f)(x.copy())
    found = combined(rule(name) if name == "median" else rule(name, f=f), x, dtype=dtype)
    np.testing.assert_allclose(found, expected, rtol=0, atol=precision)


@pytest.mark.parametrize(("n", "f"), [(n, f) for n, f in SIZES if n >= 2 * f + 3])
def test_krum_agrees_with_one_attacker_more(n: int, f: int) -> None:
    """ByzFL adds up the distances to n − f − 1 others, the paper and this rule those to n − f − 2."""
    x = vectors(n, f)
    np.testing.assert_array_equal(combined(rule("krum", f=f), x), byzfl.Krum(f + 1)(x))
    if 2 * (f + 1) < n:
        kept = combined(rule("krum", f=f, keep=n - f - 1), x)
        np.testing.assert_allclose(kept, byzfl.MultiKrum(f + 1)(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("n", "f"), SIZES)
@pytest.mark.parametrize("nu", [0.1, 5.0])
def test_geometric_median_agrees_from_the_same_start(n: int, f: int, nu: float) -> None:
    """ByzFL starts from 0, this rule from the peer's own vector: that is moved to 0."""
    x = vectors(n, f)
    start = x[0].copy()
    found = combined(rule("geometric-median", nu=nu, iterations=3), x)
    expected = start + byzfl.GeometricMedian(nu=nu, T=3)(x - start)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)  # the start is as far from itself as rounding says


@pytest.mark.parametrize("iterations", [1, 3])
def test_centered_clipping_agrees_over_rounds(iterations: int) -> None:
    """Both keep their center; ByzFL's is 0 at first, this rule's the peer's own vector."""
    x = vectors(7, 2)
    x[0] = 0.0
    state: dict[str, Any] = {}
    oracle = byzfl.CenteredClipping(L=iterations, tau=4.0)
    clipping = rule("centered-clipping", radius=4.0, iterations=iterations)
    for n in range(3):
        moved = x + n
        with np.errstate(divide="ignore"):  # ByzFL divides by the distance of the own vector, 0
            expected = oracle(moved)
        np.testing.assert_allclose(combined(clipping, moved, state=state), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("n", "f"), SIZES)
@pytest.mark.parametrize("first", ["nnm", "arc"])
@pytest.mark.parametrize("last", ["median", "trimmed-mean", "geometric-median"])
def test_preparations_agree(first: str, last: str, n: int, f: int) -> None:
    x = vectors(n, f)
    prepared = (byzfl.NNM(f) if first == "nnm" else byzfl.ARC(f))(x.copy())
    parameters = {"f": f} if last == "trimmed-mean" else {}
    found = combined(RuleList.parse({"rules": [{"name": first, "f": f}, {"name": last, **parameters}]}), x)
    np.testing.assert_allclose(found, combined(rule(last, **parameters), prepared), rtol=0, atol=1e-7)
