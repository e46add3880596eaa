"""Compare several runs: group them by what differs between their run files, and test the groups pairwise."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

from launcher.comparison import curves
from launcher.comparison.groups import ComparedRun, RunGroup, common_mask, group
from launcher.comparison.statistics import Statistic, are_equal, holm, mean_by_seed, p_value
from launcher.comparison.test_sets import alike
from launcher.facts.sweep_folder import SweepRun
from launcher.report import history
from launcher.report.history import History
from p2pfl.run_folder import records
from p2pfl.run_folder.folder import RunFolder


@dataclass(frozen=True)
class PairedTest:
    """A paired comparison of two groups: of the means by seed, or with a single common seed of the peers, if these
    have the same samples.

    Attributes:
        unit: ``seeds`` or ``peers``.
        difference: mean of the differences, first minus second; ``low`` and ``high`` are its 95 % interval.
        t: p-value of the paired t-test; ``corrected``: after Holm's correction over all pairs.
        wilcoxon: p-value of Wilcoxon's signed-rank test.
    """

    first: str
    second: str
    unit: str
    pairs: int
    difference: float
    low: float | None = None
    high: float | None = None
    t: float | None = None
    wilcoxon: float | None = None
    corrected: float | None = None


def read(runs: Sequence[tuple[RunFolder, SweepRun | None]]) -> list[RunGroup]:
    """Read runs, each with its point in a sweep, and group them as `p2pfl compare` does.

    Raises:
        RunFolderError: a run is damaged.
        CompareError: their accuracies differ in meaning.
    """
    members = [ComparedRun.of(folder, point) for folder, point in runs]
    return group(members, common_mask(members, "report them separately"))


def histories(of: RunGroup) -> list[History]:
    """Return the records of the runs whose curves count.

    Runs of which no peer has finished are left out, unless there are no others.
    """
    read = (history.read(records.read(run.folder), run.summary.attacks) for run in of.counted or of.members)
    return [found for found in read if of.counted or history.means(found)]


def curve(title: str, runs: Sequence[History]) -> list[dict[str, Any]]:
    """Return the mean accuracy over peers and runs by round, with the deviation over runs (sample, n - 1)."""
    by_round: dict[float, list[dict[str, float]]] = {}
    for run in runs:
        for row in history.means(run):
            by_round.setdefault(row["t"], []).append(row)
    return [
        {"name": title, "t": t, "bytes": fmean(row["bytes"] for row in found)}
        | _over_runs([row["mean"] for row in found])
        for t, found in sorted(by_round.items())
        if len(found) == len(runs)
    ]


def curve_over_time(title: str, runs: Sequence[History]) -> list[dict[str, Any]]:
    """Return the mean accuracy over peers and runs by seconds, from the moment on at which each run has one."""
    curves = [
        ([row["seconds"] for row in rows], [row["mean"] for row in rows])
        for rows in map(history.means_over_time, runs)
    ]
    if not all(moments for moments, _ in curves):
        return []
    begin = max((moments[0] for moments, _ in curves), default=0.0)
    moments = sorted({moment for of_run, _ in curves for moment in of_run if moment >= begin})
    kept = history.thinned(range(len(moments)), history.MAX_MOMENTS)
    return [
        {"name": title, "seconds": at} | _over_runs([means[bisect_right(of_run, at) - 1] for of_run, means in curves])
        for at in (moments[k] for k in kept)
    ]


def _over_runs(means: Sequence[float]) -> dict[str, float]:
    """Return the mean over runs, with their deviation (sample, n - 1)."""
    mean, std = fmean(means), stdev(means) if len(means) > 1 else 0.0
    return {"mean": mean, "std": std, "low": mean - std, "high": mean + std, "seeds": len(means)}


def seconds_to(of: RunGroup, target: float) -> Statistic | None:
    """Return after how many seconds the accuracy reached ``target``, over the seeds of the runs that have."""
    found = (
        (member.seed, curves.seconds_to(curves.curves(member.folder, member.summary.masked_test).times, target))
        for member in of.counted
    )
    return Statistic.of(mean_by_seed(found).values())


def tests(groups: Sequence[RunGroup]) -> list[PairedTest]:
    """Compare all pairs of groups that have one test set, with p-values of the t-test corrected over them (Holm)."""
    found = [_test(a, b) for a, b in combinations(groups, 2) if a.test_set == b.test_set]
    corrected = holm([test.t for test in found])
    return [replace(test, corrected=p) for test, p in zip(found, corrected, strict=True)]


def _same_peers(a: RunGroup, b: RunGroup) -> bool:
    """Whether peer i of one group has the samples of peer i of the other, given the one seed that both have."""
    common = a.by_seed().keys() & b.by_seed().keys()
    tested = [member.tested for member in (*a.members, *b.members) if member.seed in common]
    return all(alike(tested[0], each) for each in tested)


def _by_peer(of: RunGroup) -> dict[tuple[int, int], float]:
    """Return the final accuracy by seed and honest peer."""
    return {
        (member.seed, peer.peer): peer.accuracy
        for member in of.counted
        for peer in member.summary.honest
        if peer.accuracy is not None
    }


def _test(a: RunGroup, b: RunGroup) -> PairedTest:
    left: Mapping[Any, float] = a.by_seed()
    right: Mapping[Any, float] = b.by_seed()
    unit = "seeds"
    if len(left.keys() & right.keys()) == 1 and _same_peers(a, b):
        left, right, unit = _by_peer(a), _by_peer(b), "peers"
    pairs = sorted(left.keys() & right.keys())
    values = [left[pair] - right[pair] for pair in pairs]
    mean = fmean(values) if values else math.nan
    if len(values) < 2:
        return PairedTest(a.title, b.title, unit, len(values), mean)
    p_values = p_value(values, "t"), p_value(values, "wilcoxon")
    if are_equal(values):  # no variation to test a difference against
        return PairedTest(a.title, b.title, unit, len(values), mean, mean, mean, *p_values)
    from scipy import stats

    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return PairedTest(a.title, b.title, unit, len(values), mean, float(low), float(high), *p_values)
