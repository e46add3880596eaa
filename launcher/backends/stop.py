"""Stop the peers of a run, started by any launcher or by hand."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from launcher.backends.refresh import look, replace_state
from launcher.errors import HostsGone, LaunchError
from launcher.facts.host_state import POLL_INTERVAL, HostState, ask
from launcher.facts.processes import find_process, outcome
from launcher.facts.registration import find_launcher, request
from p2pfl import PeerId
from p2pfl.errors import WriteError
from p2pfl.run_folder.folder import PeerFolder, RunFolder

STOP_TIMEOUT = 120.0
"""Seconds that peers may take to end their batch and write a checkpoint."""


@dataclass(frozen=True)
class Stop:
    """How a peer ended after a request to stop; ``ended`` is None if it is still running."""

    peer: PeerId
    ended: str | None


def stop(folder: RunFolder, *, kill: bool, timeout: float = STOP_TIMEOUT) -> list[Stop]:
    """Stop all running peers, and the peers that the launcher is about to start, and wait for them.

    Return how each ended; empty if none was running. If a peer has failed, wait until the launcher ends, which might
    be restarting it.

    Raises RunFolderError if the peers run on another host.
    """
    if "hosts" in folder.info:
        return stop_on_hosts(folder, kill=kill, timeout=timeout)
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


def stop_on_hosts(folder: RunFolder, *, kill: bool, timeout: float) -> list[Stop]:
    """Stop the running peers of a run on other hosts.

    Raises LaunchError if its launcher, on another host, does not answer and no peer runs yet.
    """
    state = HostState.read(folder.root) or HostState()
    if state.answered < 0 and (launcher := state.process(folder.root)) is not None:
        launcher.send_signal(signal.SIGINT)  # it follows no peer yet, or has just begun to
        _wait_until(lambda: state.process(folder.root) is None, timeout)  # also if its parent does not reap it
        state = HostState.read(folder.root) or HostState()
        if state.followed(folder.root) and not kill:  # it stops the peers; a second signal would kill them
            return [Stop(peer, None) for peer in sorted(state.running)]
    if state.followed(folder.root) and ask(folder.root, "kill" if kill else "stop"):
        stopped = [files.peer for files in folder.peers()] if state.answered < 0 else sorted(state.running)
        _wait_until(lambda: not (HostState.read(folder.root) or HostState()).followed(folder.root), timeout)
        running = (HostState.read(folder.root) or HostState()).running
        return [Stop(peer, None if peer in running else outcome(folder.peer(peer))) for peer in stopped]
    state = HostState.read(folder.root) or HostState()
    if not state.running:
        if state.answered < 0 and state.followed(folder.root):
            raise LaunchError(
                f"{folder.root}: its launcher (process {state.launcher} on host {state.host}) does not answer; if it "
                "is still starting, it stops the peers once it has connected to all hosts"
            )
        return []
    try:
        group = look(folder)
    except HostsGone:
        replace_state(folder, state)
        return []
    with group:
        asked = sorted(group.running)
        group.signal(asked, signal.SIGKILL if kill else signal.SIGTERM)
        end = time.monotonic() + timeout
        while group.running and time.monotonic() < end:
            group.events(0.5)
        replace_state(folder, state, group)
        return [
            Stop(peer, None if peer in group.running else outcome(folder.peer(peer), -9 if kill else None))
            for peer in asked
        ]


def _wait_until(condition: Callable[[], bool], timeout: float) -> None:
    """Return when ``condition`` holds, or after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not condition() and time.monotonic() < end:
        time.sleep(POLL_INTERVAL)
