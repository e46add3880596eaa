"""Rushing attacks made of the mean and the standard deviation of the honest vectors: IPM, ALIE, min-max, min-sum."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from p2pfl.adversaries.base import adversary
from p2pfl.adversaries.rushing import Honest, Rushing, Vector
from p2pfl.messaging.schema import TensorPath


@adversary("ipm")
@dataclass(frozen=True)
class InnerProduct(Rushing):
    """Send −ε · mean of the honest vectors: the inner product of their mean and what is averaged gets negative.

    Xie, Koyejo, Gupta: "Fall of Empires: Breaking Byzantine-Tolerant SGD by Inner Product Manipulation", UAI 2019.
    https://arxiv.org/abs/1903.03936
    """

    epsilon: PositiveFloat = 0.5
    """ε."""
    of: Literal["messages", "updates"] = "messages"
    """messages: the mean of what is sent; updates: of models relative to this peer's own b before training,
    b − ε · (mean − b), as the paper's gradients are."""

    @property
    def uses_before(self) -> bool:  # type: ignore[override]
        return self.of == "updates"

    def craft(self, own: Vector, honest: Honest) -> Vector:
        def opposite(path: TensorPath) -> Tensor:
            mean, _ = honest.moments(path)
            before = honest.before.get(path, torch.zeros_like(mean))
            return before - self.epsilon * (mean - before)

        return {path: opposite(path) for path in own}


class Deviation(Rushing):
    """Base of attacks that send mean − γ · standard deviation."""

    required = ("factor",)

    @abstractmethod
    def factor(self, honest: Honest) -> float:
        """Return γ."""

    def craft(self, own: Vector, honest: Honest) -> Vector:
        gamma = self.factor(honest)
        moments = {path: honest.moments(path) for path in own}
        return {path: mean - gamma * deviation for path, (mean, deviation) in moments.items()}


@adversary("alie")
@dataclass(frozen=True)
class LittleIsEnough(Deviation):
    """Send mean − z · standard deviation of the honest vectors, which is within their spread.

    Baruch, Baruch, Goldberg: "A Little Is Enough: Circumventing Defenses For Distributed Learning", NeurIPS 2019.
    https://arxiv.org/abs/1902.06156
    """

    z: float | None = None
    """z; null: the largest with which s = ⌊n/2⌋ + 1 − f honest vectors, a majority together with the f attackers, are
    farther from the mean than this one, Φ⁻¹((n − f − s)/(n − f)), of the n vectors nearby."""

    def factor(self, honest: Honest) -> float:
        return largest_z(len(honest.vectors), honest.attackers) if self.z is None else self.z


def largest_z(honest: int, attackers: int) -> float:
    """Return Φ⁻¹((n − f − s)/(n − f)) with s = ⌊n/2⌋ + 1 − f, but at least 1, for n − f honest and f attackers.

    0 of a single honest vector, which has no deviation.
    """
    supporters = max(1, (honest + attackers) // 2 + 1 - attackers)
    return NormalDist().inv_cdf((honest - supporters) / honest) if supporters < honest else 0.0


class Distances:
    """Inner products of honest vectors x_j, each over all tensors, in float64 on the CPU.

    Attributes:
        between: ‖x_i − x_j‖², [n − f, n − f].
        from_mean: ‖x_j − mean‖², [n − f].
        along: ⟨mean − x_j, std⟩, [n − f].
        deviation: ‖std‖², [].
    """

    def __init__(self, honest: Honest) -> None:
        count = len(honest.vectors)
        self.between, self.from_mean, self.along, self.deviation = (
            torch.zeros(shape, dtype=torch.float64) for shape in ((count, count), (count,), (count,), ())
        )
        for path in next(iter(honest.vectors.values())):
            values = honest.stacked(path).reshape(count, -1).double()
            mean, deviation = (moment.flatten().double() for moment in honest.moments(path))
            self.between += torch.stack([(values - value).square().sum(1) for value in values]).cpu()
            self.from_mean += (mean - values).square().sum(1).cpu()
            self.along += ((mean - values) @ deviation).cpu()
            self.deviation += deviation.square().sum().cpu()


@adversary("min-max")
@dataclass(frozen=True)
class MinMax(Deviation):
    """Send mean − γ · std, with the largest γ that is no farther from any honest vector than two of these are apart.

    Shejwalkar, Houmansadr: "Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses for Federated
    Learning", NDSS 2021. https://doi.org/10.14722/ndss.2021.24498. They find γ by bisection; here it is the smallest
    of the roots γ_j of ‖mean − γ std − x_j‖² = max ‖x_i − x_k‖².
    """

    def factor(self, honest: Honest) -> float:
        d = Distances(honest)
        if not d.deviation:
            return 0.0
        room = (d.between.max() - d.from_mean).clamp(min=0.0)
        return float(((d.along + (d.along.square() + d.deviation * room).sqrt()) / d.deviation).min())


@adversary("min-sum")
@dataclass(frozen=True)
class MinSum(Deviation):
    """Send mean − γ · std, with the largest γ whose sum of squared distances to the honest vectors is at most theirs.

    Shejwalkar and Houmansadr, as min-max: Σ_j ‖mean − γ std − x_j‖² = max_i Σ_j ‖x_i − x_j‖², where the sum over
    mean − x_j is 0.
    """

    def factor(self, honest: Honest) -> float:
        d = Distances(honest)
        if not d.deviation:
            return 0.0
        room = max(0.0, float(d.between.sum(1).max() - d.from_mean.sum()))
        return math.sqrt(room / (len(d.along) * float(d.deviation)))
