"""Launch a run, or any command, in processes of its own, and measure it from outside."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import psutil

from benchmarks.bench import procfs
from benchmarks.bench.procfs import Memory
from p2pfl.session import metrics

RESERVE = 1 << 30
"""Bytes of memory that must stay available; a run that leaves less is killed, before the kernel kills something."""
PSS_INTERVAL = 0.5
POLL_INTERVAL = 0.25
SAMPLING = 0.1
"""Most of one core that reading memory may take: walking the page tables of 500 peers takes seconds."""
EXIT_TIMEOUT = 10.0
"""Seconds until killed processes must have ended."""
STAMP = re.compile(r"\[?(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)[.,](\d{3})")

RunTree = dict[str, Any]
"""The contents of a run file."""


@dataclass
class Measurement:
    """What was measured of one run.

    Attributes:
        failure: why there are no figures; empty if it ended well.
        seconds: from the command to its end.
        cpu: CPU seconds of all its processes.
        written: bytes written to disks.
        peak: peak of the summed PSS of all processes, bytes, sampled.
        memory: mean PSS of a peer by kind, at the peak.
        private: most that one peer had allocated at a time, bytes.
        launcher, warm: (seconds since the command, CPU seconds of that process until then), sampled.
        rounds: by peer, when each of its rounds ended, in seconds since the command.
        cpu_a_round: CPU seconds of a peer's round, as ``recorded_cpu``.
    """

    failure: str = ""
    seconds: float = 0.0
    cpu: float = 0.0
    written: int = 0
    peak: int = 0
    memory: Memory = field(default_factory=Memory)
    private: float = 0.0
    launcher: list[tuple[float, float]] = field(default_factory=list)
    warm: list[tuple[float, float]] = field(default_factory=list)
    rounds: list[list[float]] = field(default_factory=list)
    cpu_a_round: float | None = None

    @property
    def all_in_round_1(self) -> float | None:
        """Seconds until every peer had finished round 0; None if one never did."""
        return None if self.failure else all_after(self.rounds, 1)

    @property
    def last_round(self) -> float | None:
        """Seconds until the first peer had finished its last round."""
        return min((times[-1] for times in self.rounds if times), default=None)

    @property
    def seconds_a_round(self) -> float | None:
        """Seconds of a round of all peers, without the first two and the last; None if it has no others."""
        return None if self.failure else seconds_a_round(self.rounds)

    @property
    def seconds_a_round_alone(self) -> float | None:
        """The same for a run without neighbors."""
        return None if self.failure else seconds_a_round_alone(self.rounds)


class Slope(NamedTuple):
    """Two runs that differ in their number of rounds: what a round takes without start and end.

    Attributes:
        rounds: by how many rounds of a peer they differ, in all.
    """

    short: Measurement
    long: Measurement
    rounds: int

    @property
    def failure(self) -> str:
        return self.short.failure or self.long.failure

    @property
    def cpu(self) -> float | None:
        """CPU seconds of a peer's round, of all processes; None if a run failed."""
        return None if self.failure else (self.long.cpu - self.short.cpu) / self.rounds


def slope(how: Callable[[RunTree], Measurement], tree: RunTree, short: int) -> Slope:
    """Run ``tree`` twice: with ``short`` rounds, and with its own number of rounds."""
    return Slope(how({**tree, "rounds": short}), how(tree), (tree["rounds"] - short) * tree["peers"])


def all_after(rounds: Sequence[Sequence[float]], count: int) -> float | None:
    """When the last peer had ended ``count`` rounds; None if one never did."""
    if not rounds or min(map(len, rounds)) < count:
        return None
    return max(times[count - 1] for times in rounds)


def seconds_a_round(rounds: Sequence[Sequence[float]], skip: int = 2) -> float | None:
    """Mean seconds of a round, without the first ``skip``, which warm up, and the last, which evaluates."""
    count = min(map(len, rounds), default=0) - 1
    if count <= skip:
        return None
    first, last = (max(times[ended - 1] for times in rounds) for ended in (skip, count))
    return (last - first) / (count - skip)


def seconds_a_round_alone(rounds: Sequence[Sequence[float]], skip: int = 2) -> float | None:
    """As ``seconds_a_round``, if peers do not wait for each other.

    One may have ended before the next gets a compute slot, or they may take turns: what counts is the time in which
    any of them was in one of the rounds.
    """
    count = min(map(len, rounds), default=0) - 1
    if count <= skip:
        return None
    busy, end = 0.0, float("-inf")
    for first, last in sorted((times[skip - 1], times[count - 1]) for times in rounds):
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return busy / (count - skip)


def cpu_until(samples: Sequence[tuple[float, float]], second: float | None) -> float | None:
    """CPU seconds at the first sample from ``second`` on, or else at the last."""
    if second is None or not samples:
        return None
    return next((cpu for at, cpu in samples if at >= second), samples[-1][1])


def cpu_fraction(samples: Sequence[tuple[float, float]], since: float | None, until: float | None) -> float | None:
    """The fraction of a core used between two times, by the samples there; None if these span less than 2 s."""
    if since is None or until is None:
        return None
    between = [sample for sample in samples if since <= sample[0] <= until]
    if not between or between[-1][0] - between[0][0] < 2:
        return None
    return (between[-1][1] - between[0][1]) / (between[-1][0] - between[0][0])


def log_times(log: str, event: str, began: float) -> list[float]:
    """Seconds after ``began`` (Unix time) of the lines of a log that contain ``event``."""
    times = []
    for line in log.splitlines():
        if event in line and (found := STAMP.match(line)):
            at = datetime.fromisoformat(f"{found[1]}T{found[2]}.{found[3]}")  # local time, as Python logs it
            times.append(at.timestamp() - began)
    return times


