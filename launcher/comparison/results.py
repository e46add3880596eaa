"""The results of groups of runs: what ``p2pfl compare`` prints about seeds and sweeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from launcher.comparison import curves
from launcher.comparison.groups import (
    ComparedRun,
    RunGroup,
    find_baseline,
    group,
    note_on_clock,
    other_tests,
    varied,
    without_attackers,
)
from launcher.comparison.lines import RunFigures
from launcher.comparison.statistics import Statistic, Test, VersusBaseline, compare, holm, mean_by_seed
from launcher.errors import CompareError
from p2pfl.options import unknown


@dataclass(frozen=True)
class CompareOptions:
    """What to compare.

    Attributes:
        target: accuracy; count the rounds until each run reaches it.
        seconds_to: accuracy; count the seconds until each run reaches it.
        baseline: name or labels of the group that the others are tested against; None: the first.
        metric: of the run files, in which they are tested; None: accuracy.
        at_bytes, at_seconds: budgets; None: the largest that every run reaches.
    """

    target: float | None = None
    baseline: str | None = None
    metric: str | None = None
    test: Test = "t"
    at_bytes: float | None = None
    at_seconds: float | None = None
    seconds_to: float | None = None


@dataclass(frozen=True)
class GroupLine:
    """The results of one group. Accuracies are fractions; each figure is the mean over the peers of one run.

    Attributes:
        runs: runs that count: at least one peer has finished.
        all_runs: also those that have not ended.
        seeds: of the runs that count.
        accuracy: at the end.
        worst_tenth: mean over the tenth of the peers, at least one, with the lowest accuracies.
        at_bytes, at_seconds: accuracy when the budget was used up.
        rounds_to_target, seconds_to_target: of the runs that have reached it, whose number is its ``n``.
        bytes_sent, seconds: of one run.
        metrics: named by the run files.
        versus: against the baseline; None for the baseline, and without common seeds or with another test set.
        test_set: A, B, …: equal for groups that were tested on the same samples.
    """

    name: str
    labels: Mapping[str, str]
    runs: int
    all_runs: int
    seeds: list[int]
    accuracy: Statistic | None
    worst_tenth: Statistic | None
    at_bytes: Statistic | None
    at_seconds: Statistic | None
    rounds_to_target: Statistic | None
    bytes_sent: Statistic | None
    seconds: Statistic | None
    metrics: Mapping[str, Statistic]
    versus: VersusBaseline | None = None
    test_set: str = "A"
    seconds_to_target: Statistic | None = None


@dataclass(frozen=True)
class Difference:
    """A value of a key, None where a run file does not have it, and the names of the groups with it."""

    value: Any
    groups: list[str]


@dataclass(frozen=True)
class Results:
    """All groups, and what their figures mean.

    Attributes:
        masked: accuracies count only the scores of local classes.
        metric: in which groups are tested; None: accuracy.
        bytes_budget, seconds_budget: for ``at_bytes`` and ``at_seconds``; None if no run has sent or taken any.
        differ: the keys of the run files, besides the seed, in which groups differ.
        other_tests: in what groups differ that were tested on other samples; empty if all were tested on the same.
        without_attackers: says that attackers are left out, if there are any.
    """

    masked: bool
    lines: list[GroupLine]
    baseline: str
    metric: str | None
    test: Test
    target: float | None
    bytes_budget: float | None
    seconds_budget: float | None
    differ: dict[str, list[Difference]] = field(default_factory=dict)
    other_tests: list[str] = field(default_factory=list)
    without_attackers: str = ""
    seconds_target: float | None = None
    """Accuracy of ``seconds_to_target``."""
    clock: str = ""
    """Says that all seconds are simulated, if they are."""

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        if not self.without_attackers:
            del plain["without_attackers"]
        if not self.clock:
            del plain["clock"]
        return plain


@dataclass(frozen=True)
class _Run:
    """A run that counts."""

    member: ComparedRun
    line: RunFigures
    curves: curves.Curves


def results(members: Sequence[ComparedRun], lines: Sequence[RunFigures], options: CompareOptions) -> Results:
    """Group runs and compare the groups.

    Args:
        lines: the results of the members, in the same order.

    Raises:
        CompareError: there is no such baseline, or metric.
        RunFolderError: records are damaged.
    """
    counted = {
        id(member): _Run(member, line, curves.curves(member.folder, line.masked))
        for member, line in zip(members, lines, strict=True)
        if line.finished
    }
    groups = group(members, lines[0].masked)
    runs = [[counted[id(member)] for member in part.members if id(member) in counted] for part in groups]
    baseline = groups.index(find_baseline(groups, options.baseline))
    ends = [run.curves.rounds[-1] for run in counted.values() if run.curves.rounds]
    sent = [end.bytes_sent for end in ends if end.bytes_sent]  # a run that sends nothing needs no bytes
    took = [run.curves.times[-1][0] for run in counted.values() if run.curves.times]
    budgets = (
        min(sent, default=None) if options.at_bytes is None else options.at_bytes,
        min(took, default=None) if options.at_seconds is None else options.at_seconds,
    )
    metrics = dict.fromkeys(name for run in counted.values() for name in run.line.metrics)
    if options.metric is not None and not metrics:
        raise CompareError(
            f"--metric {options.metric}: no run has metrics; they are recorded for the scores of masked_test only"
        )
    if options.metric is not None and options.metric not in metrics:
        raise CompareError(unknown(options.metric, metrics, "metric"))
    figures = [_tested(options.metric, of) for of in runs]
    versus = [
        compare(figures[at], figures[baseline], options.test)
        if at != baseline and part.test_set == groups[baseline].test_set
        else None
        for at, part in enumerate(groups)
    ]
    adjusted = holm([None if found is None else found.p for found in versus])
    versus = [found and replace(found, adjusted=p) for found, p in zip(versus, adjusted, strict=True)]
    return Results(
        masked=lines[0].masked,
        lines=[
            replace(_line(part, of, budgets, options), versus=found)
            for part, of, found in zip(groups, runs, versus, strict=True)
        ],
        baseline=groups[baseline].name,
        metric=options.metric,
        test=options.test,
        target=options.target,
        bytes_budget=budgets[0],
        seconds_budget=budgets[1],
        differ=_differ(groups),
        other_tests=other_tests(groups),
        without_attackers=without_attackers(members),
        seconds_target=options.seconds_to,
        clock=note_on_clock(members),
    )


def _differ(groups: Sequence[RunGroup]) -> dict[str, list[Difference]]:
    """Return each value of the keys that differ once, in the order of the groups."""
    found: dict[str, list[Difference]] = {}
    for key, values in varied([part.members[0].values for part in groups]).items():
        names: dict[str, tuple[Any, list[str]]] = {}
        for part, value in zip(groups, values, strict=True):
            names.setdefault(repr(value), (value, []))[1].append(part.name)
        found[key] = [Difference(value, having) for value, having in names.values()]
    return found


def _tested(metric: str | None, runs: Sequence[_Run]) -> dict[int, float]:
    """Return the metric or the accuracy of each seed; of runs with the same seed, the mean."""
    figures = ((run, run.line.accuracy if metric is None else run.line.metrics.get(metric)) for run in runs)
    return mean_by_seed((run.member.seed, figure.mean) for run, figure in figures if figure is not None)


def _line(
    part: RunGroup, runs: Sequence[_Run], budgets: tuple[float | None, float | None], options: CompareOptions
) -> GroupLine:
    seeds = sorted({run.member.seed for run in runs})

    def over_seeds(figure: Callable[[_Run], float | None]) -> Statistic | None:
        return Statistic.of(mean_by_seed((run.member.seed, figure(run)) for run in runs).values())

    def metric(name: str) -> Statistic | None:
        return over_seeds(lambda run: run.line.metrics[name].mean if name in run.line.metrics else None)

    metrics = {name: metric(name) for name in dict.fromkeys(name for run in runs for name in run.line.metrics)}
    most, longest = budgets
    target, wanted = options.target, options.seconds_to
    return GroupLine(
        name=part.name,
        labels=part.labels,
        runs=len(runs),
        all_runs=len(part.members),
        seeds=seeds,
        accuracy=over_seeds(lambda run: run.line.accuracy.mean if run.line.accuracy else None),
        worst_tenth=over_seeds(lambda run: run.line.accuracy.worst_tenth if run.line.accuracy else None),
        at_bytes=None if most is None else over_seeds(lambda run: curves.at_bytes(run.curves.rounds, most)),
        at_seconds=None if longest is None else over_seeds(lambda run: curves.at_seconds(run.curves.times, longest)),
        rounds_to_target=None
        if target is None
        else over_seeds(lambda run: curves.rounds_to(run.curves.rounds, target)),
        bytes_sent=over_seeds(lambda run: run.line.bytes_sent),
        seconds=over_seeds(lambda run: run.line.seconds),
        metrics={name: found for name, found in metrics.items() if found is not None},
        test_set=part.test_set,
        seconds_to_target=None
        if wanted is None
        else over_seeds(lambda run: curves.seconds_to(run.curves.times, wanted)),
    )
