"""Execute runs in worker processes, within a time budget, the cheapest undecided claim first."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.claims import plan
from benchmarks.claims.claim import Claim
from benchmarks.claims.plan import TUNING_SEED, Task
from benchmarks.claims.store import Store

WORKER = (sys.executable, "-m", "benchmarks.claims.worker")
EXIT_TIMEOUT = 120.0
"""Seconds for the peers of a launched run to stop."""
PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Budget:
    """How much may be run.

    Attributes:
        minutes: no run starts that is expected to end later, and runs that are late are ended and forgotten; None: no
            limit.
        jobs: runs at the same time.
        device: ``cpu`` or ``cuda``; claims of the papers' own sizes are run on ``cuda`` only.
        sockets: each peer of a run is a process.
    """

    minutes: float | None = None
    jobs: int = 1
    device: str = "cpu"
    sockets: bool = False


def version() -> str:
    """The commit and torch's version, for the record."""
    command = ["git", "-C", str(PROJECT), "describe", "--always", "--dirty", "--abbrev=7"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return f"{commit}, torch {torch.__version__.partition('+')[0]}"


@dataclass
class Worker:
    """A worker process, and the run that it executes, if any."""

    process: subprocess.Popen[str]
    task: Task | None = None


class Scheduler:
    """Executes the runs of undecided claims.

    Args:
        say: receives a line per event.
        command: starts a worker.
    """

    def __init__(
        self,
        claims: Sequence[Claim],
        store: Store,
        budget: Budget,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        command: Sequence[str] = WORKER,
    ) -> None:
        self.claims, self.store, self.budget, self.say, self.command = claims, store, budget, say, command
        self.failed: dict[tuple[str, int], str] = {}
        self.workers: list[Worker] = []
        self._code = version()
        self._end = None if budget.minutes is None else time.monotonic() + 60.0 * budget.minutes

    def run(self) -> None:
        """Run until all claims are decided or the budget is spent. The store must be locked."""
        try:
            with selectors.DefaultSelector() as selector:
                while self._start(selector):
                    for ready, _ in selector.select(self._left()):
                        self._finish(ready.data, selector)
                    if self._left() == 0.0:
                        self.say(f"the time is over: {len(self._busy())} runs ended unfinished")
                        return
        finally:
            for worker in self.workers:
                worker.process.terminate()
            for worker in self.workers:
                try:
                    worker.process.wait(EXIT_TIMEOUT)
                except subprocess.TimeoutExpired:
                    worker.process.kill()
                with worker.process:  # closes its pipes and waits for it
                    pass
            self.workers.clear()

    def _left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def _busy(self) -> list[tuple[str, int]]:
        """Return the runs that are being executed."""
        return [(worker.task.key, worker.task.seed) for worker in self.workers if worker.task is not None]

    def _start(self, selector: selectors.BaseSelector) -> bool:
        """Give a run to each idle worker. Returns whether any is being executed."""
        while len(self._busy()) < self.budget.jobs and (task := self._next()):
            worker = next((worker for worker in self.workers if worker.task is None), None)
            if worker is None:
                pipe = subprocess.PIPE
                process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, text=True, cwd=PROJECT)
                worker = Worker(process)
                self.workers.append(worker)
                selector.register(process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
            worker.task = task
            run = {"key": task.key, "seed": task.seed, "tree": task.tree, "probe": task.probe}
            request = {**run, "code": self._code, "sockets": self.budget.sockets}
            assert worker.process.stdin is not None
            worker.process.stdin.write(json.dumps(request) + "\n")
            worker.process.stdin.flush()
        return bool(self._busy())

    def _finish(self, worker: Worker, selector: selectors.BaseSelector) -> None:
        """Take note of a run that has ended, or of a worker that ended instead."""
        assert worker.process.stdout is not None
        assert worker.task is not None
        answered, task = worker.process.stdout.readline(), worker.task
        name = f"{task.tree['algorithm']['name']} seed {task.seed} ({task.key})"
        worker.task = None
        if answered.endswith("\n"):
            record = json.loads(answered)
            self.store.add(record)
            self.say(f"{name}: {record['seconds']:.0f} s, expected {task.seconds:.0f} s")
            return
        selector.unregister(worker.process.stdout)
        self.workers.remove(worker)
        with worker.process:
            pass
        self.failed[task.key, task.seed] = f"{name} failed with exit status {worker.process.returncode}"
        self.say(self.failed[task.key, task.seed])

    def _next(self) -> Task | None:
        """Choose the next run: the first missing one of the cheapest claim that fits and that no worker executes."""
        left, busy = self._left(), self._busy()
        for _, claim, tasks in plan.undecided(self.claims, self.store, self.budget.device):
            if any((task.key, task.seed) in self.failed for task in tasks):
                continue
            tuned = not any(task.seed == TUNING_SEED for task in tasks)
            for task in tasks:
                late = left is not None and task.seconds > left
                if not late and (tuned or task.seed == TUNING_SEED) and (task.key, task.seed) not in busy:
                    self.say(f"{claim.where}, {claim.name}: {task.tree['algorithm']['name']}, seed {task.seed}")
                    return task
        return None
