"""``p2pfl logs``: the peers' logs as one, in the order of time.

An entry is a line that begins with a time stamp, and the lines after it that do not, such as a traceback.
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import psutil

from launcher.processes import living
from launcher.text import ids
from p2pfl.errors import RunFolderError
from p2pfl.runfolder import FINAL, PeerFolder, PeerId, RunFolder

STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.,]\d+")
LOOK_EVERY = 0.25
"""Seconds between two looks for new lines."""


@dataclass(order=True)
class Entry:
    """What one peer said at one moment."""

    stamp: str
    peer: PeerId
    text: str


class LogFile:
    """Reads the entries of one peer's log, also while it grows."""

    def __init__(self, peer: PeerId, path: Path) -> None:
        self.peer = peer
        self._path = path
        self._offset = 0
        self._stamp = ""

    def read(self) -> list[Entry]:
        """The entries that were completed since the last call; a line without its end is left for later."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        new = new[: new.rfind(b"\n") + 1]
        self._offset += len(new)
        entries: list[Entry] = []
        for line in new.decode(errors="replace").splitlines():
            if found := STAMP.match(line):
                self._stamp = found.group()
            if found or not entries:
                entries.append(Entry(self._stamp, self.peer, line))
            else:
                entries[-1].text += "\n" + line
        return entries


def open_logs(folder: RunFolder, peers: Sequence[PeerId]) -> list[LogFile]:
    """The logs of ``peers``, of all if there are none given. Raises RunFolderError if the run has no such peer."""
    known = [place.peer for place in folder.peers()]
    for peer in peers:
        if peer not in known:
            raise RunFolderError(f"{folder.root} has no peer {peer}; it has {ids(known)}")
    return [LogFile(peer, folder.peer(peer).log) for peer in sorted(set(peers)) or known]


def read_all(logs: Sequence[LogFile], matches: Callable[[str], object]) -> Iterator[Entry]:
    """What is there now, by time, where ``matches`` finds something in the entry."""
    return (entry for entry in heapq.merge(*(log.read() for log in logs)) if matches(entry.text))


def follow(folder: RunFolder, logs: Sequence[LogFile], matches: Callable[[str], object]) -> Iterator[Entry]:
    """What is written from now on, until all these peers have ended."""
    ended = False
    while not ended:
        ended = all(has_ended(folder, folder.peer(log.peer)) for log in logs)
        # Read after the look, so that a peer's last words are not missed.
        yield from read_all(logs, matches)
        if not ended:
            time.sleep(LOOK_EVERY)


def last(entries: Iterator[Entry], count: int | None) -> list[Entry]:
    """The last ``count`` entries; all, if None."""
    if count is None:
        return list(entries)
    kept = list(entries)
    return list(islice(kept, max(0, len(kept) - count), None))


def has_ended(folder: RunFolder, place: PeerFolder) -> bool:
    """The peer wrote a final status, or its process is gone, or it never came and nobody is left to start it; or it
    writes elsewhere."""
    if place.origin() is not None:
        return True
    status = place.status()
    if status is None:
        return not psutil.pid_exists(folder.about["launcher_pid"])
    return status.phase in FINAL or living(folder, place.peer) is None