@contextmanager
def scratch_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="p2pfl-bench-")).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def launch(tree: RunTree, *, split: bool = False, timeout: float = 600.0) -> Measurement:
    """Run `p2pfl launch`. ``split`` measures ``Measurement.memory``, which takes longer than the total."""
    return _measure_run("launch", tree, split, timeout)


def simulate(tree: RunTree, *, timeout: float = 600.0) -> Measurement:
    """Run `p2pfl simulate`, in one process."""
    return _measure_run("simulate", tree, False, timeout)


def _measure_run(how: str, tree: RunTree, split: bool, timeout: float) -> Measurement:
    with scratch_folder() as folder:
        file, run = folder / "run.yaml", folder / "run"
        file.write_text(json.dumps(tree))
        command = [sys.executable, "-P", "-m", "launcher.cli", how, str(file), "--run-dir", str(run)]
        measured = measure(command, folder, "peers/*/peer.log", " round done t=", split=split, timeout=timeout)
        measured.cpu_a_round = None if measured.failure else recorded_cpu(run)
        return measured


def recorded_cpu(run: Path, skip: int = 2) -> float | None:
    """CPU seconds of a peer's round by the peers' own records, without the first ``skip`` and the last."""
    records = [record for file in run.glob("peers/*/metrics.jsonl") for record in metrics.read(file)[skip:-1]]
    return fmean(record["cost"]["cpu_seconds"] for record in records) if records else None


def is_accepted(tree: RunTree) -> bool:
    """Whether this version of the project accepts the run file."""
    with scratch_folder() as folder:
        file = folder / "run.yaml"
        file.write_text(json.dumps(tree))
        command = [sys.executable, "-P", "-m", "launcher.cli", "graph", str(file)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def measure(
    command: Sequence[str],
    folder: Path,
    logs: str,
    event: str,
    *,
    environment: Mapping[str, str] | None = None,
    split: bool = False,
    timeout: float = 600.0,
) -> Measurement:
    """Run a command and measure it and its descendants.

    Args:
        folder: holds its output and errors and, in ``run``, its files.
        logs: pattern of the peers' log files in ``run``.
        event: what a log line contains at the end of a round.
        environment: additional variables.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **(environment or {})}
    measured, output, errors = Measurement(), folder / "output", folder / "errors"
    written, cpu = procfs.bytes_written(), _cpu_of_children()
    began, began_at = time.monotonic(), time.time()  # noqa: TID251  # compared with stamps of logs
    with output.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
    sampler = Sampler(process.pid, folder / "run", split, began, measured)
    try:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_INTERVAL)
            sampler.read_cpu()
            if procfs.available() < RESERVE:
                measured.failure = f"stopped: less than {RESERVE >> 30} GiB of memory were left"
            elif time.monotonic() - began > timeout:
                measured.failure = f"stopped after {timeout:.0f} s"
            if measured.failure:
                break
    finally:
        sampler.end()
        kill_tree(process)
    measured.seconds = time.monotonic() - began
    measured.written = procfs.bytes_written() - written
    measured.cpu = _cpu_of_children() - cpu
    measured.rounds = [
        log_times(log.read_text(errors="replace"), event, began_at) for log in sorted((folder / "run").glob(logs))
    ]
    if not measured.failure and process.returncode:
        # Errors first: in one file, a buffered line of the output would come after them.
        lines = [file.read_text(errors="replace").strip().splitlines() for file in (output, errors)]
        last = (lines[1] or lines[0])[-1:]
        measured.failure = f"exit status {process.returncode}: {' '.join(last)[:200]}"
    return measured


class Sampler:
    """Sample the memory of a command's processes on a thread, and their CPU time on request."""

    def __init__(self, pid: int, run: Path, split: bool, began: float, measured: Measurement) -> None:
        self._pid = pid
        self._run = run
        self._split = split
        self._began = began
        self._measured = measured
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read_memory, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def read_cpu(self) -> None:
        """The warm process is the launcher's child with the most children of its own."""
        launcher, *children = [self._pid, *procfs.children(self._pid)]
        at = time.monotonic() - self._began
        if cpu := procfs.cpu_seconds(launcher):
            self._measured.launcher.append((at, cpu))
        warm = max(children, key=lambda child: len(procfs.children(child)), default=None)
        if warm is not None and (cpu := procfs.cpu_seconds(warm)):
            self._measured.warm.append((at, cpu))

    def _read_memory(self) -> None:
        pause = PSS_INTERVAL
        while not self._ended.wait(pause):
            began = time.thread_time()
            processes = procfs.tree(self._pid)
            if self._split:
                found = [procfs.memory(pid, self._run) for pid in processes]
                total = int(sum(memory.total for memory in found))
                peers = found[2:]  # after the launcher and the warm process
                self._measured.private = max([self._measured.private, *(memory.private for memory in peers)])
                if total > self._measured.peak and peers:
                    self._measured.memory = sum(peers, Memory()) / len(peers)
            else:
                total = sum(map(procfs.pss, processes))
            self._measured.peak = max(self._measured.peak, total)
            pause = max(PSS_INTERVAL, (time.thread_time() - began) / SAMPLING)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and its descendants, if it has not ended, and wait for them."""
    descendants = []
    if process.poll() is None:
        for pid in procfs.tree(process.pid):  # the launcher first, which would restart peers
            with suppress(psutil.NoSuchProcess):
                descendants.append(psutil.Process(pid))
                descendants[-1].kill()
    process.wait()
    psutil.wait_procs(descendants, timeout=EXIT_TIMEOUT)  # the next run needs their memory


def cores() -> int:
    """Cores that this process may use: so many peers compute at the same time."""
    return len(os.sched_getaffinity(0))


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
