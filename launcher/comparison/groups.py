"""Runs that differ in nothing but the seed form a group; what differs between groups names them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.comparison.statistics import mean_by_seed
from launcher.comparison.test_sets import DATASET, WasTested, differing, names
from launcher.errors import CompareError
from launcher.facts.summary import Summary, current_summary
from launcher.facts.sweep_folder import SweepRun
from launcher.formatting.flat import flatten
from launcher.formatting.labels import LONGEST_VALUE, short, value_text
from p2pfl.options import did_you_mean
from p2pfl.run_folder.folder import RunFolder

NOT_COMPARED = ("seed", "name", "out", "report", "track", "data.root", "data.download")
"""Keys of the run file that do not tell groups apart: the seed, where files are, who watches."""
SIMULATED = "simulated"
"""The clock of runs whose seconds are simulated."""
TEST_SET = "test set"
"""Label of groups of which some were tested on other samples than others."""


@dataclass(frozen=True)
class ComparedRun:
    """One run.

    Attributes:
        settings: its run file as plain, unchecked values.
        values: the same with dotted keys, without NOT_COMPARED.
        labels: how the sweep calls the values that it varies; None outside a sweep.
        tested: what it was tested on.
    """

    folder: RunFolder
    summary: Summary
    settings: Mapping[str, Any]
    values: Mapping[str, Any]
    labels: Mapping[str, str] | None
    tested: WasTested

    @classmethod
    def of(cls, folder: RunFolder, point: SweepRun | None) -> ComparedRun:
        """Read a run, with its point in a sweep. Raises RunFolderError if it is damaged."""
        summary, plain = current_summary(folder), folder.settings
        compared = flatten({**plain, "masked_test": summary.masked_test})
        values = {key: value for key, value in compared if key not in NOT_COMPARED}
        values["clock"] = summary.clock or "real"  # not a key of the run file, but seconds depend on it
        tested_on = {peer.peer: peer.tested_on for peer in summary.peers}
        if sha := next((found["dataset"] for found in tested_on.values() if found.get("dataset")), None):
            values[DATASET] = sha[:12]
        labels = None if point is None else point.labels
        return cls(folder, summary, plain, values, labels, WasTested.of(summary.seed, values, tested_on))

    @property
    def seed(self) -> int:
        return self.summary.seed

    @property
    def counts(self) -> bool:
        """Whether it is in results and tests: at least one peer has finished."""
        return any(peer.ended == "finished" for peer in self.summary.peers)

    @property
    def accuracy(self) -> float | None:
        """The mean over the peers, as the run recorded it."""
        return self.summary.accuracy.mean if self.summary.accuracy else None

    @property
    def bytes_sent(self) -> int:
        """By all peers, with headers."""
        return sum(peer.bytes_out for peer in self.summary.peers)

    @property
    def seconds(self) -> float:
        """From the request for the peers to the last exit; the time of the slowest peer if not measured."""
        return self.summary.seconds or max((peer.seconds for peer in self.summary.peers), default=0.0)


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same values.

    Attributes:
        labels: what sets it apart from the other groups, by key; with TEST_SET if not all were tested on the same.
        test_set: as ``test_sets.names`` calls it.
    """

    labels: Mapping[str, str]
    members: tuple[ComparedRun, ...]
    test_set: str = "A"

    @property
    def name(self) -> str:
        """``mapl, lr=0.01``"""
        parts = (short(key, label) for key, label in self.labels.items() if key != TEST_SET)
        return ", ".join(parts) or "all runs"

    @property
    def title(self) -> str:
        """The name with the test set if there are others; if nothing sets the runs apart, their algorithm."""
        name = self.name if self.labels else self.members[0].summary.algorithm
        return f"{name} (test set {self.test_set})" if TEST_SET in self.labels else name

    @property
    def counted(self) -> list[ComparedRun]:
        return [member for member in self.members if member.counts]

    def by_seed(self) -> dict[int, float]:
        """Return the mean accuracy by seed: of the runs that share a seed, the mean."""
        return dict(sorted(mean_by_seed((member.seed, member.accuracy) for member in self.counted).items()))


def common_clock(members: Iterable[ComparedRun]) -> str | None:
    """Return the clock of all runs, ``SIMULATED`` or ``real``; None if they differ in it."""
    clocks = {member.values["clock"] for member in members}
    return clocks.pop() if len(clocks) == 1 else None


def note_on_clock(members: Iterable[ComparedRun]) -> str:
    """Say that the seconds are those of a simulated clock; empty if some of them are not."""
    return "Seconds are those of a simulated clock." if common_clock(members) == SIMULATED else ""


def without_attackers(members: Iterable[ComparedRun]) -> str:
    """Say that the figures are of honest peers; empty if no peer of any run attacks."""
    counts = sorted({len(member.summary.attacks) for member in members})
    if not any(counts):
        return ""
    attackers = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"Accuracies and metrics are of honest peers; attackers are left out, {attackers} of a run."


def common_mask(members: Sequence[ComparedRun], remedy: str) -> bool:
    """Return whether the accuracies of all runs count the scores of local classes only.

    Raises:
        CompareError: the runs differ in that; it ends with ``remedy``.
    """
    if len({member.summary.masked_test for member in members}) > 1:
        values = "; ".join(f"{m.summary.run}: {json.dumps(m.summary.masked_test)}" for m in members)
        raise CompareError(
            f"runs differ in masked_test ({values}), so their accuracies mean different things; {remedy}"
        )
    return members[0].summary.masked_test


