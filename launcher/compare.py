"""``p2pfl compare``: several runs side by side, and whether they can be compared at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from launcher import text
from launcher.summary import Spread, Summary, settings, summarize, watched
from p2pfl.runfolder import RunFolder

SAME = ("seed", "rounds", "peers", "graph", "data", "models", "masked_test")
"""Keys of the run file that runs should have in common, or their accuracies measure something else as well."""


@dataclass(frozen=True)
class Line:
    """One run. ``bytes_sent`` are those of all peers, headers included; ``seconds`` from asking for the peers to the
    last exit, or where nobody watched, what the slowest peer took."""

    run: str
    algorithm: str
    finished: int
    peers: int
    accuracy: Spread | None
    best: Spread | None
    global_accuracy: Spread | None
    measures: dict[str, Spread]
    messages: int
    bytes_sent: int
    seconds: float


def lines(folders: Sequence[RunFolder]) -> list[Line]:
    """One for each run, in the given order."""
    return [_line(summarize(folder, seconds=watched(folder))) for folder in folders]


def _line(summary: Summary) -> Line:
    return Line(
        run=summary.run,
        algorithm=summary.algorithm,
        finished=sum(peer.ended == "finished" for peer in summary.peers),
        peers=len(summary.peers),
        accuracy=summary.accuracy,
        best=summary.best,
        global_accuracy=summary.global_accuracy,
        measures=summary.measures,
        messages=sum(kind["messages"] for kind in summary.traffic.values()),
        bytes_sent=sum(kind["payload"] + kind["header"] for kind in summary.traffic.values()),
        seconds=summary.seconds or max((peer.seconds for peer in summary.peers), default=0.0),
    )


def differences(folders: Sequence[RunFolder]) -> dict[str, list[Any]]:
    """Keys (dotted) in SAME or below in which the runs differ, with the value in each."""
    plain = [dict(_flat({key: value for key, value in settings(one).items() if key in SAME})) for one in folders]
    keys = dict.fromkeys(key for one in plain for key in one)
    values = {key: [one.get(key) for one in plain] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def _flat(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield path + key, value


def table(compared: Sequence[Line]) -> Table:
    """For people: a run per row."""
    wide = any(line.global_accuracy for line in compared)
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    result.add_column("run", no_wrap=True)
    result.add_column("algorithm", no_wrap=True)
    for column in ("peers", "acc %", "worst 10 %", "best %", *["global %"] * wide, "messages", "sent", "time"):
        result.add_column(column, justify="right", no_wrap=True)
    for line in compared:
        result.add_row(
            Path(line.run).name,
            line.algorithm,
            f"{line.finished}" if line.finished == line.peers else f"{line.finished} of {line.peers}",
            _spread(line.accuracy),
            text.percent(line.accuracy.worst_tenth) if line.accuracy else text.percent(None),
            _spread(line.best),
            *[_spread(line.global_accuracy)] * wide,
            str(line.messages),
            text.size(line.bytes_sent),
            text.duration(line.seconds),
        )
    return result


def measures(compared: Sequence[Line]) -> Table | None:
    """What else the methods have evaluated: a measure per row, a run per column."""
    having = [line for line in compared if line.measures]
    if not having:
        return None
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    result.add_column("%")
    for line in having:
        result.add_column(Path(line.run).name, justify="right", no_wrap=True)
    for name in sorted({name for line in having for name in line.measures}):
        result.add_row(name, *(_spread(line.measures.get(name)) for line in having))
    return result


def _spread(spread: Spread | None) -> str:
    return text.percent(None) if spread is None else f"{text.percent(spread.mean)} ± {text.percent(spread.std)}"
