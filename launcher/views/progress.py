"""Progress of a run: a live display on a terminal, occasional lines otherwise."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launcher import formatting
from launcher.facts.snapshot import Snapshot
from p2pfl import PeerId
from p2pfl.attackers import attacks
from p2pfl.run_folder.folder import RunFolder, Status
from p2pfl.terminal import printable

UPDATE_INTERVAL = 0.25
"""Minimum seconds between two updates of a display."""
MAX_LOAD = 0.01
"""Maximum fraction of a core that the updates take: with many peers there are fewer."""
LINE_INTERVAL = 10.0
"""Seconds after which to print a line; one is also printed after each tenth of the rounds."""


class Progress(ABC):
    """A display of a running run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @abstractmethod
    def update(self, snapshot: Snapshot) -> None:
        """Show the state of the run; called several times a second."""

    @abstractmethod
    def print(self, line: str) -> None:
        """Print a permanent line."""


def progress_on(console: Console) -> Progress:
    """Return the display that suits the console."""
    return LiveProgress(console) if console.is_terminal else LineProgress(console)


def print_run_path(folder: RunFolder, console: Console) -> None:
    """Print the run folder, which `p2pfl logs -f` and `p2pfl stop` need, before the run starts."""
    console.print(f"run: {folder.root}", soft_wrap=True)  # a wrapped path could not be copied


class Clock:
    """Elapsed time, and an estimate of the remaining time after ``least`` was done."""

    def __init__(self, least: float = 0.0) -> None:
        self.began = time.monotonic()
        self._least = least
        self._first: tuple[float, float] | None = None

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def remaining(self, done: float, total: float = 1.0) -> float | None:
        """Estimate the remaining seconds from the pace since something was done first; None before that."""
        if done <= 0:
            return None
        if self._first is None:
            self._first = self.elapsed, done
        since, start = self._first
        if done <= start or done - start < self._least:
            return None
        return (self.elapsed - since) / (done - start) * (total - done)

    def describe(self, done: float, total: float = 1.0) -> str:
        """``1:00 elapsed, about 2:00 left``"""
        seconds = self.remaining(done, total)
        remaining = "" if seconds is None else f", about {formatting.duration(seconds)} left"
        return f"{formatting.duration(self.elapsed)} elapsed{remaining}"


class Display:
    """Shows the state of the run in ``folder`` on ``progress``; ``is_stale`` as for ``Snapshot.take``."""

    def __init__(
        self,
        progress: Progress,
        folder: RunFolder,
        peers: Sequence[PeerId],
        rounds: int,
        is_stale: Callable[[Status], bool] = lambda status: False,
    ) -> None:
        self._progress = progress
        self._take = partial(Snapshot.take, folder, peers, rounds, is_stale, attacks(folder.settings))
        self._due = 0.0

    def update(self, *, now: bool = False) -> None:
        """Show the current state if an update is due, or ``now``."""
        if now or time.monotonic() >= self._due:
            began = time.thread_time()
            self._progress.update(self._take())
            self._due = time.monotonic() + max(UPDATE_INTERVAL, (time.thread_time() - began) / MAX_LOAD)


def bar(before: str, fraction: float, after: str) -> Table:
    """Return a line with a bar between two texts."""
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_row(before, ProgressBar(total=1.0, completed=fraction), after)
    return line


class LiveProgress(Progress):
    """Four lines that are updated in place."""

    def __init__(self, console: Console) -> None:
        self._clock = Clock()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, snapshot: Snapshot) -> None:
        head = bar(f"rounds {_rounds(snapshot)}", snapshot.fraction, self._clock.describe(snapshot.fraction))
        lines = [f"peers: {_phases(snapshot)}", _slowest(snapshot), _totals(snapshot)]
        texts = (Text(printable(line), overflow="ellipsis", no_wrap=True) for line in lines)
        self._live.update(Group(head, *texts), refresh=True)

    def print(self, line: str) -> None:
        self._live.console.print(line)


class LineProgress(Progress):
    """A line after each tenth of the rounds, and after LINE_INTERVAL without one."""

    def __init__(self, console: Console) -> None:
        self._clock = Clock()
        self._console = console
        self._tenths = 0
        self._last = self._clock.began

    def update(self, snapshot: Snapshot) -> None:
        tenths = int(10 * snapshot.fraction)
        if tenths > self._tenths or time.monotonic() - self._last >= LINE_INTERVAL:
            self._tenths = tenths
            self._last = time.monotonic()
            parts = [f"rounds {_rounds(snapshot)}", _totals(snapshot), self._clock.describe(snapshot.fraction)]
            if snapshot.fraction < 1:
                parts.append(_slowest(snapshot))
            self.print(" | ".join(parts))

    def print(self, line: str) -> None:
        # Not the built-in print: with --json the console prints to stderr.
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
        return "no peer has started yet"
    if status.phase == "starting":
        return f"slowest: peer {status.peer}, starting"
    doing = f"waiting for {formatting.ids(status.waiting_for)}" if status.waiting_for else status.phase
    return f"slowest: peer {status.peer} in round {status.t}, {doing}"


def _totals(snapshot: Snapshot) -> str:
    return f"accuracy {formatting.percent(snapshot.accuracy)} %, sent {formatting.size(snapshot.bytes_out)}"
