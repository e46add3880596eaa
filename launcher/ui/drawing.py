"""Draw the state of a run as lines of styled text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from launcher import formatting
from launcher.ui.state import Peer, RunState
from p2pfl.terminal import printable, wants_color

BARS = "▁▂▃▄▅▆▇█"
PHASES = {
    "starting": "dim",
    "queued": "blue",
    "training": "green",
    "waiting": "yellow",
    "evaluating": "cyan",
    "finished": "dim green",
    "stopped": "magenta",
    "failed": "bold red",
}
COLD, HOT = (28, 32, 48), (255, 190, 60)
"""Colors of weight 0 and of the largest weight."""
STEPS = 24
"""Colors between them."""
SHADES = " ░▒▓█"
"""In place of colors."""


def sparkline(values: Sequence[float], width: int, low: float, high: float) -> str:
    """Draw values between ``low`` and ``high``, in at most ``width`` columns: the last value of each."""
    if not values:
        return ""
    count = min(width, len(values))
    columns = [values[(k + 1) * len(values) // count - 1] for k in range(count)]
    span = high - low
    steps = [(len(BARS) - 1) * (value - low) / span if span > 0 else 0.0 for value in columns]
    return "".join(BARS[min(len(BARS) - 1, max(0, round(step)))] for step in steps)


@dataclass(frozen=True)
class PeerColumn:
    """A column of the table of peers.

    Attributes:
        width: in characters; of a stretched one the least.
        key: sorts by it.
        spare: the terminal must be this wide for the column to be shown.
    """

    title: str
    width: int
    key: Callable[[Peer], float | str]
    right: bool = True
    spare: int = 0
    stretch: bool = False


COLUMNS = (
    PeerColumn("peer", 5, lambda peer: peer.peer),
    PeerColumn("phase", 10, lambda peer: peer.phase, right=False),
    PeerColumn("round", 5, lambda peer: peer.rounds_done),
    PeerColumn("acc %", 5, lambda peer: -1.0 if peer.accuracy is None else peer.accuracy),
    PeerColumn(
        "accuracy", 8, lambda peer: -1.0 if peer.accuracy is None else peer.accuracy, right=False, stretch=True
    ),
    PeerColumn("loss", 6, lambda peer: -1.0 if peer.loss is None else peer.loss),
    PeerColumn("loss curve", 8, lambda peer: -1.0 if peer.loss is None else peer.loss, right=False, stretch=True),
    PeerColumn("sent", 7, lambda peer: peer.sent),
    PeerColumn("received", 8, lambda peer: peer.received, spare=90),
    PeerColumn("missed", 6, lambda peer: peer.missing, spare=98),
    PeerColumn("!", 2, lambda peer: peer.warnings),
    PeerColumn("waits for", 10, lambda peer: len(peer.status.waiting_for) if peer.status else 0, right=False),
)


def columns_for(width: int) -> list[tuple[PeerColumn, int]]:
    """Return the columns that fit, with their widths: sparklines take what is left, up to 30 characters each."""
    shown = [column for column in COLUMNS if width >= column.spare]
    while sum(column.width + 1 for column in shown) > width and len(shown) > 4:
        shown.pop()
    spare = width - sum(column.width + 1 for column in shown)
    stretched = sum(column.stretch for column in shown) or 1
    more = max(0, min(22, spare // stretched))
    return [(column, column.width + (more if column.stretch else 0)) for column in shown]


def header(columns: Sequence[tuple[PeerColumn, int]], sort: str, reverse: bool) -> Text:
    """Return the titles; an arrow marks the column that sorts."""
    text = Text()
    for column, width in columns:
        mark = ("▼" if reverse else "▲") if column.title == sort else ""
        title = column.title[: width - len(mark)] + mark
        text.append(f"{title:>{width}} " if column.right else f"{title:<{width}} ", "bold")
    return text


@dataclass(frozen=True)
class Scales:
    """The ranges of the sparklines, the same for all peers, so that they can be compared."""

    accuracy: tuple[float, float]
    loss: tuple[float, float]

    @classmethod
    def of(cls, state: RunState) -> Scales:
        accuracies = [value for peer in state.peers for value in peer.accuracies.values()]
        losses = [value for peer in state.peers for value in peer.losses.values()]
        return cls(_range(accuracies), _range(losses))


def _range(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 1.0)


style_of = cache(Style.parse)
"""Parse a style once."""


def row(
    peer: Peer, columns: Sequence[tuple[PeerColumn, int]], rounds: int, scales: Scales, background: str = ""
) -> list[Segment]:
    """Return the line of a peer. Segments and not Text, which takes ten times as long to render."""
    segments = []
    for column, width in columns:
        content, style = _cell(peer, column.title, width, rounds, scales)
        content = printable(content)[:width]
        text = f"{content:>{width}} " if column.right else f"{content:<{width}} "
        segments.append(Segment(text, style_of(f"{style} {background}".strip() or "none")))
    return segments


def _cell(peer: Peer, title: str, width: int, rounds: int, scales: Scales) -> tuple[str, str]:
    status = peer.status
    if title == "peer":
        return f"{peer.peer}{'*' if peer.attack else ''}", "bold red" if peer.attack else "bold"
    if title == "phase":
        return peer.phase, PHASES.get(peer.phase, "")
    if title == "round":
        return str(peer.rounds_done), "dim" if peer.rounds_done >= rounds else ""
    if title == "acc %":
        return formatting.percent(peer.accuracy), ""
    if title == "accuracy":
        return sparkline(list(peer.accuracies.values()), width, *scales.accuracy), "green"
    if title == "loss":
        return "–" if peer.loss is None else f"{peer.loss:.4f}"[:6], ""
    if title == "loss curve":
        return sparkline(list(peer.losses.values()), width, *scales.loss), "yellow"
    if title == "sent":
        return formatting.size(peer.sent), ""
    if title == "received":
        return formatting.size(peer.received), ""
    if title == "missed":
        return str(peer.missing or "·"), "red" if peer.missing else "dim"
    if title == "!":
        return str(min(peer.warnings, 99) or "·"), "bold red" if peer.warnings else "dim"
    waits = status.waiting_for if status is not None and status.phase == "waiting" else []
    return formatting.ids(waits), "yellow"


def heat_map(state: RunState, width: int, height: int) -> list[list[Segment]]:
    """Return the mixing weights as colored cells: a row per peer, and columns in the same order.

    The weights on the diagonal do not set the scale: they are often so large that all others would look alike.
    """
    weights = state.weights()
    if weights is None:
        return [_dim("no mixing weights yet, or the method has none")]
    peers = [peer.peer for peer in state.peers]
    margin = len(str(peers[-1])) + 1
    cell = min(2, (width - margin) // len(peers))
    if cell < 1:
        return [_dim(f"{len(peers)} columns do not fit here: `p2pfl graph RUN --png FILE` draws them")]
    largest = max((w for i, line in enumerate(weights) for j, w in enumerate(line) if i != j), default=0.0)
    tens = "".join(f"{peer if peer % 5 == 0 else '':<{cell}}"[: max(cell, 2)] for peer in peers)
    lines = [_dim(" " * margin + tens[: cell * len(peers)])]
    for peer, line in zip(peers, weights, strict=True):
        steps = [_step(weight / largest if largest > 0 else 0.0) for weight in line]
        segments = _dim(f"{peer:>{margin - 1}} ")
        segments += [Segment(_shade(step) * (cell * len(list(same))), _style(step)) for step, same in groupby(steps)]
        lines.append(segments)
    return [*lines[: max(1, height - 1)], _dim(f"row gives to column; brightest: {largest:.3f}")]


def _dim(text: str) -> list[Segment]:
    return [Segment(text, style_of("dim"))]


def _step(strength: float) -> int:
    """Return the color of a weight, from 0 to STEPS; only weight 0 has color 0."""
    part: float = min(1.0, max(0.0, strength)) ** 0.7  # so that small weights differ from none
    return math.ceil(part * STEPS)


def _shade(step: int) -> str:
    """Return what tells a weight from others without colors."""
    return " " if wants_color() else SHADES[math.ceil(step * (len(SHADES) - 1) / STEPS)]


@cache
def _style(step: int) -> Style:
    part = step / STEPS
    color = "#" + "".join(f"{round(low + part * (high - low)):02x}" for low, high in zip(COLD, HOT, strict=True))
    return Style(bgcolor=color)


def summary(state: RunState, name: str, times: str, width: int) -> Text:
    """Return the line on top: name, rounds, accuracy, traffic, time."""
    snapshot = state.snapshot
    low, high = min(snapshot.done), max(snapshot.done)
    rounds = f"{low}" if low == high else f"{low}–{high}"
    full = max(6, min(30, width - 80))
    filled = round(full * snapshot.fraction)
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{printable(name)} ", "bold")
    text.append(f"round {rounds}/{state.rounds} ")
    text.append("━" * filled, "green")
    text.append("━" * (full - filled), "dim")
    text.append(
        f" accuracy {formatting.percent(snapshot.accuracy)} % · {formatting.size(snapshot.bytes_out)} sent · {times}"
    )
    if attackers := [peer.peer for peer in state.peers if peer.attack]:
        text.append(f" · * attackers, not in it: {formatting.ids(attackers)}")
    return text


def phases(state: RunState) -> Text:
    """Return how many peers are in each phase, and the slowest one."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for phase, count in state.snapshot.phases.most_common():
        text.append(f"{count} {phase}  ", PHASES.get(phase, ""))
    slowest = state.snapshot.slowest
    if slowest is not None and len(set(state.snapshot.done)) > 1:
        text.append(f"slowest: peer {slowest.peer} in round {slowest.t}")
    return text
