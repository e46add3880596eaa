"""Means over seeds, and paired tests with Holm's correction: pure functions of figures."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Test = Literal["t", "wilcoxon"]
"""``t``: Student's test of paired differences. ``wilcoxon``: the signed-rank test, which assumes no normal
distribution, but cannot reach p < 0.05 with fewer than 6 seeds."""


@dataclass(frozen=True)
class Statistic:
    """Mean and sample standard deviation over seeds; the latter is None of a single one."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, figures: Iterable[float | None]) -> Statistic | None:
        """Return the statistic of the figures that are neither None nor NaN; None if there are none."""
        known = [figure for figure in figures if figure is not None and not math.isnan(figure)]
        if not known:
            return None
        return cls(fmean(known), stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class VersusBaseline:
    """A group against the baseline, over the seeds that both have.

    Attributes:
        difference: mean of the group's figures minus the baseline's.
        n: number of common seeds.
        p: two-sided; None if there are too few seeds, or if the t-test has no variation to test them against.
        adjusted: ``p`` after Holm's correction for all comparisons with the baseline.
    """

    difference: float
    n: int
    p: float | None
    adjusted: float | None = None


def mean_by_seed(figures: Iterable[tuple[int, float | None]]) -> dict[int, float]:
    """Return the mean figure of each seed, from pairs; runs with the same seed are not independent samples."""
    found: dict[int, list[float]] = {}
    for seed, figure in figures:
        if figure is not None:
            found.setdefault(seed, []).append(figure)
    return {seed: fmean(values) for seed, values in found.items()}


def compare(figures: Mapping[int, float], baseline: Mapping[int, float], test: Test) -> VersusBaseline | None:
    """Compare figures with the baseline's, paired by seed; None without a common seed."""
    seeds = sorted(figures.keys() & baseline.keys())
    if not seeds:
        return None
    differences = [figures[seed] - baseline[seed] for seed in seeds]
    return VersusBaseline(fmean(differences), len(seeds), p_value(differences, test))


def p_value(differences: Sequence[float], test: Test) -> float | None:
    """Return the two-sided p-value of paired differences: are they 0 on average?

    None if there are fewer than two, or if the t-test has no variation to test them against.
    """
    if len(differences) < 2:
        return None
    if are_equal([0.0, *differences]):
        return 1.0  # the same figures in every pair; scipy returns NaN
    if test == "t" and are_equal(differences):
        return None
    from scipy import stats  # takes half a second

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of equal differences, whose standard deviation is 0 or nearly
        found = stats.wilcoxon(differences) if test == "wilcoxon" else stats.ttest_1samp(differences, 0.0)
    p = float(found.pvalue)
    return None if math.isnan(p) else p


def are_equal(figures: Sequence[float]) -> bool:
    """Return whether figures differ by no more than rounding errors of fractions."""
    return max(figures) - min(figures) <= 1e-12


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust p-values for their number (Holm 1979); None stays None and does not count.

    The smallest of k is multiplied by k, the next by k - 1, …; none may fall below a smaller one, or exceed 1.
    """
    order = sorted((p, at) for at, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, at) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        adjusted[at] = largest
    return adjusted
