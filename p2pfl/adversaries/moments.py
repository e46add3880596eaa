"""Rushing attacks made of the mean and the standard deviation of the honest vectors: IPM, ALIE, min-max, min-sum."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from p2pfl.adversaries.base import adversary
from p2pfl.adversaries.rushing import Honest, Line, Rushing, Vector
from p2pfl.messaging.schema import TensorPath

EVALUATIONS = 20
"""Of a rule, to tune an attack."""


@dataclass(frozen=True)
class Tunable(Rushing):
    """Base of attacks whose vector depends on a number, which may be tuned against the run's aggregation rule."""

    tune: bool = field(default=False, kw_only=True)
    """Choose the number that moves the run's rule farthest from the honest mean, by a line search."""

    required = ("lie", "number")

    @abstractmethod
    def lie(self, own: Vector, honest: Honest, number: float) -> Vector:
        """Return the vector to send with this number, on a line through those of 0 and 1."""

    @abstractmethod
    def number(self, honest: Honest) -> float:
        """Return the number, unless it is tuned."""

    @property
    def uses_rule(self) -> bool:  # type: ignore[override]
        return self.tune

    def craft(self, own: Vector, honest: Honest) -> Vector:
        number = self.number(honest)
        if self.tune:
            line = Line(honest, self.lie(own, honest, 0.0), self.lie(own, honest, 1.0))
            number = line_search(line.damage)
        return self.lie(own, honest, number)


def line_search(value: Callable[[float], float], step: float = 10.0, shrink: float = 0.8) -> float:
    """Return a number from 0 on with a large value: the first step doubles while the value grows, then steps shrink.

    ByzFL's search for "optimal" attacks, with its step and factor. Allouah, Farhadkhani, Guerraoui, Gupta, Pinot,
    Stephan: "Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity", AISTATS 2023.
    https://arxiv.org/abs/2302.01772
    """
    best, largest, grows = 0.0, value(0.0), True
    for _ in range(EVALUATIONS - 1):
        found = value(best + step)
        better = found > largest
        if better:
            best, largest = best + step, found
        grows = grows and better
        step *= 2.0 if grows else shrink
    return best


@adversary("ipm")
@dataclass(frozen=True)
class InnerProduct(Tunable):
    """Send −ε · mean of the honest vectors: the inner product of their mean and what is averaged gets negative.

    Xie, Koyejo, Gupta: "Fall of Empires: Breaking Byzantine-Tolerant SGD by Inner Product Manipulation", UAI 2019.
    https://arxiv.org/abs/1903.03936
    """

    epsilon: PositiveFloat = 0.5
    """ε, unless it is tuned."""
    of: Literal["messages", "updates"] = "messages"
    """messages: the mean of what is sent; updates: of models relative to this peer's own b before training,
    b − ε · (mean − b), as the paper's gradients are."""

    @property
    def uses_before(self) -> bool:  # type: ignore[override]
        return self.of == "updates"

    def number(self, honest: Honest) -> float:
        return self.epsilon

    def lie(self, own: Vector, honest: Honest, number: float) -> Vector:
        def opposite(path: TensorPath) -> Tensor:
            mean = honest.mean(path)
            before = honest.before.get(path, torch.zeros_like(mean))
            return before - number * (mean - before)

        return {path: opposite(path) for path in own}


def deviating(honest: Honest, number: float) -> Vector:
    """Return mean − number · standard deviation of the honest vectors."""
    return {path: honest.mean(path) - number * honest.deviation(path) for path in honest.paths}


@adversary("alie")
@dataclass(frozen=True)
class LittleIsEnough(Tunable):
    """Send mean − z · standard deviation of the honest vectors, which is within their spread.

    Baruch, Baruch, Goldberg: "A Little Is Enough: Circumventing Defenses For Distributed Learning", NeurIPS 2019.
    https://arxiv.org/abs/1902.06156
    """

    z: float | None = None
    """z, unless it is tuned; null: the largest with which s = ⌊n/2⌋ + 1 − f honest vectors, a majority together with
    the f attackers, are farther from the mean than this one, Φ⁻¹((n − f − s)/(n − f)), of the n vectors nearby."""

    def lie(self, own: Vector, honest: Honest, number: float) -> Vector:
        return deviating(honest, number)

    def number(self, honest: Honest) -> float:
        return largest_z(len(honest.vectors), len(honest.attackers)) if self.z is None else self.z


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
        for path in honest.paths:
            apart = (honest.stacked(path) - honest.mean(path)).reshape(count, -1).double()
            deviation = honest.deviation(path).flatten().double()
            products = (apart @ apart.T).cpu()
            squares = products.diagonal()
            self.between += (squares[:, None] + squares - 2.0 * products).clamp(min=0.0)
            self.from_mean += squares
            self.along -= (apart @ deviation).cpu()
            self.deviation += deviation.square().sum().cpu()


@adversary("min-max")
@dataclass(frozen=True)
class MinMax(Rushing):
    """Send mean − γ · std, with the largest γ that is no farther from any honest vector than two of these are apart.

    Shejwalkar, Houmansadr: "Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses for Federated
    Learning", NDSS 2021. https://doi.org/10.14722/ndss.2021.24498. They find γ by bisection; here it is the smallest
    of the roots γ_j of ‖mean − γ std − x_j‖² = max ‖x_i − x_k‖².
    """

    def craft(self, own: Vector, honest: Honest) -> Vector:
        d = Distances(honest)
        if not d.deviation:
            return deviating(honest, 0.0)
        room = (d.between.max() - d.from_mean).clamp(min=0.0)
        roots = (d.along + (d.along.square() + d.deviation * room).sqrt()) / d.deviation
        return deviating(honest, float(roots.min()))


@adversary("min-sum")
@dataclass(frozen=True)
class MinSum(Rushing):
    """Send mean − γ · std, with the largest γ whose sum of squared distances to the honest vectors is at most theirs.

    Shejwalkar and Houmansadr, as min-max: Σ_j ‖mean − γ std − x_j‖² = max_i Σ_j ‖x_i − x_j‖², where the sum over
    mean − x_j is 0.
    """

    def craft(self, own: Vector, honest: Honest) -> Vector:
        d = Distances(honest)
        if not d.deviation:
            return deviating(honest, 0.0)
        room = max(0.0, float(d.between.sum(1).max() - d.from_mean.sum()))
        return deviating(honest, math.sqrt(room / (len(d.along) * float(d.deviation))))
