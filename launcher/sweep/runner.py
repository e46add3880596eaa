"""Run the runs of a sweep to the end: several at a time, as many as fit into memory.

What is finished is kept, what was interrupted is resumed, and what an earlier sweep has left running is waited for.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from launcher.errors import SweepError
from launcher.facts.sweep_folder import SweepFolder
from launcher.formatting import size
from launcher.sweep import memory
from launcher.sweep.jobs import Job, wait
from p2pfl.control_groups import available_memory, total_memory, usable_cores
from p2pfl.errors import DataError, ModelError, P2pflError, RunFileError, WriteError
from p2pfl.run_folder.folder import RunFolder
from p2pfl.stop_signals import asks_to_kill, counted_interrupts

POLL_INTERVAL = 0.25
"""Seconds between two looks at the running jobs, if none ends."""


class RunSource:
    """Says which runs to start, and learns how they end."""

    @property
    def total(self) -> int:
        """Number of runs of the whole sweep."""
        raise NotImplementedError

    def next(self) -> str | None:
        """Return the run to start next; None if there is none now, or none any more."""
        raise NotImplementedError

    def back(self, name: str) -> None:
        """Take back a run that cannot start yet."""
        raise NotImplementedError

    def prepare(self, name: str) -> None:
        """Write the plan of a run if it has none yet. Raises RunFileError, DataError or ModelError: it is invalid."""

    def prunes(self, job: Job) -> bool:
        """Return whether to stop a running run, as the others do better."""
        return False

    def not_started(self, name: str) -> None:
        """A run could not start for want of resources, so others may fail to start too."""

    def ended(self, job: Job, failure: str) -> None:
        """A run has ended; ``failure`` says why if it has not finished."""


class Queue(RunSource):
    """The runs of a grid, in order: those that were interrupted first, so that they leave nothing half done.

    Args:
        only: run nothing but this one.
    """

    def __init__(self, folder: SweepFolder, only: str | None = None) -> None:
        names = [point.name for point in folder.sweep.points] if only is None else [only]
        states = {name: folder.state(name) for name in names}
        self._total = len(states)
        self.finished = [name for name, state in states.items() if state == "finished"]
        order = ("running", "interrupted", "waiting")
        self._left = [name for wanted in order for name, state in states.items() if state == wanted]

    @property
    def total(self) -> int:
        return self._total

    def next(self) -> str | None:
        return self._left.pop(0) if self._left else None

    def back(self, name: str) -> None:
        self._left.insert(0, name)


@dataclass
class SweepProgress:
    """How far a sweep is."""

    total: int
    finished: int = 0
    pruned: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    """Why each failed run has not finished, by name."""
    jobs: list[Job] = field(default_factory=list)
    """Those that are running."""
    waits: str = ""
    """Why no further run starts, although more could."""
    stopping: bool = False

    @property
    def ended(self) -> int:
        return self.finished + self.pruned + len(self.failures)


class ProgressObserver(Protocol):
    """Shows the progress of a sweep."""

    def update(self, progress: SweepProgress, *, now: bool = False) -> None:
        """Show the current state; called several times a second."""

    def print(self, line: str) -> None:
        """Print a permanent line."""


class Runner:
    """Runs a sweep.

    Args:
        most: maximum number of runs at the same time.
        available: returns the bytes of memory that new processes can have.
    """

    def __init__(
        self,
        folder: SweepFolder,
        source: RunSource,
        display: ProgressObserver,
        most: int,
        finished: int = 0,
        available: Callable[[], int] = available_memory,
    ) -> None:
        self.progress = SweepProgress(source.total, finished)
        self._folder = folder
        self._source = source
        self._display = display
        self._most = most
        self._available = available
        self._clock = folder.sweep.clock
        self._ends = "ends, and starts again later" if self._clock else "writes checkpoints and ends"
        self._peers: dict[str, int] = {}
        self._alike: dict[str, str] = {}
        self._estimate = memory.Estimate(self._peers, self._alike, folder.memory)
        for name in self._estimate.measured:
            with suppress(P2pflError):
                self._describe(name)

    def run(self) -> SweepProgress:
        """Run until nothing is left, or until a signal has stopped every run. An error stops the running ones."""
        try:
            return self._run()
        except BaseException:
            for job in self.progress.jobs:
                job.stop()
                self._display.print(f"{job.name}: stopping: it {self._ends}")
            raise

    def _run(self) -> SweepProgress:
        progress = self.progress
        with counted_interrupts(signal.SIGTERM) as signals:
            while True:
                if signals and not progress.stopping:
                    progress.stopping, progress.waits = True, ""
                    if progress.jobs:
                        self._display.print(f"stopping: every run {self._ends}; press Ctrl-C again to kill them")
                for job in progress.jobs if signals else ():
                    job.stop(kill=asks_to_kill(signals))
                if not progress.stopping:
                    self._start()
                if not progress.jobs:
                    self._display.update(progress, now=True)
                    return progress
                wait(progress.jobs, POLL_INTERVAL)
                self._look()
                self._display.update(progress)

    def _start(self) -> None:
        """Start the runs that fit."""
        progress = self.progress
        progress.waits = ""
        while len(progress.jobs) < self._most and (name := self._source.next()) is not None:
            adopt = self._folder.state(name) == "running"
            begun = self._folder.run(name).run_file.exists()
            try:
                self._source.prepare(name)
            except (RunFileError, DataError, ModelError) as error:  # others concern all runs
                self._end(Job(self._folder, name, adopt=True), "; ".join(str(error).splitlines()))
                continue
            try:
                if not adopt and (reason := self._no_room(name)):
                    if progress.jobs:
                        self._source.back(name)
                        progress.waits = reason
                        return
                    if self._estimate.exceeds(name, total_memory()):  # it would not fit later either
                        self._end(Job(self._folder, name, adopt=True), f"not started: {reason}")
                        continue
                    raise SweepError(f"not started: {reason}")
                progress.jobs.append(Job(self._folder, name, adopt=adopt))
            except (SweepError, WriteError) as error:  # this one may start when the sweep is continued
                self._source.not_started(name)
                self._fail(name, str(error))
                continue
            except P2pflError as error:  # of this run only: the others go on
                self._end(Job(self._folder, name, adopt=True), str(error))
                continue
            resumed = "started again" if self._clock else "resumed"
            self._display.print(f"{name}: {'found running' if adopt else resumed if begun else 'started'}")

    def _no_room(self, name: str) -> str:
        """Say why a run does not fit into memory beside those that run; empty if it does."""
        self._describe(name)
        running = {job.name: job.memory for job in self.progress.jobs}
        free = self._available()
        if self._estimate.fits(name, running, free, total_memory()):
            return ""
        needed = self._estimate.of(name)
        if needed is None:
            return "the memory of the first run is being measured"
        return f"it needs about {size(needed)} of memory beside the running ones, and {size(free)} are available"

    def _describe(self, name: str) -> None:
        """Read from its run file what the estimate of a run's memory depends on."""
        if name not in self._peers:
            plain = RunFolder(self._folder.plan(name).parent).settings
            self._peers[name] = plain["peers"]
            self._alike[name] = _without_seed(plain)

    def _look(self) -> None:
        """See what the running jobs do, and which have ended."""
        for job in list(self.progress.jobs):
            if job.running():
                if job.measure() and job.busy():
                    self._note_memory(job)
                if not job.pruned and not self.progress.stopping and self._source.prunes(job):
                    job.pruned = True
                    job.stop()
                continue
            self.progress.jobs.remove(job)
            job.close()
            failure = job.failure()
            if not failure:
                self._note_memory(job)
            if job.adopted and failure and not self.progress.stopping:
                self._source.back(job.name)  # no launcher was there to restart its peers
            else:
                self._end(job, failure)

    def _note_memory(self, job: Job) -> None:
        """Keep what a run has taken, for the estimates of others."""
        known = self._estimate.measured.get(job.name, 0)
        if job.peak > known:
            self._describe(job.name)
            self._estimate.measured[job.name] = job.peak
            self._folder.write_memory({job.name: job.peak})

    def _end(self, job: Job, failure: str) -> None:
        progress = self.progress
        if not failure or job.pruned or not progress.stopping:  # what was stopped is resumed later
            self._source.ended(job, failure)
        if job.pruned and failure:
            progress.pruned += 1
            self._display.print(f"{job.name}: pruned")
        elif not failure:
            progress.finished += 1
            self._display.print(f"{job.name}: finished{job.result()}")
        elif not progress.stopping:
            self._fail(job.name, failure)

    def _fail(self, name: str, failure: str) -> None:
        self.progress.failures[name] = failure
        self._display.print(f"{name}: failed: {failure}")


def _without_seed(plain: Mapping[str, Any]) -> str:
    return repr({key: value for key, value in plain.items() if key != "seed"})


def default_jobs(folder: SweepFolder) -> int:
    """Return how many runs at the same time use the host well.

    A simulated run computes in one process. The peers of one launched run already share all cores.
    """
    return usable_cores() if folder.sweep.simulate else 1
