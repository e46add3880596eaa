"""Which process is a peer, whether it lives, and how it ended."""

from __future__ import annotations

import signal

import psutil

from p2pfl.runfolder import FINAL, PeerFolder, PeerId, RunFolder

UNDER_WAY = "under way: had not ended when collected"
NOT_COLLECTED = "not collected: nothing was found of it"


def living(folder: RunFolder, peer: PeerId) -> psutil.Process | None:
    """The process of ``peer``, if it lives.

    The process id in the status file alone proves nothing, since it may be another process's by now: the title
    must be the peer's too.
    """
    place = folder.peer(peer)
    status = place.status()
    if status is None or place.origin() is not None:  # the number is one of another host's
        return None
    try:
        process = psutil.Process(status.pid)
        title = " ".join(process.cmdline()).rstrip()
    except psutil.Error:
        return None
    return process if title in (peer_title(folder, peer), simulation_title(folder)) else None


def peer_title(folder: RunFolder, peer: PeerId) -> str:
    """What a peer calls itself in ps and htop."""
    return f"p2pfl peer {peer} {folder.root}"


def simulation_title(folder: RunFolder) -> str:
    """What the one process of ``p2pfl simulate`` calls itself."""
    return f"p2pfl simulate {folder.root}"


def how_it_ended(place: PeerFolder, code: int | None = None, words: str = "") -> str:
    """``finished``, or in a few words what happened instead. ``code`` is the exit code, where it is known, and
    ``words`` what the peer has said of why it failed, in case that it could not write it down.

    A peer that goes on counts as ``died``: the caller knows that it has ended. Not so in a collection, where nobody
    knows: there it is UNDER_WAY.
    """
    result, status, origin = place.result(), place.status(), place.origin()
    last = result or status
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if last is not None and last.phase == "failed":
        words = last.error or words or "no reason given"
        return f"failed: {words.splitlines()[0]}"
    if words:
        return f"failed: {words.splitlines()[0]}"
    if code:
        return f"exit code {code}"
    if last is not None and last.phase in FINAL and (result is not None or last.phase != "finished"):
        return last.phase  # whoever has finished has a result, unless the power failed then
    if origin is not None:
        return NOT_COLLECTED if origin.source is None else UNDER_WAY
    return "never started" if status is None else "died"
