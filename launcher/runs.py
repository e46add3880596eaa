"""``p2pfl list`` and ``p2pfl stop``: which runs there are, how they are doing, and how to end one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from launcher.processes import NOT_COLLECTED, UNDER_WAY, how_it_ended, living
from launcher.snapshot import Snapshot
from launcher.summary import settings
from p2pfl.errors import P2pflError, RunFolderError
from p2pfl.runfolder import PeerId, RunFolder

PATIENCE = 120.0
"""Seconds that peers may take to end their batch and write a checkpoint."""

State = Literal["running", "finished", "stopped", "failed", "died", "under way", "incomplete", "unreadable"]
"""``under way`` and ``incomplete`` are collections: some peers had not ended then, or nothing was found of them."""


@dataclass(frozen=True)
class RunLine:
    """One run in the list. ``peers`` counts those that have a place in the folder, ``alive`` those whose process
    lives; rounds are those of the slowest peer; ``collected`` says when, if it is a collection (ISO 8601)."""

    run: str
    state: State
    peers: int
    alive: int
    rounds_done: int
    rounds: int
    accuracy: float | None
    started: str
    collected: str | None = None


def find_runs(where: Path) -> Iterator[RunLine]:
    """The runs in a folder, oldest first. Raises RunFolderError if there is no such folder."""
    try:
        entries = sorted(entry for entry in where.iterdir() if (entry / "run.yaml").is_file())
    except OSError as error:
        raise RunFolderError(f"{where}: cannot be read: {error.strerror}") from None
    lines = (_line(RunFolder.open(entry), str(entry)) for entry in entries)
    # A folder that is damaged, or only looks like a run, must not hide the others.
    yield from sorted(lines, key=lambda line: line.started)


def _line(folder: RunFolder, shown: str) -> RunLine:
    try:
        return _readable_line(folder, shown)
    except (P2pflError, KeyError, TypeError, ValueError):
        return RunLine(shown, "unreadable", 0, 0, 0, 0, None, "")


def _readable_line(folder: RunFolder, shown: str) -> RunLine:
    plain = settings(folder)
    snapshot = Snapshot.take(folder, plain["rounds"])
    alive = sum(living(folder, status.peer) is not None for status in snapshot.statuses)
    about = folder.about
    return RunLine(
        run=shown,
        state="running" if alive else _ended(folder),
        peers=snapshot.peers,
        alive=alive,
        rounds_done=min(snapshot.done),
        rounds=plain["rounds"],
        accuracy=snapshot.accuracy,
        started=about["started"],
        collected=about["collected"]["at"] if "collected" in about else None,
    )


def _ended(folder: RunFolder) -> State:
    """The worst that happened to any peer."""
    endings = {how_it_ended(place) for place in folder.peers()}
    if any(ending.startswith("failed") for ending in endings):
        return "failed"
    if endings & {"died", "never started"}:
        return "died"
    if UNDER_WAY in endings:
        return "under way"
    if NOT_COLLECTED in endings:
        return "incomplete"
    return "stopped" if "stopped" in endings else "finished"


@dataclass(frozen=True)
class Stop:
    """What one peer did when it was told to stop."""

    peer: PeerId
    ended: str | None
    """None: it still lives."""


def stop(folder: RunFolder, *, kill: bool, patience: float = PATIENCE) -> list[Stop]:
    """Tell all living peers to stop, and wait until they have. Returns what each did; empty if none lived.

    Raises RunFolderError if they live elsewhere.
    """
    found = [(place.peer, living(folder, place.peer)) for place in folder.own().peers()]
    processes = [(peer, process) for peer, process in found if process is not None]
    for process in {process for _, process in processes}:  # the peers of a simulation share one
        try:
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        except psutil.NoSuchProcess:
            pass
    _, stubborn = psutil.wait_procs([process for _, process in processes], timeout=patience)
    return [
        Stop(peer, None if process in stubborn else how_it_ended(folder.peer(peer), -9 if kill else None))
        for peer, process in processes
    ]
