"""The geometric median: the point with the smallest sum of distances.

Krishna Pillutla, Sham M. Kakade, Zaid Harchaoui: "Robust Aggregation for Federated Learning", IEEE Transactions on
Signal Processing 2022. https://arxiv.org/abs/1912.13445
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from p2pfl.aggregation.attackers import minority
from p2pfl.aggregation.rule import Contributions, Rule, aggregation
from p2pfl.aggregation.vectors import pairwise


@aggregation("geometric-median")
@dataclass(frozen=True)
class GeometricMedian(Rule):
    """Average with the weights of the smoothed Weiszfeld algorithm, which starts from the peer's own contribution.

    Algorithm 2: z ← Σ_j β_j x_j / Σ_j β_j with β_j = 1 / max(ν, ‖x_j − z‖). As z is a mean with known weights,
    all distances from it follow from those between contributions, and no vector is computed but the last.
    """

    weighted = False

    nu: PositiveFloat = 0.1
    """ν: contributions nearer to z than this weigh no more."""
    iterations: PositiveInt = 8
    """Steps."""

    def tolerates(self, n: int) -> int:
        return minority(n)

    def transform(self, given: Contributions) -> Contributions:
        given, squares = pairwise(given)
        ids = list(given.tensors)
        weights = np.full(len(ids), 1 / len(ids))
        if given.me in ids:
            weights = np.eye(len(ids))[ids.index(given.me)]
        for _ in range(self.iterations):
            to_each = squares @ weights
            apart = np.sqrt(np.maximum(to_each - 0.5 * (weights @ to_each), 0.0))  # ‖x_j − Σ_k w_k x_k‖
            weights = 1 / np.maximum(apart, self.nu)
            weights /= weights.sum()
        return replace(given, weights=dict(zip(ids, weights.tolist(), strict=True)))
