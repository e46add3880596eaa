"""Rules that shorten what is too long, for the rule that follows, or else the mean: ARC and norm clipping."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import PositiveFloat

from p2pfl.aggregation.attackers import Expecting, minority
from p2pfl.aggregation.rule import Contributions, Rule, aggregation
from p2pfl.aggregation.vectors import center_of, clip_factor, distances, norms, replaced, scaled, toward


@aggregation("arc")
@dataclass(frozen=True)
class ARC(Expecting):
    """Clip the ⌊2f/n · (n − f)⌋ contributions of the largest norms to the next largest norm.

    Adaptive robust clipping, of Youssef Allouah, Rachid Guerraoui, Nirupam Gupta, Ahmed Jellouli, Geovani
    Rizk, John Stephan: "Adaptive Gradient Clipping for Robust Federated Learning", ICLR 2025.
    https://arxiv.org/abs/2405.14432
    """

    def transform(self, given: Contributions) -> Contributions:
        given, lengths = norms(given)
        n = len(lengths)
        f = self.expected(n)
        limit = sorted(lengths.values())[n - 1 - 2 * f * (n - f) // n]
        factors = {j: clip_factor(length, limit) for j, length in lengths.items()}
        given.taken.update(factors)
        clipped = {j: scaled(tensors, factors[j]) for j, tensors in given.tensors.items()}
        return replaced(given, clipped)


@aggregation("norm-clip")
@dataclass(frozen=True)
class NormClip(Rule):
    """Move the contributions that are far from the peer's own toward it: no farther than ``factor`` times the median.

    x_j ← x_i + (x_j − x_i) · min(1, factor · m / ‖x_j − x_i‖), m = median of ‖x_k − x_i‖ over the others k.
    """

    factor: PositiveFloat = 2.0
    """Of the median distance of the others."""

    def tolerates(self, n: int) -> int:
        return minority(n - 1)

    def transform(self, given: Contributions) -> Contributions:
        center = center_of(given)
        given, apart = distances(given, center)
        others = [length for j, length in apart.items() if j != given.me]
        limit = self.factor * float(np.median(others)) if others else 0.0
        factors = {j: clip_factor(length, limit) for j, length in apart.items()}
        given.taken.update(factors)
        clipped = {j: toward(center, x, factors[j]) for j, x in given.tensors.items()}
        return replaced(given, clipped)