def group(members: Sequence[ComparedRun], masked: bool = False) -> list[RunGroup]:
    """Return the groups, in the order of their first runs.

    Args:
        masked: the accuracies to compare count only the scores of local classes.
    """
    found: dict[str, list[ComparedRun]] = {}
    datasets: dict[str, str] = {}
    for member in members:
        # Without nulls: another version of p2pfl may not have a key whose default is null.
        values = {key: value for key, value in member.values.items() if value is not None}
        dataset = values.pop(DATASET, None)  # unknown until a peer has started: then the run file decides
        key = json.dumps(values, sort_keys=True, default=str)
        if dataset is not None and datasets.setdefault(key, dataset) != dataset:
            key += dataset
        found.setdefault(key, []).append(member)
    parts = list(found.values())
    labels = _labels_of_sweep(parts) or _labels_of_values(parts)
    sets = names(parts, masked)
    if len(set(sets)) > 1:
        labels = [{**label, TEST_SET: name} for label, name in zip(labels, sets, strict=True)]
    return [RunGroup(*each) for each in zip(labels, map(tuple, parts), sets, strict=True)]


def other_tests(groups: Sequence[RunGroup]) -> list[str]:
    """Return in what groups differ that were tested on other samples; empty if all were tested on the same."""
    return differing([part.members[0] for part in groups]) if len({part.test_set for part in groups}) > 1 else []


def _labels_of_sweep(parts: Sequence[Sequence[ComparedRun]]) -> list[dict[str, str]] | None:
    """Return the labels that a sweep gives its runs; None if they do not name every group."""
    labels = [dict(part[0].labels or {}) for part in parts]
    keys = {tuple(label) for label in labels}
    distinct = {tuple(label.values()) for label in labels}
    return labels if len(keys) == 1 and keys != {()} and len(distinct) == len(parts) else None


def _labels_of_values(parts: Sequence[Sequence[ComparedRun]]) -> list[dict[str, str]]:
    """Choose the first keys that tell all groups apart, the algorithm's before others."""
    values = [part[0].values for part in parts]
    for longest in (LONGEST_VALUE, sys.maxsize):
        labels = _shortest_labels(values, longest)
        if len({tuple(label.items()) for label in labels}) == len(parts):
            break
    return labels


def _shortest_labels(values: Sequence[Mapping[str, Any]], longest: int) -> list[dict[str, str]]:
    keys = list(varied(values))
    chosen: list[str] = []
    names: list[tuple[str, ...]] = [() for _ in values]
    for key in sorted(
        keys, key=lambda key: (key != "algorithm.name", not key.startswith("algorithm."), keys.index(key))
    ):
        longer = [(*name, value_text(value.get(key), longest)) for name, value in zip(names, values, strict=True)]
        if len(set(longer)) > len(set(names)):
            chosen, names = [*chosen, key], longer
        if len(set(names)) == len(values):
            break
    return [dict(zip(chosen, name, strict=True)) for name in names]


def differences(runs: Sequence[Mapping[str, Any]], absent: Any = None) -> dict[str, list[Any]]:
    """Return the keys in which runs differ, and the value of each run; ``absent`` where it does not have the key."""
    keys = dict.fromkeys(key for run in runs for key in run)
    values = {key: [run.get(key, absent) for run in runs] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def varied(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys in which runs differ, as ``differences`` does, besides those that follow from others.

    A parameter that only some runs have follows from the name of what it belongs to. The hash of the dataset follows
    from the keys of the dataset; a run that lacks it has not started.
    """
    keys = dict.fromkeys(key for run in runs for key in run)
    found = {}
    for key in keys:
        owner = f"{key.rpartition('.')[0]}.name"
        named_differently = owner != key and _distinct(run.get(owner) for run in runs) > 1
        compared = [run for run in runs if key in run] if named_differently or key == DATASET else runs
        if _distinct(run.get(key) for run in compared) > 1:
            found[key] = [run.get(key) for run in runs]
    if any(key.startswith("data.dataset.") for key in found):
        found.pop(DATASET, None)  # of course
    return found


def _distinct(values: Iterable[Any]) -> int:
    return len({json.dumps(value, sort_keys=True, default=str) for value in values})


def find_baseline(groups: Sequence[RunGroup], text: str | None) -> RunGroup:
    """Return the group that ``--baseline`` means: by its name, or by one of its labels; by default the first.

    Raises:
        CompareError: none or several are meant.
    """
    if text is None:
        return groups[0]
    names = [found.name for found in groups]
    meant = [found for found in groups if found.name == text]
    if not meant:
        wanted = [part.strip() for part in text.split(",")]
        meant = [found for found in groups if all(_has(found, part) for part in wanted)]
    if len(meant) == 1:
        return meant[0]
    problem = f"means {len(meant)} groups" if meant else "no such group"
    hint = "" if meant else did_you_mean(text, names)
    raise CompareError(f"--baseline {text}: {problem}; the groups are: {'; '.join(names)}{hint}")


def _has(found: RunGroup, part: str) -> bool:
    """Whether a group has the label ``0.01``, ``lr=0.01`` or ``algorithm.lr=0.01``."""
    key, equals, label = part.rpartition("=")
    return any(
        label == value and (not equals or key in (name, name.rpartition(".")[2]))
        for name, value in found.labels.items()
    )
