"""DFML's schedule of α (arXiv 2402.01863, section 3.2): how much models learn from each other, round by round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from p2pfl.options import Options


@dataclass(frozen=True)
class AlphaSchedule(Options):
    """α as a function of the round. Every peer computes it; nothing is sent."""

    alpha_max: Annotated[float, Field(ge=0.0, le=1.0)] = 0.9
    """Largest α: 0.8 or 0.9 for IID data, ace and wsm; 1 for ce on other data (appendix A.5.1)."""
    shape: Literal["half", "full", "fixed", "falling", "linear"] = "half"
    """half: α rises to α_max within a period and drops; full: it rises and falls (Fig. 7); fixed: α_max (Fig. 9);
    falling: it falls from α_max within a period, as Eq. 4 is printed; linear: it falls from α_max to 0 in a straight
    line, ANL-KD (Fig. 26) if the period is the run."""
    period: PositiveInt = 10
    """Rounds of the first period."""
    period_increment: NonNegativeInt = 10
    """Rounds by which each period is longer than the previous one (Fig. 28)."""

    def period_of(self, t: int) -> range:
        """Return the rounds, counted from 0, of the period that contains round ``t``."""
        start, length = 0, self.period
        while t >= start + length:
            start, length = start + length, length + self.period_increment
        return range(start, start + length)

    def alpha_at(self, t: int) -> float:
        """Eq. 4: α_max/2 · (1 − cos(π τ/P)) in step τ = 1 … P of the period; this is α_max in the last step.

        The full cycle reaches α_max in the middle of the period (rounded up) and falls to 0 in the second half.
        Falling, it is α_max/2 · (1 + cos(π (τ − 1)/P)). Linear, it is α_max · (P − τ)/(P − 1).
        """
        if self.shape == "fixed":
            return self.alpha_max
        rounds = self.period_of(t)
        step, length = t - rounds.start + 1, len(rounds)
        if self.shape == "linear":
            return self.alpha_max * (length - step) / max(length - 1, 1)
        if self.shape == "falling":
            return self.alpha_max / 2 * (1 + math.cos(math.pi * (step - 1) / length))
        rise = length if self.shape == "half" else (length + 1) // 2
        if step <= rise:
            return self.alpha_max / 2 * (1 - math.cos(math.pi * step / rise))
        return self.alpha_max / 2 * (1 + math.cos(math.pi * (step - rise) / (length - rise)))

    def is_among_largest(self, count: int, t: int) -> bool:
        """Return whether α of round ``t`` is among the ``count`` largest of its period; ties go to earlier rounds."""
        ranked = sorted(self.period_of(t), key=lambda other: (-round(self.alpha_at(other), 12), other))
        return t in ranked[:count]
