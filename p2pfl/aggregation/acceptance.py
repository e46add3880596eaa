"""BALANCE: accept the models that are similar to the peer's own.

Minghong Fang, Zifan Zhang, Hairi, Prashant Khanduri, Jia Liu, Songtao Lu, Yuchen Liu, Neil Gong: "Byzantine-Robust
Decentralized Federated Learning", ACM CCS 2024. https://arxiv.org/abs/2406.10416
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from p2pfl.aggregation.attackers import minority
from p2pfl.aggregation.rule import Contributions, Rule, aggregation
from p2pfl.aggregation.vectors import center_of, distances, norms
from p2pfl.tensors import Tensors, equal

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def with_own(given: Contributions, own: Tensors, accepted: list[int], alpha: float) -> Contributions:
    """Return contributions whose mean is α x_i + (1 − α) mean(accepted); x_i if nothing is accepted."""
    weights = {given.me: 1.0}
    if accepted:
        weights = {j: (1.0 - alpha) * share for j, share in equal(accepted).items()} | {given.me: alpha}
    tensors = {**given.tensors, given.me: own}
    return replace(given, tensors={j: tensors[j] for j in sorted(weights)}, weights=weights)


@aggregation("balance")
@dataclass(frozen=True)
class Balance(Rule):
    """Average the neighbors' models within a distance of the peer's own, which shrinks over the rounds.

    Eq. 4: accept j if ‖x_i − x_j‖ ≤ γ exp(−κ t / T) ‖x_i‖; Eq. 5: α x_i + (1 − α) mean(accepted).
    """

    weighted = False

    gamma: PositiveFloat = 0.3
    """γ: the distance in round 0, as a fraction of the norm of the peer's own."""
    kappa: NonNegativeFloat = 1.0
    """κ: how fast the distance shrinks."""
    alpha: Fraction = 0.5
    """α: weight of the peer's own."""

    def tolerates(self, n: int) -> int:
        return minority(n)

    def transform(self, given: Contributions) -> Contributions:
        own = center_of(given)
        _, lengths = norms(replace(given, tensors={given.me: own}))
        limit = self.gamma * math.exp(-self.kappa * given.t / given.rounds) * lengths[given.me]
        given, apart = distances(given, own)
        accepted = [j for j in apart if j != given.me and apart[j] <= limit]
        return with_own(given, own, accepted, self.alpha)
