"""Stop the peers of a run, whoever started them."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from launcher.backends import multi_host
from launcher.facts.processes import find_process, outcome
from launcher.facts.registration import find_launcher, request
from p2pfl import PeerId
from p2pfl.errors import WriteError
from p2pfl.run_folder.folder import PeerFolder, RunFolder

POLL_INTERVAL = 0.1
"""Seconds between two looks at a launcher that has not started the peers yet."""
STOP_TIMEOUT = 120.0
"""Seconds that peers may take to end their batch and write a checkpoint."""


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
