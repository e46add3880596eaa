"""Intervals and verdicts: pure functions of the figures of several seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from scipy.stats import t as student

CONFIDENCE = 0.95
LEAST_SEEDS = 5
"""Fewer seeds decide nothing, unless the claim is exact."""

Verdict = Literal["reproduced", "refuted", "undecided", "not tried"]
Relation = Literal[">", "<", "=", "≈"]


@dataclass(frozen=True)
class Interval:
    """A two-sided 95 % t-interval of a mean.

    Attributes:
        mean: mean of the figures.
        half: half of the interval's width; infinite for a single figure.
        n: number of figures.
    """

    mean: float
    half: float
    n: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def interval(figures: Sequence[float]) -> Interval | None:
    """Return the interval of the figures' mean, or None without figures."""
    n = len(figures)
    if not n:
        return None
    if n == 1:
        return Interval(figures[0], math.inf, 1)
    quantile = float(student.ppf((1.0 + CONFIDENCE) / 2.0, n - 1))
    return Interval(fmean(figures), quantile * stdev(figures) / math.sqrt(n), n)


def verdict(figures: Sequence[float], relation: Relation, threshold: float) -> Verdict:
    """Decide whether the mean of the figures is above or below a threshold.

    Args:
        figures: one per seed; for a comparison the paired difference.
        relation: ``>`` or ``<``: the interval must lie on that side of the threshold, and on the other side refutes
            the claim. ``=``: exact, decided by equality in every seed, so that one seed is enough. ``≈``: the whole
            interval must lie within ± the threshold, and wholly outside refutes the claim.
        threshold: what the figures are compared with.
    """
    if not all(map(math.isfinite, figures)):
        raise ValueError(f"figures must be numbers, got {list(figures)}")
    found = interval(figures)
    if found is None:
        return "not tried"
    if relation == "=":
        return "reproduced" if all(figure == threshold for figure in figures) else "refuted"
    if found.n < LEAST_SEEDS:
        return "undecided"
    if relation == "≈":
        if -threshold < found.low and found.high < threshold:
            return "reproduced"
        return "refuted" if found.low > threshold or found.high < -threshold else "undecided"
    if found.low > threshold:
        return "reproduced" if relation == ">" else "refuted"
    if found.high < threshold:
        return "reproduced" if relation == "<" else "refuted"
    return "undecided"
