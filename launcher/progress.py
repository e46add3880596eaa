"""Progress of a run: a live display on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launcher import text
from launcher.snapshot import Snapshot
from p2pfl.runfolder import RunFolder

LINE_EVERY = 10.0
"""Seconds between two lines, at most; a line also comes with each tenth of the rounds."""


class Progress(Protocol):
    """What follows a run on somebody's screen."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, snapshot: Snapshot) -> None:
        """Show the state of the run; called several times a second."""

    def say(self, line: str) -> None:
        """Show a line that stays."""


def progress_on(console: Console) -> Progress:
    return LiveProgress(console) if console.is_terminal else LineProgress(console)


def tell(folder: RunFolder, console: Console) -> None:
    """Say where a run is, before it begins: `p2pfl logs -f` and `p2pfl stop` need to know."""
    console.print(f"run: {folder.root}", soft_wrap=True)  # a path in two lines could not be copied


class Clock:
    """Elapsed time, and an estimate of what is left."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._first: tuple[float, float] | None = None

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def left(self, fraction: float) -> float | None:
        """Seconds to the end at the mean pace since the first completed round; None before there is a pace."""
        if fraction <= 0:
            return None
        if self._first is None:
            self._first = self.elapsed, fraction
        since, start = self._first
        if fraction <= start:
            return None
        return (self.elapsed - since) / (fraction - start) * (1 - fraction)

    def describe(self, snapshot: Snapshot) -> str:
        left = self.left(snapshot.fraction)
        remaining = "" if left is None else f", about {text.duration(left)} left"
        return f"{text.duration(self.elapsed)} elapsed{remaining}"


class LiveProgress:
    """Four lines that change in place."""

    def __init__(self, console: Console) -> None:
        self._clock = Clock()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, snapshot: Snapshot) -> None:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            f"rounds {_rounds(snapshot)}",
            ProgressBar(total=1.0, completed=snapshot.fraction),
            self._clock.describe(snapshot),
        )
        lines = [f"peers: {_phases(snapshot)}", _slowest(snapshot), _gains(snapshot)]
        self._live.update(
            Group(bar, *(Text(line, overflow="ellipsis", no_wrap=True) for line in lines)), refresh=True
        )

    def say(self, line: str) -> None:
        self._live.console.print(line)


class LineProgress:
    """One line for each tenth of the rounds, and one when nothing was said for a while."""

    def __init__(self, console: Console) -> None:
        self._clock = Clock()
        self._console = console
        self._tenths = 0
        self._last = self._clock.began

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, snapshot: Snapshot) -> None:
        tenths = int(10 * snapshot.fraction)
        if tenths > self._tenths or time.monotonic() - self._last >= LINE_EVERY:
            self._tenths = tenths
            self._last = time.monotonic()
            parts = [f"rounds {_rounds(snapshot)}", _gains(snapshot), self._clock.describe(snapshot)]
            if snapshot.fraction < 1:
                parts.append(_slowest(snapshot))
            self.say(" | ".join(parts))

    def say(self, line: str) -> None:
        # Python's own print would do, were it not for --json, which moves everything but JSON to stderr.
        self._console.print(line, soft_wrap=True)


def _rounds(snapshot: Snapshot) -> str:
    low, high = min(snapshot.done), max(snapshot.done)
    spread = "" if low == high else f" ({low} to {high})"
    return f"{sum(snapshot.done) // snapshot.peers}/{snapshot.rounds}{spread}"


def _phases(snapshot: Snapshot) -> str:
    return ", ".join(f"{count} {phase}" for phase, count in snapshot.phases.most_common())


def _slowest(snapshot: Snapshot) -> str:
    status = snapshot.slowest
    if status is None:
        return "no peer is up yet"
    doing = f"waits for {text.ids(status.waiting_for)}" if status.waiting_for else status.phase
    return f"slowest: peer {status.peer} in round {status.t}, {doing}"


def _gains(snapshot: Snapshot) -> str:
    return f"accuracy {text.percent(snapshot.accuracy)} %, sent {text.size(snapshot.bytes_out)}"
