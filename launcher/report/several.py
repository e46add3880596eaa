"""Compare several runs: group them by what differs between their run files, and test the groups pairwise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

import yaml

from launcher.errors import CompareError
from launcher.report import history
from launcher.report.collect import read_summary
from launcher.views.summary import Summary, settings
from p2pfl.errors import RunFolderError
from p2pfl.session.run_folder import RunFolder

NOT_VARIED = ("seed", "name", "out", "report")
"""Keys in which runs of one group may differ: ``seed`` is averaged over, the others do not matter."""
UNKNOWN = "(none)"


@dataclass(frozen=True)
class Member:
    """One run of the comparison."""

    folder: RunFolder
    summary: Summary
    settings: dict[str, Any]
    curve: list[dict[str, Any]]


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed. ``name``: what sets them apart from the other groups."""

    name: str
    members: list[Member]

    def accuracy(self, member: Member) -> float | None:
        return member.summary.accuracy.mean if member.summary.accuracy else None

    def by_seed(self) -> dict[int, float]:
        """The final mean accuracy by seed: the mean of the runs that share a seed."""
        found: dict[int, list[float]] = {}
        for member in self.members:
            if (value := self.accuracy(member)) is not None:
                found.setdefault(member.summary.seed, []).append(value)
        return {seed: fmean(values) for seed, values in sorted(found.items())}

    def by_peer(self) -> dict[tuple[int, int], float]:
        """The final accuracy by seed and peer."""
        return {
            (member.summary.seed, peer.peer): peer.accuracy
            for member in self.members
            for peer in member.summary.peers
            if peer.accuracy is not None
        }


@dataclass(frozen=True)
class Test:
    """A paired comparison of two groups: of the means by seed, or with a single common seed of the peers.

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


def read(folders: Sequence[RunFolder]) -> list[Member]:
    """Read the runs. Raises RunFolderError for a damaged one, CompareError if their accuracies differ in meaning."""
    from p2pfl.api import open_run

    members = []
    for folder in folders:
        try:
            summary = read_summary(folder)
            plain = settings(folder)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{folder.root}: damaged: {type(error).__name__}: {error}") from None
        curve = history.means(history.read(open_run(folder.root).records()))
        members.append(Member(folder, summary, plain, curve))
    if len({member.summary.masked_test for member in members}) > 1:
        values = "; ".join(f"{m.summary.run}: {json.dumps(m.summary.masked_test)}" for m in members)
        raise CompareError(
            f"runs differ in masked_test ({values}), so their accuracies differ in meaning; report them separately"
        )
    return members


def differences(members: Sequence[Member]) -> dict[str, list[Any]]:
    """Return the dotted keys in which the run files differ, with the value of each run."""
    flat = [dict(_flatten(member.settings)) for member in members]
    keys = dict.fromkeys(key for run in flat for key in run)
    found = {key: [run.get(key, UNKNOWN) for run in flat] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _flatten(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def group(members: Sequence[Member]) -> list[Group]:
    """Group the runs; the names hold as few of the differing keys as tell the groups apart."""
    varied = {key: values for key, values in differences(members).items() if key not in NOT_VARIED}
    identities = [json.dumps([values[k] for values in varied.values()], default=str) for k in range(len(members))]
    first = {identity: identities.index(identity) for identity in dict.fromkeys(identities)}
    naming = _naming(varied, list(first.values()))
    groups = []
    for identity, at in first.items():
        name = ", ".join(_named(key, varied[key][at]) for key in naming) or members[at].summary.algorithm
        groups.append(Group(name, [m for m, own in zip(members, identities, strict=True) if own == identity]))
    return groups


def _naming(varied: Mapping[str, list[Any]], chosen: Sequence[int]) -> list[str]:
    """Return keys that together tell the groups apart: the algorithm's name first, then as they are in the file."""
    keys = sorted(varied, key=lambda key: key != "algorithm.name")
    kept: list[str] = []
    apart = 1
    for key in keys:
        combined = {json.dumps([varied[k][at] for k in (*kept, key)], default=str) for at in chosen}
        if len(combined) > apart:
            kept.append(key)
            apart = len(combined)
    return kept


def _named(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n")[0]
    return text if key == "algorithm.name" else f"{key.rpartition('.')[2]} {text}"


def curve(of: Group) -> list[dict[str, Any]]:
    """Return the mean accuracy over peers and runs by round, with the deviation over runs (sample, n - 1)."""
    by_round: dict[int, list[dict[str, Any]]] = {}
    for member in of.members:
        for row in member.curve:
            by_round.setdefault(row["t"], []).append(row)
    rows = []
    for t, found in sorted(by_round.items()):
        if len(found) < len(of.members):
            continue
        values = [row["mean"] for row in found]
        std = stdev(values) if len(values) > 1 else 0.0
        mean = fmean(values)
        across = {key: fmean(row[key] for row in found) for key in ("bytes", "seconds")}
        spread = {"mean": mean, "std": std, "low": mean - std, "high": mean + std}
        rows.append({"name": of.name, "t": t, **across, **spread, "seeds": len(found)})
    return rows


def tests(groups: Sequence[Group]) -> list[Test]:
    """Compare all pairs of groups, with p-values of the t-test corrected over all of them (Holm)."""
    found = [_test(a, b) for a, b in combinations(groups, 2)]
    corrected = holm([test.t for test in found])
    return [Test(**{**vars(test), "corrected": p}) for test, p in zip(found, corrected, strict=True)]


def _test(a: Group, b: Group) -> Test:
    left: Mapping[Any, float] = a.by_seed()
    right: Mapping[Any, float] = b.by_seed()
    unit = "seeds"
    if len(left.keys() & right.keys()) == 1:
        left, right, unit = a.by_peer(), b.by_peer(), "peers"
    pairs = sorted(left.keys() & right.keys())
    values = [left[pair] - right[pair] for pair in pairs]
    mean = fmean(values) if values else math.nan
    if len(values) < 2 or len(set(values)) == 1:
        return Test(a.name, b.name, unit, len(values), mean)
    from scipy import stats

    result = stats.ttest_1samp(values, 0.0)
    low, high = result.confidence_interval(0.95)
    # "approx" needs no ties; "auto" is exact for few pairs and corrects for ties otherwise.
    signed = stats.wilcoxon(values, method="auto")
    numbers = (float(low), float(high), float(result.pvalue), float(signed.pvalue))
    return Test(a.name, b.name, unit, len(values), mean, *numbers)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Correct p-values for their number (Holm's step-down method); None stays None."""
    known = sorted((p, k) for k, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, k) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        corrected[k] = highest
    return corrected
