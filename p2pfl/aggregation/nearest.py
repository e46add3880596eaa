"""Rules that average the nearest contributions: MoNNA those nearest to the peer's own, NNM those nearest to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from p2pfl import PeerId
from p2pfl.aggregation.attackers import Expecting
from p2pfl.aggregation.rule import Contributions, aggregation
from p2pfl.aggregation.vectors import Derived, center_of, distances, pairwise, replaced
from p2pfl.tensors import Tensors, weighted_sum


@aggregation("monna")
@dataclass(frozen=True)
class MoNNA(Expecting):
    """Average the n − f contributions nearest to the peer's own, that included.

    Sadegh Farhadkhani, Rachid Guerraoui, Nirupam Gupta, Lê-Nguyên Hoang, Rafael Pinot, John Stephan: "Robust
    Collaborative Learning with Linear Gradient Overhead", ICML 2023. https://arxiv.org/abs/2209.10931
    Ties go to the lower id.
    """

    weighted = False

    def transform(self, given: Contributions) -> Contributions:
        given, apart = distances(given, center_of(given))
        ranked = sorted(apart, key=lambda j: (apart[j], j != given.me, j))
        return given.equally(ranked[: len(ranked) - self.expected(len(ranked))])


@aggregation("nnm")
@dataclass(frozen=True)
class NNM(Expecting):
    """Replace each contribution by the mean of the n − f nearest to it, itself included, for the rule that follows.

    Nearest-neighbor mixing, Algorithm 2 of Youssef Allouah, Sadegh Farhadkhani, Rachid Guerraoui, Nirupam Gupta,
    Rafaël Pinot, John Stephan: "Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity", AISTATS
    2023. https://arxiv.org/abs/2302.01772
    Ties go to the contribution itself, then to the lower id. Alone it withstands nobody: of f far contributions that
    agree, each is replaced by a mean of all of them.
    """

    weighted = False

    def tolerates(self, n: int) -> int:
        return 0

    def transform(self, given: Contributions) -> Contributions:
        given, squares = pairwise(given)
        ids = list(given.tensors)
        count = len(ids) - self.expected(len(ids))
        np.fill_diagonal(squares, -1.0)
        nearest = np.argsort(squares, axis=1, kind="stable")[:, :count]
        mixed = {j: mean_of(given, sorted(ids[k] for k in row)) for j, row in zip(ids, nearest, strict=True)}
        return replaced(given.equally(ids), mixed)


def mean_of(given: Contributions, ids: Sequence[PeerId]) -> Tensors:
    """Return the mean of some contributions, ascending."""

    def mean(name: str) -> Tensor:
        return weighted_sum([(1 / len(ids), {name: given.tensors[j][name]}) for j in ids])[name]

    return Derived(given.tensors[ids[0]], mean)
