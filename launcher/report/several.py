"""Compare several runs: group them by what differs between their run files, and test the groups pairwise."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

from launcher.comparison import groups as grouping
from launcher.comparison.statistics import are_equal, holm, mean_by_seed, p_value
from launcher.comparison.test_sets import alike
from launcher.errors import CompareError
from launcher.facts.summary import Summary, settings
from launcher.facts.sweep_folder import Point
from launcher.formatting.flat import flatten
from launcher.report import history
from launcher.report.collect import read_summary
from p2pfl.errors import RunFolderError
from p2pfl.run_folder.folder import RunFolder

UNKNOWN = "(none)"


@dataclass(frozen=True)
class Member:
    """One run of the comparison."""

    folder: RunFolder
    summary: Summary
    settings: dict[str, Any]
    curve: list[dict[str, Any]]
    compared: grouping.Member

    @property
    def counts(self) -> bool:
        """Whether it is in results and tests: at least one peer has finished, as for `p2pfl compare`."""
        return any(peer.ended == "finished" for peer in self.summary.peers)


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed.

    Attributes:
        name: what sets them apart from the other groups.
        keys: the dotted keys, or ends of them, in its name.
        test_set: as in launcher.comparison.groups.Group.
    """

    name: str
    members: list[Member]
    keys: tuple[str, ...] = ()
    test_set: str = "A"

    @property
    def counted(self) -> list[Member]:
        return [member for member in self.members if member.counts]

    def accuracy(self, member: Member) -> float | None:
        return member.summary.accuracy.mean if member.summary.accuracy else None

    def by_seed(self) -> dict[int, float]:
        """The final mean accuracy by seed: the mean of the runs that share a seed."""
        found = mean_by_seed((member.summary.seed, self.accuracy(member)) for member in self.counted)
        return dict(sorted(found.items()))

    def by_peer(self) -> dict[tuple[int, int], float]:
        """The final accuracy by seed and peer."""
        return {
            (member.summary.seed, peer.peer): peer.accuracy
            for member in self.counted
            for peer in member.summary.peers
            if peer.accuracy is not None
        }


@dataclass(frozen=True)
class Test:
    """A paired comparison of two groups: of the means by seed, or with a single common seed of the peers, if these
    have the same samples.

    Attributes:
        unit: ``seeds`` or ``peers``.
        difference: mean of the differences, first minus second; ``low`` and ``high`` are its 95 % interval.
        t: p-value of the paired t-test; ``corrected`` is that after Holm's correction over all pairs.
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


def read(runs: Sequence[tuple[RunFolder, Point | None]]) -> list[Member]:
    """Read runs, each with its point in a sweep.

    Raises:
        RunFolderError: a run is damaged.
        CompareError: their accuracies differ in meaning.
    """
    from p2pfl.api import open_run

    members = []
    for folder, point in runs:
        try:
            summary = read_summary(folder)
            plain = settings(folder)
            compared = grouping.Member.of(folder, point)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{folder.root}: damaged: {type(error).__name__}: {error}") from None
        curve = history.means(history.read(open_run(folder.root).records()))
        members.append(Member(folder, summary, plain, curve, compared))
    if len({member.summary.masked_test for member in members}) > 1:
        values = "; ".join(f"{m.summary.run}: {json.dumps(m.summary.masked_test)}" for m in members)
        raise CompareError(
            f"runs differ in masked_test ({values}), so their accuracies differ in meaning; report them separately"
        )
    return members


def differences(members: Sequence[Member]) -> dict[str, list[Any]]:
    """Return the dotted keys in which the run files differ, with the value of each run."""
    flat = [dict(flatten(member.settings)) for member in members]
    keys = dict.fromkeys(key for run in flat for key in run)
    found = {key: [run.get(key, UNKNOWN) for run in flat] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def group(members: Sequence[Member]) -> list[Group]:
    """Group the runs as `p2pfl compare` does."""
    of = {id(member.compared): member for member in members}
    masked = any(member.summary.masked_test for member in members)
    return [
        Group(
            (part.name if part.labels else of[id(part.members[0])].summary.algorithm)
            + (f" (test set {part.test_set})" if grouping.TEST_SET in part.labels else ""),
            [of[id(member)] for member in part.members],
            tuple(part.labels),
            part.test_set,
        )
        for part in grouping.group([member.compared for member in members], masked)
    ]


def curve(of: Group) -> list[dict[str, Any]]:
    """Return the mean accuracy over peers and runs by round, with the deviation over runs (sample, n - 1).

    Runs of which no peer has finished are left out, unless there are no others.
    """
    by_round: dict[int, list[dict[str, Any]]] = {}
    members = of.counted or [member for member in of.members if member.curve]
    for member in members:
        for row in member.curve:
            by_round.setdefault(row["t"], []).append(row)
    rows = []
    for t, found in sorted(by_round.items()):
        if len(found) < len(members):
            continue
        values = [row["mean"] for row in found]
        std = stdev(values) if len(values) > 1 else 0.0
        mean = fmean(values)
        across = {key: fmean(row[key] for row in found) for key in ("bytes", "seconds")}
        spread = {"mean": mean, "std": std, "low": mean - std, "high": mean + std}
        rows.append({"name": of.name, "t": t, **across, **spread, "seeds": len(found)})
    return rows


def tests(groups: Sequence[Group]) -> list[Test]:
    """Compare all pairs of groups that have one test set, with p-values of the t-test corrected over them (Holm)."""
    found = [_test(a, b) for a, b in combinations(groups, 2) if a.test_set == b.test_set]
    corrected = holm([test.t for test in found])
    return [replace(test, corrected=p) for test, p in zip(found, corrected, strict=True)]


def _same_peers(a: Group, b: Group) -> bool:
    """Whether peer i of one group has the samples of peer i of the other, given the one seed that both have."""
    common = a.by_seed().keys() & b.by_seed().keys()
    members = [member for member in (*a.members, *b.members) if member.summary.seed in common]
    tested = [member.compared.tested for member in members]
    return all(alike(tested[0], each) for each in tested)


def _test(a: Group, b: Group) -> Test:
    left: Mapping[Any, float] = a.by_seed()
    right: Mapping[Any, float] = b.by_seed()
    unit = "seeds"
    if len(left.keys() & right.keys()) == 1 and _same_peers(a, b):
        left, right, unit = a.by_peer(), b.by_peer(), "peers"
    pairs = sorted(left.keys() & right.keys())
    values = [left[pair] - right[pair] for pair in pairs]
    mean = fmean(values) if values else math.nan
    if len(values) < 2:
        return Test(a.name, b.name, unit, len(values), mean)
    p_values = p_value(values, "t"), p_value(values, "wilcoxon")
    if are_equal(values):  # no variation to test a difference against
        return Test(a.name, b.name, unit, len(values), mean, mean, mean, *p_values)
    from scipy import stats

    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return Test(a.name, b.name, unit, len(values), mean, float(low), float(high), *p_values)
