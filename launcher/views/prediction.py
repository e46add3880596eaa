"""Print what a virtual run says of the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from launcher.formatting import duration, percent, size

if TYPE_CHECKING:
    from p2pfl.simulation.prediction import Limit, Prediction

Format = Callable[[float], str]


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
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(("", "median peer", "largest peer", "median host", "largest host")):
        table.add_column(head, justify="right" if number else "left")
    rows: list[tuple[str, Format]] = [
        ("connections", _count),
        ("descriptors", _count),
        ("tasks", _count),
        ("memory", size),
        ("files", _count),
    ]
    table.add_row("sent a round", size(found.sent.median), size(found.sent.max), "", "")
    table.add_row("  in messages", _count(found.messages.median), _count(found.messages.max), "", "")
    table.add_row("  on an edge", size(found.edges.median), size(found.edges.max), "", "")
    table.add_row("  to other hosts", "", "", size(found.crossing.median), size(found.crossing.max))
    table.add_row("journal a round", size(found.journal.median), size(found.journal.max), "", "")
    for name, text in rows:
        peer, host = found.peer[name], found.host[name]
        shown = "processes, threads" if name == "tasks" else name
        table.add_row(shown, *map(text, (peer.median, peer.max, host.median, host.max)))
    return table


def _limit_table(found: Prediction) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(
        ("limit, the first to be reached on top", "needed", "available", "enough for peers")
    ):
        table.add_column(head, justify="right" if number else "left")
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
