"""The folder of a sweep.

    sweeps/quick4-3fa91c2e/
        sweep.yaml             what was asked, and the runs that follow from it     (Sweep)
        plans/NAME/run.yaml    the resolved run file of a run, with its plug-ins
        runs/NAME/             its run folder, as `p2pfl launch` and `simulate` make it
        logs/NAME.log          what its command printed; locked as long as that command runs
        memory.json            the measured memory of runs, in bytes
        trials.jsonl           journal of the search (`--optuna`)
        lock                   locked as long as a `p2pfl sweep` works on this folder

What has happened is read from the run folders only: nothing else would have to agree with them after a crash.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from launcher.errors import SweepError
from launcher.facts.processes import find_process, is_alive, outcome
from p2pfl.errors import RunFolderError, UnsuitableFileSystem
from p2pfl.file_locks import lock
from p2pfl.run_folder.files import is_file, read_json, write_atomically, write_errors, write_json
from p2pfl.run_folder.folder import RunFolder

SweepRunState = Literal["waiting", "running", "interrupted", "finished"]
"""``interrupted``: it has begun, its processes have ended, and not every peer has finished."""

NAME = re.compile(r"[A-Za-z0-9+=_][A-Za-z0-9._+=-]*")
"""What the name of a run may be: the name of a folder that shells need not quote."""
ELSEWHERE = "put the sweep's folder on a file system with locks, e.g. a local disk: --out FOLDER"
"""What to do if it cannot be locked."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        name: of its folder.
        labels: by varied key besides the seed, as tables call its values.
        values: by key, to apply to the run file in this order.
    """

    name: str
    labels: Mapping[str, str]
    seed: int
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """What was asked for.

    Attributes:
        clock: the runs are simulated on a simulated clock, and ``simulate`` is true.
        digest: over the run files of all runs, and how they are run: equal for equal sweeps.
        file: the run file, absolute.
        sets: the ``--set`` options.
        grid: the labels of each varied key's values.
        points: the runs; a search adds its runs as it asks for them.
        search: the search space of ``--optuna``, or None.
        backend: ``--backend`` of `p2pfl launch`.
        sha256: of the run file, from which the runs of a search are made.
    """

    digest: str
    file: str
    simulate: bool
    sets: tuple[str, ...] = ()
    grid: Mapping[str, list[str]] = field(default_factory=dict)
    points: tuple[SweepRun, ...] = ()
    search: Mapping[str, Any] | None = None
    sha256: str = ""
    backend: str = "local"
    clock: bool = False

    def to_yaml(self) -> str:
        plain = {
            "digest": self.digest,
            "file": self.file,
            "simulate": self.simulate,
            "clock": self.clock,
            "backend": self.backend,
            "set": list(self.sets),
            "grid": dict(self.grid),
            "search": self.search,
            "sha256": self.sha256,
            "runs": [{"name": point.name, "labels": dict(point.labels), "seed": point.seed} for point in self.points],
        }
        text = yaml.safe_dump(plain, sort_keys=False, width=100)
        return f"# What was asked. To continue it, or to see its table: p2pfl sweep FOLDER\n{text}"

    @classmethod
    def from_plain(cls, plain: Any) -> Sweep:
        """Read what ``to_yaml`` has written. Raises TypeError, KeyError or ValueError for anything else."""
        points = tuple(
            SweepRun(
                _name(run["name"]), {str(key): str(label) for key, label in run["labels"].items()}, int(run["seed"])
            )
            for run in plain["runs"]
        )
        grid = {str(key): [str(label) for label in labels] for key, labels in plain["grid"].items()}
        texts = (str(plain["digest"]), str(plain["file"]))
        search = plain.get("search")
        if search is not None and not isinstance(search, dict):
            raise TypeError("search: not a mapping")
        sets = tuple(map(str, plain["set"]))
        more = str(plain.get("sha256", "")), str(plain.get("backend", "local"))
        clock = bool(plain.get("clock", False))
        return cls(*texts, bool(plain["simulate"]), sets, grid, points, search, *more, clock)


def _name(text: Any) -> str:
    """Check the name of a run: it becomes a path, below which an incomplete folder is deleted."""
    if not isinstance(text, str) or NAME.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not the name of a run")
    return text


@dataclass(frozen=True)
class SweepFolder:
    """A sweep on disk."""

    root: Path

    @classmethod
    def open(cls, root: Path) -> SweepFolder:
        """Open an existing sweep. Raises RunFolderError if there is none."""
        if not is_sweep(root):
            raise RunFolderError(f"{root}: not the folder of a sweep (no sweep.yaml in it)")
        return cls(root.resolve())

    @property
    def file(self) -> Path:
        return self.root / "sweep.yaml"

    @property
    def sweep(self) -> Sweep:
        """What was asked. Raises RunFolderError."""
        try:
            return Sweep.from_plain(yaml.safe_load(self.file.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            raise RunFolderError(f"{self.file}: cannot be read: {' '.join(str(error).split())}") from None
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise RunFolderError(f"{self.file}: damaged: {reason}") from None

    def write(self, sweep: Sweep) -> None:
        """Write sweep.yaml. Raises WriteError."""
        write_atomically(self.file, sweep.to_yaml().encode(), durable=True)

    def add(self, point: SweepRun) -> None:
        """Add a run, of a search."""
        sweep = self.sweep
        self.write(replace(sweep, points=(*sweep.points, point)))

    def plan(self, name: str) -> Path:
        return self.root / "plans" / name / "run.yaml"

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.root / "runs" / name)

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"

    @property
    def trials(self) -> Path:
        return self.root / "trials.jsonl"

    def runs(self) -> Iterator[tuple[SweepRun, RunFolder]]:
        """Yield the runs that have begun."""
        for point in self.sweep.points:
            folder = self.run(point.name)
            if folder.run_file.is_file():
                yield point, folder

    def state(self, name: str) -> SweepRunState:
        """Return what has become of a run."""
        folder = self.run(name)
        if self.command_runs(name):
            return "running"
        if not folder.run_file.is_file():
            return "waiting"
        if has_peers(folder):
            return "running"
        return "finished" if all(outcome(files) == "finished" for files in folder.peers()) else "interrupted"

    def command_runs(self, name: str) -> bool:
        """Return whether the command of a run still runs, whoever started it."""
        path = self.log(name)
        try:
            # For writing: on NFS, an exclusive lock takes that.
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # there is none, or it may only be read; then the run's files tell
            return False
        try:
            return not lock(file, path, ELSEWHERE)
        except UnsuitableFileSystem:  # `p2pfl sweep` does not work on such a folder
            return False
        finally:
            os.close(file)

    def clear_unresumable(self, name: str) -> None:
        """Delete the folder of a run that has to begin again.

        Its command was killed before the run existed, or the run was interrupted on a simulated clock, which has no
        checkpoints.
        """
        folder = self.run(name)
        begun = folder.run_file.exists()
        if folder.root.exists() and (not begun or (self.sweep.clock and self.state(name) == "interrupted")):
            with write_errors(folder.root):
                folder.run_file.unlink(missing_ok=True)  # first: what remains if this process is killed is no run
                shutil.rmtree(folder.root)

    @property
    def memory(self) -> dict[str, int]:
        """The measured memory of runs, in bytes."""
        try:
            found = read_json(self.root / "memory.json") or {}
        except RunFolderError:  # damaged: it is measured again
            return {}
        return {name: value for name, value in found.items() if type(value) is int and value > 0}

    def write_memory(self, measured: Mapping[str, int]) -> None:
        """Add to what was measured: other tasks of a job array measure other runs."""
        write_json(self.root / "memory.json", {**self.memory, **measured})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other `p2pfl sweep` processes out. Raises SweepError if one is at work, or UnsuitableFileSystem."""
        path = self.root / "lock"
        with write_errors(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # A lock of this process: unlike a lock of flock, its children do not hold it when it is killed.
            if not lock(file, path, ELSEWHERE, of_process=True):
                raise SweepError(f"{self.root}: another `p2pfl sweep` works on this folder")
            yield
        finally:
            os.close(file)


def is_sweep(root: Path) -> bool:
    """Return whether a folder is a sweep. Raises RunFolderError if it cannot be read."""
    return is_file(root / "sweep.yaml")


def has_peers(folder: RunFolder) -> bool:
    """Return whether peers of a run are running on any host."""
    return (folder.root / "peers").is_dir() and any(is_alive(folder, files.peer) for files in folder.peers())


def peers_of(folder: RunFolder) -> list[psutil.Process]:
    """Return the processes of a run's peers that run on this host; a simulated run has one for all."""
    if not (folder.root / "peers").is_dir():
        return []
    found = (find_process(folder, files.peer) for files in folder.peers())
    return list({process.pid: process for process in found if process is not None}.values())


def expand(paths: Iterable[Path]) -> list[tuple[RunFolder, SweepRun | None]]:
    """Open runs; a sweep stands for its runs that have begun. Raises RunFolderError."""
    found: list[tuple[RunFolder, SweepRun | None]] = []
    for path in paths:
        if is_sweep(path):
            found += [(RunFolder.open(folder.root), point) for point, folder in SweepFolder.open(path).runs()]
        else:
            found.append((RunFolder.open(path), None))
    return found
