"""``p2pfl list`` and ``p2pfl stop``: find runs, describe their state, and stop their peers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from launcher.backends.processes import NOT_COLLECTED, UNFINISHED, UNKNOWN, find_process, is_alive, outcome
from launcher.backends.registration import find_launcher, request
from launcher.views.snapshot import Snapshot
from launcher.views.summary import settings
from p2pfl import PeerId
from p2pfl.errors import P2pflError, RunFolderError, WriteError
from p2pfl.run_folder.files import is_file
from p2pfl.run_folder.folder import PeerFolder, RunFolder, is_run

POLL_INTERVAL = 0.1
"""Seconds between two looks at a launcher that has not started the peers yet."""
STOP_TIMEOUT = 120.0
"""Seconds that peers may take to end their batch and write a checkpoint."""

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
    """Return whether an entry is a run, or somebody else's folder that hides whether it is."""
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
    run = settings(folder)
    peers = [files.peer for files in folder.peers()]  # only one, if that peer was started on its own
    snapshot = Snapshot.take(folder, peers, run["rounds"])
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


@dataclass(frozen=True)
class Stop:
    """How a peer ended after a request to stop; ``ended`` is None if it is still running."""

    peer: PeerId
    ended: str | None


def stop(folder: RunFolder, *, kill: bool, timeout: float = STOP_TIMEOUT) -> list[Stop]:
    """Stop all running peers, also those that the launcher is about to start, and wait for them.

    Return how each ended; empty if none was running. If a peer has failed, wait until the launcher ends, which might
    be restarting it.

    Raises RunFolderError if the peers run on another host.
    """
    if "hosts" in folder.info:
        from launcher.backends import multi_host

        return [Stop(peer, ended) for peer, ended in multi_host.stop(folder, kill=kill, timeout=timeout)]
    folder.require_local()
    end = time.monotonic() + timeout
    asked = False
    signaled: dict[PeerId, psutil.Process] = {}
    while True:
        launcher, found = find_launcher(folder), _processes(folder)
        if not asked and (launcher is not None or found):
            asked = True
            with suppress(WriteError):  # on a full disk, peers stop all the same
                request(folder.root, "kill" if kill else "stop")
        for process in {*found.values()} - {*signaled.values()}:  # simulated peers share one process
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        signaled |= found
        starting = launcher is not None and any(_may_start(files, signaled) for files in folder.peers())
        wait = POLL_INTERVAL if starting else max(0.0, end - time.monotonic())
        _, remaining = psutil.wait_procs({*signaled.values()}, timeout=wait)
        if not starting or time.monotonic() >= end:
            break
        if not remaining:
            time.sleep(POLL_INTERVAL)  # until the launcher has started the others, or has read the request
    return [
        Stop(peer, None if process in remaining else outcome(folder.peer(peer), -9 if kill else None))
        for peer, process in sorted(signaled.items())
    ]


def _may_start(files: PeerFolder, signaled: Mapping[PeerId, psutil.Process]) -> bool:
    """Return whether the launcher may be about to start a peer: it forks them one after another."""
    return files.peer not in signaled and ((result := files.result()) is None or result.phase != "finished")


def _processes(folder: RunFolder) -> dict[PeerId, psutil.Process]:
    found = {files.peer: find_process(folder, files.peer) for files in folder.peers()}
    return {peer: process for peer, process in found.items() if process is not None}
