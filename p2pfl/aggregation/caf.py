"""CAF: lower the weights of contributions that stand out in the direction in which all differ most.

Youssef Allouah, Rachid Guerraoui, John Stephan: "Towards Trustworthy Federated Learning with Untrusted Participants",
ICML 2025. https://arxiv.org/abs/2505.01874
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from p2pfl.aggregation.attackers import Expecting
from p2pfl.aggregation.rule import Contributions, aggregation
from p2pfl.aggregation.vectors import centered, pairwise


@aggregation("caf")
@dataclass(frozen=True)
class CAF(Expecting):
    """Average with the weights of the covariance bound-agnostic filter, which needs no bound on honest differences.

    From c_i = 1, while Σ c_i > n − 2f, with the weighted mean μ, and the largest eigenvalue λ and its
    eigenvector v of the weighted covariance: τ_i = ((x_i − μ)·v)², c_i ← c_i (1 − τ_i / max τ). The result is the μ
    with the smallest λ.

    The eigenvector is exact, not a step of the power method: it comes from the inner products of all contributions.
    The maximum is over contributions with c_i > 0, so that each step removes one, and the filter ends.
    """

    weighted = False

    def transform(self, given: Contributions) -> Contributions:
        given, squares = pairwise(given)
        n = len(squares)
        f = self.expected(n)
        c = np.ones(n)
        best, least = c / n, math.inf
        while f > 0 and c.sum() > n - 2 * f:
            weights = c / c.sum()
            products, roots = centered(squares, weights), np.sqrt(weights)
            eigenvalues, vectors = np.linalg.eigh(roots[:, None] * products * roots)
            if eigenvalues[-1] < least:
                best, least = weights, float(eigenvalues[-1])
            tau = (products @ (roots * vectors[:, -1])) ** 2  # times λ, which cancels
            if (largest := tau[c > 0].max()) <= 0.0:
                break
            c = np.maximum(c * (1.0 - tau / largest), 0.0)
        return replace(given, weights=dict(zip(given.tensors, best.tolist(), strict=True)))
