"""``p2pfl compare``: several runs side by side, and the settings in which they differ.

Accuracies of one comparison mean one thing: all masked or all unmasked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from launcher import formatting
from launcher.comparison import groups
from launcher.comparison.groups import ComparedRun, common_mask
from launcher.facts.spreads import MetricSpread, Spread
from launcher.formatting.console import make_table
from launcher.formatting.flat import flatten

COMMON_KEYS = ("seed", "rounds", "peers", "graph", "data", "models")
"""Keys of the run file in which comparable runs agree."""
BUDGET_KEYS = ("local_epochs", "local_steps", "batch", "optimizer", "lr", "momentum", "betas", "weight_decay", "loss")
"""Hyper-parameters that say how much and how a peer trains: where they differ, so may the results."""


@dataclass(frozen=True)
class RunFigures:
    """The results of one run: accuracies and metrics of its honest peers.

    Attributes:
        finished: number of peers that finished.
        masked: ``accuracy`` and ``extra_metrics`` count only the scores of local classes.
        metrics: named by the run file; none if they are of the other scores.
        other_accuracy: the unmasked one if ``masked``, else the masked one.
        best: None if the run recorded it for the other accuracy.
        bytes_sent: by all peers, including headers.
        seconds: from the request for the peers to the last exit; the time of the slowest peer if not measured.
        attackers: number of peers that attack.
    """

    run: str
    algorithm: str
    finished: int
    peers: int
    masked: bool
    accuracy: Spread | None
    other_accuracy: Spread | None
    best: Spread | None
    global_accuracy: Spread | None
    metrics: dict[str, MetricSpread]
    extra_metrics: dict[str, Spread]
    messages: int
    bytes_sent: int
    seconds: float
    attackers: int = 0

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        if not self.attackers:
            del plain["attackers"]
        return plain


def lines(members: Sequence[ComparedRun], masked: bool | None = None) -> list[RunFigures]:
    """Return a line for each run, in the given order.

    Args:
        masked: compare the masked or the unmasked accuracies; None: as the runs' ``masked_test`` says.

    Raises:
        CompareError: the runs differ in ``masked_test``.
    """
    if masked is None:
        masked = common_mask(members, "give --masked or --unmasked to compare the same one of all runs")
    return [_line(member, masked) for member in members]


def _line(member: ComparedRun, masked: bool) -> RunFigures:
    summary = member.summary
    chosen, other = dict(summary.unmasked_accuracies), summary.masked_accuracies
    if masked:
        chosen, other = dict(other), chosen
    as_recorded = masked == summary.masked_test
    accuracy, extra_metrics = chosen.pop("personal", None), chosen
    if as_recorded:
        accuracy, extra_metrics = summary.accuracy, summary.extra_metrics
    return RunFigures(
        run=summary.run,
        algorithm=summary.algorithm,
        finished=sum(peer.ended == "finished" for peer in summary.peers),
        peers=len(summary.peers),
        masked=masked,
        accuracy=accuracy,
        other_accuracy=other.get("personal"),
        best=summary.best if as_recorded else None,
        global_accuracy=summary.global_accuracy,
        metrics=summary.metrics if as_recorded else {},
        extra_metrics=extra_metrics,
        messages=sum(peer.messages_out for peer in summary.peers),
        bytes_sent=member.bytes_sent,
        seconds=member.seconds,
        attackers=len(summary.attacks),
    )


def differences(members: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Return the dotted keys of COMMON_KEYS and BUDGET_KEYS in which the runs differ, with the value of each run."""
    return groups.differences([dict(_compared(member.settings)) for member in members])


def _compared(run: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from flatten({key: run[key] for key in COMMON_KEYS if key in run})
    algorithm = run["algorithm"]
    unused = {"sgd": "betas", "adam": "momentum"}.get(algorithm.get("optimizer"))
    for key in BUDGET_KEYS:
        yield f"algorithm.{key}", None if key == unused else algorithm.get(key, "ce" if key == "loss" else None)


def table(compared: Sequence[RunFigures], test_sets: Sequence[str] | None = None) -> Table:
    """Return a table with one run per row, masked or not as the lines are; the others only where they differ.

    Args:
        test_sets: of the lines, if they differ.
    """
    chosen, other = ("masked %", "unmasked %") if compared[0].masked else ("unmasked %", "masked %")
    rows = [
        {
            "run": Path(line.run).name,
            "algorithm": line.algorithm,
            "test set": test_sets[at] if test_sets else "",
            "peers": f"{line.finished}" if line.finished == line.peers else f"{line.finished} of {line.peers}",
            "attackers": str(line.attackers),
            chosen: _spread(line.accuracy),
            "worst 10 %": formatting.percent(line.accuracy.worst_tenth if line.accuracy else None),
            "best %": _spread(line.best),
            other: _spread(line.other_accuracy),
            "global %": _spread(line.global_accuracy),
            "messages": str(line.messages),
            "sent": formatting.size(line.bytes_sent),
            "time": formatting.duration(line.seconds),
        }
        for at, line in enumerate(compared)
    ]
    shown = {
        "attackers": any(line.attackers for line in compared),
        "test set": test_sets is not None,
        other: any(line.other_accuracy != line.accuracy for line in compared),
        "global %": any(line.global_accuracy for line in compared),
    }
    head = [column for column in rows[0] if shown.get(column, True)]
    return make_table(head, [[row[key] for key in head] for row in rows], left=("run", "algorithm", "test set"))


def extra_metrics_table(compared: Sequence[RunFigures]) -> Table | None:
    """Return a table of the extra metrics, one per row, with one run per column; None if there are none."""
    return _by_metric("%", compared, [{k: _spread(v) for k, v in line.extra_metrics.items()} for line in compared])


def metrics_table(compared: Sequence[RunFigures]) -> Table | None:
    """Return a table of the metrics that run files name, one per row, with one run per column; None without any."""
    return _by_metric(
        "metric", compared, [{k: _plain_spread(v) for k, v in line.metrics.items()} for line in compared]
    )


def _by_metric(heading: str, compared: Sequence[RunFigures], texts: Sequence[Mapping[str, str]]) -> Table | None:
    names = sorted({name for found in texts for name in found})
    head = [heading, *(Path(line.run).name for line, found in zip(compared, texts, strict=True) if found)]
    rows = [[name, *(found.get(name, "–") for found in texts if found)] for name in names]
    return make_table(head, rows, left=[heading]) if rows else None


def _plain_spread(spread: MetricSpread) -> str:
    """Mean ± standard deviation of a metric, which is not a percentage."""
    return f"{spread.mean:.4f} ± {spread.std:.4f}"


def _spread(spread: Spread | None) -> str:
    return "–" if spread is None else f"{formatting.percent(spread.mean)} ± {formatting.percent(spread.std)}"
