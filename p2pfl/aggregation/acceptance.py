"""Rules by which a peer accepts or rejects each neighbor's model, and averages its own with the accepted ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from p2pfl import PeerId
from p2pfl.aggregation.attackers import minority
from p2pfl.aggregation.rule import Contributions, Rule, Screening, aggregation
from p2pfl.aggregation.vectors import center_of, count_sketch, distances, norms
from p2pfl.tensors import Tensors, equal

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def with_own(given: Contributions, own: Tensors, accepted: Sequence[PeerId], alpha: float) -> Contributions:
    """Return contributions whose mean is α x_i + (1 − α) mean(accepted); x_i if none is accepted."""
    weights = {given.me: 1.0}
    if accepted:
        weights = {j: (1.0 - alpha) * weight for j, weight in equal(accepted).items()} | {given.me: alpha}
    tensors = {**given.tensors, given.me: own}
    chosen = sorted(weights)
    return replace(given, tensors={j: tensors[j] for j in chosen}, weights={j: weights[j] for j in chosen})


@aggregation("balance")
@dataclass(frozen=True)
class Balance(Rule):
    """Average the neighbors' models within a distance of the peer's own, which shrinks over the rounds.

    Minghong Fang, Zifan Zhang, Hairi, Prashant Khanduri, Jia Liu, Songtao Lu, Yuchen Liu, Neil Gong:
    "Byzantine-Robust Decentralized Federated Learning", ACM CCS 2024. https://arxiv.org/abs/2406.10416

    Accept j if ‖x_i − x_j‖ ≤ γ exp(−κ t / T) ‖x_i‖; the result is α x_i + (1 − α) mean(accepted).
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
        limit = self.limit(lengths[given.me], given.t, given.rounds)
        given, apart = distances(given, own)
        accepted = [j for j in apart if j != given.me and apart[j] <= limit]
        return with_own(given, own, accepted, self.alpha)

    def limit(self, length: float, t: int, rounds: int) -> float:
        """Return the largest distance that is accepted; ``length`` is the norm of the peer's own."""
        return self.gamma * math.exp(-self.kappa * t / rounds) * length


@aggregation("sketchguard")
@dataclass(frozen=True)
class SketchGuard(Balance, Screening):
    """As balance, but Count-Sketches are sent first and tested alike: models that they reject are not sent.

    Murtaza Rangwala, Farag Azzedin, Richard O. Sinnott, Rajkumar Buyya: "SketchGuard: Scaling Byzantine-Robust
    Decentralized Federated Learning via Sketch-Based Screening", 2025. https://arxiv.org/abs/2510.07922

    Fetch x_j if ‖s_i − s_j‖ ≤ γ exp(−κ t / T) ‖s_i‖, s_j = CS(x_j).

    Differs from the paper: what was fetched passes balance's own test too. All peers know the hash functions, so an
    attacker could add any vector whose sketch is zero to its model.
    """

    size: PositiveInt = 1000
    """k: numbers in a sketch."""

    def sketch(self, tensors: Tensors, seed: int) -> Tensor:
        return count_sketch(tensors, self.size, seed)

    def accepted(self, center: Tensor, sketches: Mapping[PeerId, Tensor], t: int, rounds: int) -> list[PeerId]:
        limit = self.limit(float(center.double().norm()), t, rounds)
        return [j for j, each in sketches.items() if float((each.double() - center.double()).norm()) <= limit]


@aggregation("ubar")
@dataclass(frozen=True)
class UBAR(Rule):
    """Average the nearest neighbors' models whose loss on one of the peer's batches is at most that of its own.

    Shangwei Guo, Tianwei Zhang, Han Yu, Xiaofei Xie, Lei Ma, Tao Xiang, Yang Liu: "Byzantine-Resilient Decentralized
    Stochastic Gradient Descent", IEEE Transactions on Circuits and Systems for Video Technology 2022.
    https://arxiv.org/abs/2002.08569

    Of the ρ|N| nearest, if none has such a loss, the one with the smallest loss is accepted. The result is
    α x_i + (1 − α) mean(accepted). Ties go to the lower id.
    """

    weighted = False
    needs_loss = True

    rho: Fraction = 0.4
    """ρ: fraction of the neighbors that are tested, the nearest ones; at least one is."""
    alpha: Fraction = 0.5
    """α: weight of the peer's own."""

    def tolerates(self, n: int) -> int:
        return min(minority(n), n - 1 - self._tested(n - 1))

    def _tested(self, neighbors: int) -> int:
        return min(neighbors, max(1, math.floor(self.rho * neighbors + 1e-9)))  # 0.29 * 100 is 28.999…

    def transform(self, given: Contributions) -> Contributions:
        loss = given.loss
        assert loss is not None  # or the run file is refused
        own = center_of(given)
        given, apart = distances(given, own)
        others = sorted((length, j) for j, length in apart.items() if j != given.me)
        losses = {j: loss(given.tensors[j]) for _, j in others[: self._tested(len(others))]}
        limit = loss(own)
        accepted = [j for j, each in losses.items() if each <= limit]
        accepted = accepted or sorted(losses, key=lambda j: (math.isnan(losses[j]), losses[j], j))[:1]
        return with_own(given, own, accepted, self.alpha)
