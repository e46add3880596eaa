"""Means and what else describes a figure over the peers of a run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev

from launcher import formatting
from p2pfl import PeerId


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over peers, and the means over the worst tenth and fifth."""

    mean: float
    std: float
    worst_tenth: float
    worst_fifth: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread of all values that are neither None nor NaN; None if there are none."""
        known = sorted(value for value in values if value is not None and not math.isnan(value))
        if not known:
            return None
        tenth, fifth = (fmean(known[: math.ceil(len(known) / part)]) for part in (10, 5))
        return cls(fmean(known), pstdev(known), tenth, fifth)

    def __str__(self) -> str:
        mean, std, tenth, fifth = (
            formatting.percent(value) for value in (self.mean, self.std, self.worst_tenth, self.worst_fifth)
        )
        return f"{mean} ± {std} %, worst tenth {tenth} %, worst fifth {fifth} %"


@dataclass(frozen=True)
class MetricSpread:
    """Mean, standard deviation and range of a metric over peers; whether lower is better, only its author knows."""

    mean: float
    std: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.std:.4f}, lowest {self.lowest:.4f}, highest {self.highest:.4f}"


def spreads(by_peer: Iterable[Mapping[str, float]]) -> dict[str, Spread]:
    """Return the spread of each name's values over the peers that have one."""
    values: dict[str, list[float]] = defaultdict(list)
    for named in by_peer:
        for name, value in named.items():
            values[name].append(value)
    found = {name: Spread.of(values[name]) for name in sorted(values)}
    return {name: spread for name, spread in found.items() if spread is not None}


def metric_spreads(by_peer: Iterable[Mapping[str, float | None]]) -> dict[str, MetricSpread]:
    """Return the spread of each metric over the peers that have one that is finite."""
    values: dict[str, list[float]] = defaultdict(list)
    for named in by_peer:
        for name, value in named.items():
            if value is not None and math.isfinite(value):
                values[name].append(value)
    return {name: MetricSpread(fmean(v), pstdev(v), min(v), max(v)) for name, v in sorted(values.items())}


def nonfinite_metrics(by_peer: Mapping[PeerId, Mapping[str, float | None]]) -> dict[str, list[PeerId]]:
    """Return the peers where each metric is NaN or infinite, of those metrics that are so anywhere."""
    found: dict[str, list[PeerId]] = defaultdict(list)
    for peer, named in by_peer.items():
        for name, value in named.items():
            if value is None or not math.isfinite(value):
                found[name].append(peer)
    return dict(sorted(found.items()))
