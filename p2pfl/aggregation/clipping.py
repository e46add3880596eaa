"""Rules that shorten what is too long, for the rule that follows, or else the mean.

ARC and static clipping were published for gradients that a server receives. Here they shorten updates: what differs
from this peer's last result. If all honest peers have the same one, as in a complete graph, it is what a server has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import PositiveFloat

from p2pfl import PeerId
from p2pfl.aggregation.attackers import Expecting, minority
from p2pfl.aggregation.rule import Contributions, Rule, aggregation
from p2pfl.aggregation.vectors import center_of, clip_factor, distances, norms, replaced, toward
from p2pfl.tensors import Tensors


@aggregation("arc")
@dataclass(frozen=True)
class ARC(Expecting):
    """Clip the ⌊2f/n · (n − f)⌋ updates of the largest norms to the next largest norm.

    Adaptive robust clipping, of Youssef Allouah, Rachid Guerraoui, Nirupam Gupta, Ahmed Jellouli, Geovani
    Rizk, John Stephan: "Adaptive Gradient Clipping for Robust Federated Learning", ICLR 2025.
    https://arxiv.org/abs/2405.14432

    An update is x_j − v, where v is the last result; x_j itself in the first round.
    """

    needs_last = True

    def transform(self, given: Contributions) -> Contributions:
        given, lengths = norms(given) if given.last is None else distances(given, given.last)
        n = len(lengths)
        f = self.expected(n)
        limit = sorted(lengths.values())[n - 1 - 2 * f * (n - f) // n]
        return _clipped(given, given.last, lengths, limit)


@aggregation("clip")
@dataclass(frozen=True)
class Clip(Rule):
    """Clip all updates to the same length: x_j ← v + (x_j − v) · min(1, radius / ‖x_j − v‖).

    v is the last result; in the first round, the peer's own contribution.
    """

    needs_last = True

    radius: PositiveFloat
    """Largest length of an update that stays. With one step of SGD, the learning rate times that of a gradient."""

    def tolerates(self, n: int) -> int:
        return minority(n)

    def transform(self, given: Contributions) -> Contributions:
        center = center_of(given) if given.last is None else given.last
        given, lengths = distances(given, center)
        return _clipped(given, center, lengths, self.radius)


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
        return _clipped(given, center, apart, limit)


def _clipped(
    given: Contributions, center: Tensors | None, lengths: Mapping[PeerId, float], limit: float
) -> Contributions:
    """Return the contributions moved toward a center, or zero, so that ``lengths``, their distances, meet a limit."""
    factors = {j: clip_factor(length, limit) for j, length in lengths.items()}
    given.taken.update(factors)
    if center is None:
        center = {name: torch.zeros_like(x) for name, x in next(iter(given.tensors.values())).items()}
    return replaced(given, toward(given.tensors, center, factors))
