"""Find runs, and describe the state of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.facts.processes import NOT_COLLECTED, UNFINISHED, UNKNOWN, is_alive, outcome
from launcher.facts.registration import find_launcher
from launcher.facts.snapshot import Snapshot
from p2pfl.attackers import attacks
from p2pfl.errors import P2pflError, RunFolderError
from p2pfl.run_folder.files import is_file
from p2pfl.run_folder.folder import RunFolder, is_run

State = Literal[
    "starting",
    "running",
    "finished",
    "stopped",
    "failed",
    "died",
    "unfinished",
    "incomplete",
    "unknown",
    "unreadable",
]
"""``unfinished`` and ``incomplete`` are states of collections: a peer had not ended, or its files were not found.
``unknown``: no launcher follows its peers on other hosts, which only `p2pfl status` asks."""


@dataclass(frozen=True)
class RunLine:
    """A run in the list.

    Attributes:
        alive: number of running peers.
        rounds_done: completed rounds of the slowest peer.
        collected: time of the last collection (ISO 8601); None unless the run is a collection.
    """

    run: str
    state: State
    peers: int
    alive: int
    rounds_done: int
    rounds: int
    accuracy: float | None
    started: str
    collected: str | None = None


def find_runs(folder: Path) -> Iterator[RunLine]:
    """Yield the runs in a folder, or of a sweep, oldest first. Raises RunFolderError if there is no such folder."""
    if is_file(folder / "sweep.yaml") and (folder / "runs").is_dir():
        folder /= "runs"
    try:
        entries = [entry for entry in sorted(folder.iterdir()) if _may_be_run(entry)]
    except OSError as error:
        raise RunFolderError(f"{folder}: cannot be read: {error.strerror}") from None
    yield from sorted(map(_line, entries), key=lambda line: line.started)


def _may_be_run(entry: Path) -> bool:
    """Return whether an entry is a run, or a folder that may not be read and may be one."""
    try:
        return is_run(entry)
    except RunFolderError:
        return True


def _line(entry: Path) -> RunLine:
    try:
        return _readable_line(RunFolder.open(entry), str(entry))
    except (P2pflError, OSError, KeyError, TypeError, ValueError):
        return RunLine(str(entry), "unreadable", 0, 0, 0, 0, None, "")  # a damaged run must not hide the others


def _readable_line(folder: RunFolder, path: str) -> RunLine:
    run = folder.settings
    peers = [files.peer for files in folder.peers()]  # only one, if that peer was started by hand
    snapshot = Snapshot.take(folder, peers, run["rounds"], attackers=attacks(run))
    alive = sum(is_alive(folder, status.peer) for status in snapshot.statuses)
    info = folder.info
    return RunLine(
        run=path,
        state="running" if alive else "starting" if find_launcher(folder) else _final_state(folder),
        peers=len(peers),
        alive=alive,
        rounds_done=min(snapshot.done),
        rounds=run["rounds"],
        accuracy=snapshot.accuracy,
        started=info["started"],
        collected=info["collected"]["at"] if "collected" in info else None,
    )


def _final_state(folder: RunFolder) -> State:
    """Return the worst outcome of all peers."""
    outcomes = {outcome(files) for files in folder.peers()}
    if any(text.startswith("failed") for text in outcomes):
        return "failed"
    if outcomes & {"died", "never started"}:
        return "died"
    if any(text.startswith((UNKNOWN, "running on host")) for text in outcomes):
        return "unknown"
    if UNFINISHED in outcomes:
        return "unfinished"
    if NOT_COLLECTED in outcomes:
        return "incomplete"
    return "stopped" if "stopped" in outcomes else "finished"
