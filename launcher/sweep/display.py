"""Progress of a sweep: a live display on a terminal, a line per event otherwise."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launcher import formatting
from launcher.sweep.jobs import Job
from launcher.sweep.runner import SweepProgress
from launcher.views.progress import LINE_INTERVAL, MAX_LOAD, UPDATE_INTERVAL, Clock, bar
from p2pfl.terminal import printable

LEAST_RUNS = 0.2
"""Runs to complete before the remaining time is estimated: loading data and resuming take longer than training."""
SHOWN_JOBS = 12
"""Running runs that the live display lists."""


class SweepDisplay:
    """Shows the progress of a sweep: on a terminal a bar for the sweep and for each running run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._clock = Clock(LEAST_RUNS)
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._due = 0.0
        self._printed = self._clock.began

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def print(self, line: str) -> None:
        """Print a permanent line."""
        self._console.print(line, soft_wrap=True)
        self._printed = time.monotonic()

    def update(self, progress: SweepProgress, *, now: bool = False) -> None:
        """Show the state if an update is due, or ``now``."""
        if not now and time.monotonic() < self._due:
            return
        began = time.thread_time()
        if self._live is not None:
            self._live.update(self._picture(progress), refresh=True)
        elif time.monotonic() - self._printed >= LINE_INTERVAL:
            done = progress.ended + sum(map(_fraction, progress.jobs))
            self.print(f"{_counts(progress)} | {self._clock.describe(done, progress.total)}")
        self._due = time.monotonic() + max(UPDATE_INTERVAL, (time.thread_time() - began) / MAX_LOAD)

    def _picture(self, progress: SweepProgress) -> Group:
        jobs = progress.jobs[:SHOWN_JOBS]
        fractions = {job.name: _fraction(job) for job in jobs}
        done = progress.ended + sum(fractions.values())
        head = bar(_counts(progress), done / max(progress.total, 1), self._clock.describe(done, progress.total))
        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(no_wrap=True, overflow="ellipsis", ratio=3)
        rows.add_column(ratio=2)
        for _ in range(4):
            rows.add_column(no_wrap=True, justify="right")
        for job in jobs:
            rows.add_row(
                f"  {printable(job.name)}", ProgressBar(total=1.0, completed=fractions[job.name]), *_job(job)
            )
        notes = [f"  and {len(progress.jobs) - len(jobs)} more"] if len(progress.jobs) > len(jobs) else []
        if progress.stopping:
            notes.append("stopping")
        elif progress.waits:
            notes.append(f"next run waits: {progress.waits}")
        return Group(head, rows, *(Text(note, overflow="ellipsis", no_wrap=True, style="dim") for note in notes))


def _fraction(job: Job) -> float:
    snapshot = job.snapshot()
    return 0.0 if snapshot is None else snapshot.fraction


def _job(job: Job) -> tuple[str, str, str, str]:
    """Rounds, accuracy, memory and time of a running run."""
    snapshot = job.snapshot()
    memory = formatting.size(job.memory) if job.memory else ""
    if snapshot is None:
        return "starting", "", memory, formatting.duration(job.seconds)
    rounds = f"round {sum(snapshot.done) // snapshot.peers}/{snapshot.rounds}"
    accuracy = "" if snapshot.accuracy is None else f"{formatting.percent(snapshot.accuracy)} %"
    return rounds, accuracy, memory, formatting.duration(job.seconds)


def _counts(progress: SweepProgress) -> str:
    parts = [f"runs {progress.ended}/{progress.total}"]
    if progress.jobs:
        parts.append(f"{len(progress.jobs)} running")
    if progress.pruned:
        parts.append(f"{progress.pruned} pruned")
    if progress.failures:
        parts.append(f"{len(progress.failures)} failed")
    return ", ".join(parts)
