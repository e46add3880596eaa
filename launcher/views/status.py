"""``p2pfl status``: a table of the peers, and a line for each that holds up others."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from launcher import formatting
from launcher.facts.skipped import skipped_lines
from launcher.facts.status import SUSPENDED, PeerLine, RunStatus
from p2pfl.terminal import printable

MAX_HOLDS = 5
"""Most lines about peers that hold up others."""
ORDINARY = 2.0
"""Seconds for which peers may hold up others without a separate line: one is always the last in a round."""
LONG = 5.0
"""Seconds after which a message that was sent, and is not queued at its sender, should have arrived."""
MIN_ROWS = 3
"""Rows of the table that are shown even if the screen has no room for them."""

COLUMNS = (
    "peer",
    "attack",
    "state",
    "round",
    "done",
    "acc %",
    "waits for",
    "for",
    "sent",
    "recv",
    "ages",
    "memory",
    "queues",
)


def render(status: RunStatus, height: int | None = None) -> RenderableType:
    """Return a table of the peers, and what holds them up.

    Args:
        height: of the screen, in lines: those peers are shown that matter most; default: all, and no line is cut off.
    """
    lines = _lines(status)
    shown, more = status.peers, []
    if height is not None:
        shown = most_urgent(status, max(MIN_ROWS, height - len(lines) - 4))
        hidden = len(status.peers) - len(shown)
        more = [f"… and {hidden} more peers that are further ahead"] if hidden else []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    whole = height is None
    needed = {"attack": bool(status.attacks), "ages": any(line.ages for line in status.peers)}
    columns = [column for column in COLUMNS if needed.get(column, True)]
    rows = [_columns(line, status) for line in shown]
    # In a live view, columns stay where they are.
    kept = [column for column in columns if not whole or any(row[column] for row in rows)]
    for column in kept:
        left = column in ("attack", "state", "waits for")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(row[column])) for column in kept))
    texts = [
        Text(printable(text), no_wrap=not whole, overflow="fold" if whole else "ellipsis")
        for text in (_head(status), *more, *lines)
    ]
    return Group(texts[0], table, *texts[1:])


def most_urgent(status: RunStatus, most: int) -> list[PeerLine]:
    """Return at most so many peers, ascending: those that did not finish, hold up others, or are furthest behind."""
    sources = {hold.source for hold in status.holds}

    def urgency(line: PeerLine) -> tuple[bool, bool, int, float]:
        lost = not line.alive and line.state not in ("finished", "starting")
        return not lost, line.peer not in sources, line.rounds_done, -(line.seconds or 0.0)

    return sorted(sorted(status.peers, key=urgency)[:most], key=lambda line: line.peer)


def _columns(line: PeerLine, status: RunStatus) -> dict[str, str]:
    texts = (
        str(line.peer),
        status.attacks.get(line.peer, ""),
        line.state.partition(":")[0],
        str(line.t),
        f"{line.rounds_done}/{status.rounds}",
        formatting.percent(line.accuracy),
        formatting.ids(line.waiting_for, most=4),
        "" if line.seconds is None else formatting.duration(line.seconds),
        formatting.size(line.bytes_out),
        formatting.size(line.bytes_in),
        "" if line.ages is None else str(line.ages),
        "" if line.memory is None else formatting.size(line.memory),
        f"{line.unread} in, {line.undelivered} out" if line.unread or line.undelivered else "",
    )
    return dict(zip(COLUMNS, texts, strict=True))


def _head(status: RunStatus) -> str:
    honest = [line for line in status.peers if line.peer not in status.attacks]
    known = [line.accuracy for line in honest if line.accuracy is not None]
    done = [line.rounds_done for line in status.peers]
    states = Counter(line.state.partition(":")[0] for line in status.peers)
    parts = [
        f"{status.name}: {status.alive} of {len(status.peers)} peers alive",
        f"rounds {min(done)} to {max(done)} of {status.rounds}" if done else "no peers",
        f"accuracy {formatting.percent(fmean(known) if known else None)} %",
        *([f"attackers, not in it: {formatting.ids(status.attacks)}"] if status.attacks else []),
        ", ".join(f"{count} {state}" for state, count in states.most_common()),  # last: a narrow screen cuts it off
    ]
    return " | ".join(parts)


def _lines(status: RunStatus) -> list[str]:
    """Return a line for each peer that holds up others, and each that ended with an error."""
    lines = []
    of = {line.peer: line for line in status.peers}
    long = [hold for hold in status.holds if not _is_ordinary(of.get(hold.source))]
    for hold in long[:MAX_HOLDS]:
        edges = ", ".join(f"{source} → {receiver}" for source, receiver in hold.edges[:4])
        more = ", …" if len(hold.edges) > 4 else ""
        lines.append(f"peer {hold.source} ({hold.why}) holds up {formatting.peers(hold.peers)}: edge {edges}{more}")
    if len(long) > MAX_HOLDS:
        lines.append(f"… and {len(long) - MAX_HOLDS} more")
    if short := [hold.source for hold in status.holds if hold not in long]:
        verb = "holds" if len(short) == 1 else "hold"
        lines.append(f"{formatting.peers(short)} {verb} up others, for less than {ORDINARY:.0f} s")
    known = {line.peer for line in status.peers}  # others may be on other hosts
    if known and all(_has_sent_all(line) and known.issuperset(line.waiting_for) for line in status.peers):
        logs = f"p2pfl logs {status.run} --level warning"
        lines.append(
            "all peers wait, with nothing to send; if the connections are up, is an `await` missing in the method? "
            f"See `{logs}`"
        )
    lines += skipped_lines({line.peer: line.skipped for line in status.peers})
    lines += [f"peer {line.peer}: {line.state}" for line in status.peers if ":" in line.state]
    return [printable(line) for line in lines]


def _is_ordinary(source: PeerLine | None) -> bool:
    """Return whether a peer is probably about to send: it lives, and has not been in its phase for long."""
    if source is None or not source.alive or source.state in (SUSPENDED, "starting"):
        return False
    return source.seconds is not None and source.seconds < ORDINARY


def _has_sent_all(line: PeerLine) -> bool:
    """Return whether a peer has waited for long, and everything that it has sent was delivered."""
    return bool(line.waiting_for) and not line.undelivered and (line.seconds or 0.0) >= LONG
