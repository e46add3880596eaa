"""Krum and multi-Krum: the contributions with the nearest neighbors.

Peva Blanchard, El Mahdi El Mhamdi, Rachid Guerraoui, Julien Stainer: "Machine Learning with Adversaries: Byzantine
Tolerant Gradient Descent", NeurIPS 2017.
https://papers.nips.cc/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import PositiveInt

from p2pfl.aggregation.attackers import Expecting
from p2pfl.aggregation.rule import Contributions, aggregation
from p2pfl.aggregation.vectors import pairwise


@aggregation("krum")
@dataclass(frozen=True)
class Krum(Expecting):
    """Average the contributions with the lowest scores: the sum of squared distances to the n − f − 2 nearest others.

    Section 4. The proof needs 2f + 2 < n. Ties go to the peer's own contribution, then to the lower id.
    """

    weighted = False

    keep: PositiveInt = 1
    """Contributions to average, n − f at most; 1 is Krum, more are multi-Krum."""

    def largest(self, n: int) -> int:
        return max(0, (n - 3) // 2)

    def transform(self, given: Contributions) -> Contributions:
        given, squares = pairwise(given)
        n = len(squares)
        f = self.expected(n)
        nearest = np.sort(squares, axis=1)[:, 1 : max(1, n - f - 2) + 1]  # the first is the distance to itself
        scores = dict(zip(given.tensors, nearest.sum(1).tolist(), strict=True))
        ranked = sorted(scores, key=lambda j: (scores[j], j != given.me, j))
        return given.equally(ranked[: min(self.keep, n - f)])
