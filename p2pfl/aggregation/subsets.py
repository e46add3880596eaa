"""Rules that average the tightest n − f contributions: MDA by diameter, SMEA by the largest eigenvalue.

Both look at all C(n, f) subsets, so they are refused for more than ``MOST_SUBSETS``. Ties go to the first subset in
the lexicographic order of the ids.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pfl.aggregation.attackers import Expecting
from p2pfl.aggregation.rule import Contributions, aggregation
from p2pfl.aggregation.vectors import centered, pairwise
from p2pfl.linear.sums import Floats

MOST_SUBSETS = 10_000
"""Subsets that a rule looks at."""

AT_ONCE = 1 << 18
"""Numbers in the matrices of the subsets that are looked at together."""


class TightestSubset(Expecting):
    """Base of MDA and SMEA."""

    weighted = False

    @abstractmethod
    def extent(self, squares: Floats) -> Floats:
        """Return how far the contributions of each subset are apart, float64 [m].

        Args:
            squares: their squared distances, float64 [m, k, k].
        """

    def refusal(self, n: int) -> str | None:
        f = self.expected(n)
        if (subsets := math.comb(n, f)) <= MOST_SUBSETS:
            return super().refusal(n)
        return (
            f"looks at C({n}, {f}) = {subsets:,} subsets of {n} contributions, {f} attackers among them; "
            f"{MOST_SUBSETS:,} is the most: lower f, remove edges, or choose another rule, e.g. caf"
        )

    def transform(self, given: Contributions) -> Contributions:
        given, squares = pairwise(given)
        ids = list(given.tensors)
        size = len(ids) - self.expected(len(ids))
        subsets = combinations(range(len(ids)), size)
        best, least = tuple(range(size)), math.inf
        while some := list(islice(subsets, max(1, AT_ONCE // size**2))):
            rows = np.array(some)
            extents = self.extent(squares[rows[:, :, None], rows[:, None, :]])
            if extents.min() < least:
                best, least = some[int(extents.argmin())], float(extents.min())
        return given.equally([ids[row] for row in best])


@aggregation("mda")
@dataclass(frozen=True)
class MDA(TightestSubset):
    """Average the n − f contributions with the smallest diameter.

    Minimum diameter averaging, of El Mahdi El Mhamdi, Rachid Guerraoui, Arsany Guirguis, Lê Nguyên Hoang,
    Sébastien Rouault: "Genuinely Distributed Byzantine Machine Learning", PODC 2020. https://arxiv.org/abs/1905.03853
    """

    def extent(self, squares: Floats) -> Floats:
        diameters: Floats = squares.max((1, 2))
        return diameters


@aggregation("smea")
@dataclass(frozen=True)
class SMEA(TightestSubset):
    """Average the n − f contributions whose covariance has the smallest largest eigenvalue.

    Smallest maximum eigenvalue averaging, of Youssef Allouah, Rachid Guerraoui, Nirupam Gupta, Rafaël
    Pinot, John Stephan: "On the Privacy-Robustness-Utility Trilemma in Distributed Learning", ICML 2023.
    https://arxiv.org/abs/2302.04787
    """

    def extent(self, squares: Floats) -> Floats:
        weights = np.full(squares.shape[1], 1 / squares.shape[1])
        eigenvalues: NDArray[Any] = np.linalg.eigvalsh(centered(squares, weights))
        return eigenvalues[:, -1]
