"""What a claim is: runs, one figure computed of them per seed, and the threshold it is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.claims.statistics import LEAST_SEEDS, Interval, Relation, Verdict, interval, verdict
from benchmarks.claims.summary import Summary

MOST_SEEDS = 10
"""A claim that is undecided after ``LEAST_SEEDS`` gets this many, and no third look."""


@dataclass(frozen=True)
class Settings:
    """A run file without its seed.

    Attributes:
        tree: the keys of the run file; the learning rate is chosen for these.
        seconds: estimate for one seed on one core, of runs that nobody has measured.
        rates: grid of learning rates, one of which is chosen on validation data; empty to keep the rate of ``tree``.
        series: the curve that says how good the run is, see ``summary``.
        best_round: the best evaluated round counts, not the mean of the last quarter.
        probe: name of an additional measurement in ``probes.PROBES``.
        changes: hyper-parameters of an ablation, at the learning rate chosen without them.
        length: other rounds and evaluations, at the learning rate chosen without them.
    """

    tree: Mapping[str, Any]
    seconds: float = field(default=0.0, compare=False)
    rates: Sequence[float] = ()
    series: str = "accuracy"
    best_round: bool = False
    probe: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    length: Mapping[str, int] = field(default_factory=dict)

    def score(self, run: Summary) -> float:
        """Return the accuracy by which the learning rate is chosen and the run is compared."""
        return run.highest(self.series) if self.best_round else run.settled(self.series)

    def with_rate(self, rate: float | None) -> dict[str, Any]:
        """The run file, with a chosen learning rate."""
        chosen = {} if rate is None else {"lr": rate}
        return {**self.tree, **self.length, "algorithm": {**self.tree["algorithm"], **chosen, **self.changes}}


@dataclass(frozen=True)
class Claim:
    """A statement of a paper that runs can decide.

    Attributes:
        name: a short sentence.
        where: the paper's table or figure: "Fig. 4", "Table 8".
        runs: {label: settings}; claims with equal settings share the runs.
        figure: from the summaries of one seed, by label, to the figure that is held against the threshold.
        unit: of the figure: "points", "%", …
        threshold: the claim says that the figure is above (or below, or equal to) it, or no farther from zero.
        whose: who chose the threshold. Zero in a comparison is the paper's: "better".
        paper: what the paper has, for the same figure. Where two of its cells have standard deviations over n trials,
            the ± of their difference is Welch's 95 % t-interval.
        scale: the size of the paper's runs: peers, rounds, training samples per peer.
        curves: what the claim's picture shows; empty for none.
        hours: what a claim at the paper's own size costs with five seeds, on a GPU and on a core; None for others.
    """

    name: str
    where: str
    runs: Mapping[str, Settings]
    figure: Callable[[Mapping[str, Summary]], float]
    paper: str
    scale: str
    unit: str = "points"
    relation: Relation = ">"
    threshold: float = 0.0
    whose: Literal["paper", "ours"] = "paper"
    curves: str = "accuracy"
    hours: tuple[int, int] | None = None

    @property
    def dear(self) -> bool:
        """Whether the claim is at the paper's own size, for a GPU."""
        return self.hours is not None

    def decisive(self, figures: Sequence[float]) -> Sequence[float]:
        """Return the figures that the verdict is of: the first five, or ten if those did not decide.

        Runs are shared, so there may be more. Looking at each number of seeds would decide too often by chance.
        """
        first = figures[:LEAST_SEEDS]
        if len(figures) < MOST_SEEDS or verdict(first, self.relation, self.threshold) != "undecided":
            return first
        return figures[:MOST_SEEDS]

    def judge(self, figures: Sequence[float]) -> Verdict:
        """Decide the claim. ``figures`` are by seed, from 0."""
        return verdict(self.decisive(figures), self.relation, self.threshold)

    def interval(self, figures: Sequence[float]) -> Interval | None:
        """Return the interval that the verdict is of."""
        return interval(self.decisive(figures))

    def seeds_wanted(self, figures: Sequence[float]) -> int:
        """Return the number of seeds that the claim should have, given the figures of those it has."""
        if self.relation == "=":
            return 1
        return MOST_SEEDS if len(figures) >= LEAST_SEEDS and self.judge(figures) == "undecided" else LEAST_SEEDS


@dataclass(frozen=True)
class Left:
    """A table or figure, or part of one, for which no run is declared.

    Attributes:
        where, name, paper: as in ``Claim``.
        reason: why: a dataset that is missing, the size, or that it is a setting or a picture, not a claim.
        cost: of all runs that would decide it at the paper's size, with five seeds.
    """

    name: str
    where: str
    paper: str
    reason: str
    cost: str = "–"


@dataclass(frozen=True, eq=False)
class Paper:
    """All claims of a paper.

    Attributes:
        key: name of its file in ``papers``, and of its page in docs/algorithms.
        contents: every table and figure of the paper: each has at least one row in the ledger.
        claims, left: the rows.
    """

    key: str
    contents: Sequence[str]
    claims: Sequence[Claim]
    left: Sequence[Left]


def difference(one: str, other: str, read: Callable[[Summary], float]) -> Callable[[Mapping[str, Summary]], float]:
    """Return the paired difference of two runs' figures."""
    return lambda runs: read(runs[one]) - read(runs[other])
