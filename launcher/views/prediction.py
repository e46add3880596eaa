"""Print what a virtual run predicts for the real run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from launcher.formatting import duration, percent, size
from launcher.formatting.console import make_table

if TYPE_CHECKING:
    from p2pfl.simulation.prediction import Limit, Prediction


def print_prediction(found: Prediction, console: Console) -> None:
    each = f"{found.hosts} hosts" if found.hosts > 1 else "one host"
    console.print(f"{found.name}: {found.method}, {found.peers:,} peers on {each}, {found.rounds:,} rounds")
    console.print(
        f"whole run {_seconds(found.seconds)}; all peers started after {_seconds(found.started)}; "
        f"{percent(found.cpu)} % of the CPU time used"
    )
    phases = sorted(found.phases.items(), key=lambda item: -item[1])
    total = sum(found.phases.values()) or 1.0
    console.print(
        f"a round {_seconds(found.round.median)} (median of peers and rounds), at worst {_seconds(found.round.max)}: "
        + ", ".join(f"{name} {percent(seconds / total)} %" for name, seconds in phases if seconds)
    )
    if found.missing:
        console.print(f"messages that missed a deadline: {found.missing:,}")
    console.print()
    console.print(_footprint_table(found))
    console.print()
    console.print(_limit_table(found))
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _footprint_table(found: Prediction) -> Table:
    rows = [
        ["sent a round", size(found.sent.median), size(found.sent.max), "", ""],
        ["  in messages", _count(found.messages.median), _count(found.messages.max), "", ""],
        ["  on an edge", size(found.edges.median), size(found.edges.max), "", ""],
        ["  to other hosts", "", "", size(found.crossing.median), size(found.crossing.max)],
        ["journal a round", size(found.journal.median), size(found.journal.max), "", ""],
    ]
    for name in ("connections", "descriptors", "tasks", "memory", "files"):
        peer, host, text = found.peer[name], found.host[name], size if name == "memory" else _count
        shown = "processes, threads" if name == "tasks" else name
        rows.append([shown, *map(text, (peer.median, peer.max, host.median, host.max))])
    return make_table(["", "median peer", "largest peer", "median host", "largest host"], rows, left=[""])


def _limit_table(found: Prediction) -> Table:
    first = "limit, the first to be reached on top"
    table = make_table([first, "needed", "available", "enough for peers"], [], left=[first])
    for limit in found.limits:
        table.add_row(*_limit_row(limit), style="red" if limit.exceeded else None)
    return table


def _limit_row(limit: Limit) -> list[str]:
    text = {"bytes": size, "seconds": _seconds}.get(limit.unit, _count)
    enough = "any number" if limit.peers is None else f"{limit.peers:,}"
    return [limit.name, text(limit.needed), text(limit.available), enough + (": EXCEEDED" if limit.exceeded else "")]


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else duration(seconds)
