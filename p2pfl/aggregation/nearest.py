"""Rules that average the nearest contributions: MoNNA those nearest to the peer's own, NNM those nearest to each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from p2pfl.aggregation.attackers import Expecting
from p2pfl.aggregation.rule import Contributions, aggregation
from p2pfl.aggregation.vectors import center_of, distances, mixed, pairwise, replaced


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
        nearest = np.argsort(squares - np.eye(len(ids)), axis=1, kind="stable")[:, :count]
        weights = np.zeros_like(squares)
        np.put_along_axis(weights, nearest, 1 / count, axis=1)
        return replaced(given.equally(ids), mixed(given.tensors, weights, squares))
