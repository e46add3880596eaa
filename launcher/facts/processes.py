"""Find the process of a peer, and describe how a peer ended."""

from __future__ import annotations

import os
import signal

import psutil

from launcher.facts.host_state import HostState
from launcher.facts.registration import peer_title, process_with, simulation_title
from p2pfl import PeerId
from p2pfl.run_folder.folder import FINAL, PeerFolder, RunFolder

RUNNING = "running"
UNFINISHED = "unfinished: had not ended when collected"
NOT_COLLECTED = "not collected: no source has its files"
UNKNOWN = "unknown: was running"
HOST_LOST = os.EX_UNAVAILABLE
"""Exit code of the peers of a host that is not started again. No restart policy asks for them again."""


def find_process(folder: RunFolder, peer: PeerId) -> psutil.Process | None:
    """Return the process of ``peer`` on this host if it is alive.

    The process id in the status file may have been reused by another process, so the process title must match too.
    For a peer on another host, return the launcher that follows it, if that is alive and on this host.
    """
    if (hosts := HostState.read(folder.root)) is not None:
        return hosts.process(folder.root) if peer in hosts.running else None
    files = folder.peer(peer)
    status = files.status()
    if status is None or files.origin() is not None:  # a collected status has a process id of another host
        return None
    return process_with(status.pid, [peer_title(folder, peer), simulation_title(folder)])


def is_alive(folder: RunFolder, peer: PeerId) -> bool:
    """Return whether ``peer`` runs on any host, as far as this host knows."""
    if (hosts := HostState.read(folder.root)) is not None:
        return peer in hosts.running and hosts.followed(folder.root)
    return find_process(folder, peer) is not None


def outcome(files: PeerFolder, exit_code: int | None = None, error: str = "") -> str:
    """Return ``finished``, or a short description of how else the peer ended.

    A peer without a final status counts as ``died``; the caller knows that its process has ended. In a collection
    that is unknown, and the peer counts as UNFINISHED.

    Args:
        exit_code: the exit code, if known; negative if a signal killed the process.
        error: the error that the peer reported to the launcher; it may have been unable to write it to its folder.
    """
    result, status, origin = files.result(), files.status(), files.origin()
    last = result or status
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    if exit_code == HOST_LOST and result and status and status.phase == result.phase in ("stopped", "finished"):
        return result.phase  # before its host was lost; without that status, the result is of an earlier launch
    if last is not None and last.phase == "failed":
        return _failed(files.peer, last.error or error or "no reason given")
    if error:
        return _failed(files.peer, error)
    if exit_code:
        return f"exit code {exit_code}"
    if last is not None and last.phase in FINAL and (result is not None or last.phase != "finished"):
        return last.phase  # a finished peer has a result, unless a power failure destroyed it
    if (hosts := HostState.read(root := files.root.parents[1])) is not None and files.peer in hosts.running:
        on = f"on host {hosts.running[files.peer]}"
        known = hosts.launcher == 0 or hosts.followed(root)
        return f"running {on}" if known else f"{UNKNOWN} {on} when the launcher ended"
    if origin is not None:
        return NOT_COLLECTED if origin.source is None else UNFINISHED
    return "never started" if status is None else "died"


def _failed(peer: PeerId, error: str) -> str:
    return f"failed: {error.splitlines()[0].removeprefix(f'peer {peer}: ')}"  # what prints it names the peer
