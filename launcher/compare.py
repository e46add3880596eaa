"""``p2pfl compare``: several runs side by side, and whether they can be compared at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from launcher import text
from launcher.summary import Spread, Summary, settings, summarize
from p2pfl.runfolder import RunFolder, read_json

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
    return [_line(summarize(folder, seconds=_watched(folder))) for folder in folders]


def _watched(folder: RunFolder) -> float | None:
    """Seconds that the launcher has measured, if it stayed to the end."""
    seconds: float | None = (read_json(folder.summary) or {}).get("seconds")
    return seconds


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
    """Keys among SAME in which the runs differ, with the value in each."""
    plain = [settings(folder) for folder in folders]
    values = {key: [one.get(key) for one in plain] for key in SAME}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def table(compared: Sequence[Line]) -> Table:
    """For people: a run per row. Columns that no run has a value for are left out."""
    wide = any(line.global_accuracy for line in compared)
    extra = sorted({name for line in compared for name in line.measures})
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    result.add_column("algorithm")
    names = ["peers", "acc %", "worst 10 %", "best %", *["global %"] * wide, *(f"{name} %" for name in extra)]
    for column in (*names, "messages", "sent", "time"):
        result.add_column(column, justify="right", no_wrap=True)
    for line in compared:
        result.add_row(
            line.algorithm,
            f"{line.finished}" if line.finished == line.peers else f"{line.finished} of {line.peers}",
            _spread(line.accuracy),
            text.percent(line.accuracy.worst_tenth) if line.accuracy else text.percent(None),
            _spread(line.best),
            *[_spread(line.global_accuracy)] * wide,
            *(_spread(line.measures.get(name)) for name in extra),
            str(line.messages),
            text.size(line.bytes_sent),
            text.duration(line.seconds),
        )
    return result


def _spread(spread: Spread | None) -> str:
    return text.percent(None) if spread is None else f"{text.percent(spread.mean)} ± {text.percent(spread.std)}"
