"""``p2pfl logs``: the peers' logs merged by time.

An entry is a line with a timestamp and the following lines without one, e.g. a traceback, or a JSON object.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO

from launcher.facts.processes import is_alive
from launcher.facts.registration import find_launcher
from launcher.formatting import ids
from p2pfl import PeerId
from p2pfl.errors import RunFolderError
from p2pfl.run_folder.folder import FINAL, PeerFolder, RunFolder
from p2pfl.run_folder.peer_log import LEVELS, rotated

STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.,]\d+")
ROUNDS = re.compile(r"\bt=(\d+)(?:\.\.(\d+))?")
POLL_INTERVAL = 0.25
"""Seconds between two checks for new lines."""


@dataclass(order=True)
class LogEntry:
    """A log entry of one peer."""

    stamp: str
    peer: PeerId
    text: str


class LogFile:
    """Read the entries of a peer's log while it grows."""

    def __init__(self, peer: PeerId, path: Path) -> None:
        self.peer = peer
        self.path = self._path = path
        self._offset = 0
        self._inode: int | None = None
        self._stamp = ""

    def read(self) -> list[LogEntry]:
        """Return the entries since the last call; leave an incomplete last line for the next one."""
        new = b""
        for path in (rotated(self._path), self._path):
            with suppress(FileNotFoundError), path.open("rb") as file:
                new += self._read_file(file, path == self._path)
        entries: list[LogEntry] = []
        for line in map(as_text, new.decode(errors="replace").removesuffix("\n").split("\n") if new else ()):
            if found := STAMP.match(line):
                self._stamp = found.group()
            if found or not entries:
                entries.append(LogEntry(self._stamp, self.peer, line))
            else:
                entries[-1].text += "\n" + line
        return entries

    def _read_file(self, file: BinaryIO, current: bool) -> bytes:
        """Return what is new in a file: of the rotated one, what was not read before it was rotated."""
        inode = os.fstat(file.fileno()).st_ino
        if not current and self._inode not in (None, inode):
            return b""  # it was read as a whole before
        if inode != self._inode:
            self._inode, self._offset = inode, 0
        file.seek(self._offset)
        new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._offset += len(new)
        return new


def as_text(line: str) -> str:
    """Return the text of a line that holds a JSON entry; other lines as they are."""
    if not line.startswith("{"):
        return line
    try:
        entry = json.loads(line)
        text = " | ".join([f"{entry['time']} {entry['level']:<7} {entry['message']}", *entry.get("details", ())])
        return f"{text}\n{entry['traceback']}" if "traceback" in entry else text
    except (ValueError, KeyError, TypeError, RecursionError):
        return line


@dataclass(frozen=True)
class Selection:
    """Which entries to show: those that match ``pattern``, of ``level`` or worse, of one round, not before ``since``.

    ``since`` is the beginning of a timestamp.
    """

    pattern: re.Pattern[str]
    level: str = "debug"
    round: int | None = None
    since: str = ""

    def __call__(self, text: str) -> bool:
        words = text.split(None, 2)
        level = words[1].lower() if len(words) > 1 else ""
        if level in LEVELS and LEVELS.index(level) < LEVELS.index(self.level):
            return False
        if self.since and text[: len(self.since)] < self.since:
            return False
        if self.round is not None and not any(
            int(first) <= self.round <= int(last or first) for first, last in ROUNDS.findall(text)
        ):
            return False
        return self.pattern.search(text) is not None


def since_newest(logs: Sequence[LogFile], seconds: float) -> str:
    """Return the timestamp so many seconds before the newest entry; nothing without one."""
    stamps = [entry.stamp for log in logs for entry in LogFile(log.peer, log.path).read() if entry.stamp]
    if not stamps:
        return ""
    newest = datetime.fromisoformat(max(stamps).replace(",", "."))
    try:
        return (newest - timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
    except OverflowError:  # before the year 1
        return ""


def open_logs(folder: RunFolder, peers: Sequence[PeerId]) -> list[LogFile]:
    """Open the logs of ``peers``, by default all. Raises RunFolderError if the run has no such peer."""
    known = [files.peer for files in folder.peers()]
    for peer in peers:
        if peer not in known:
            raise RunFolderError(f"{folder.root} has no peer {peer}; it has {ids(known)}")
    return [LogFile(peer, folder.peer(peer).log) for peer in sorted(set(peers)) or known]


def read_all(logs: Sequence[LogFile], matches: Callable[[str], object]) -> Iterator[LogEntry]:
    """Return the new entries that satisfy ``matches``, sorted by time."""
    return (entry for entry in heapq.merge(*(log.read() for log in logs)) if matches(entry.text))


def follow(folder: RunFolder, logs: Sequence[LogFile], matches: Callable[[str], object]) -> Iterator[LogEntry]:
    """Yield new entries until all these peers have ended, and no launcher may be about to resume them."""
    ended = False
    while not ended:
        ended = all(has_ended(folder, folder.peer(log.peer)) for log in logs) and find_launcher(folder) is None
        # Read after this check, so that no last entry is missed.
        yield from read_all(logs, matches)
        if not ended:
            time.sleep(POLL_INTERVAL)


def last(entries: Iterator[LogEntry], count: int | None) -> list[LogEntry]:
    """Return the last ``count`` entries; all if None."""
    kept = list(entries)
    return kept if count is None else kept[max(0, len(kept) - count) :]


def has_ended(folder: RunFolder, files: PeerFolder) -> bool:
    """Return whether the log of a peer is complete.

    The peer wrote a final status, its process died, it never started and its launcher died, or it is a collected one.
    """
    if files.origin() is not None:
        return True
    status = files.status()
    if status is None:
        return find_launcher(folder) is None
    return status.phase in FINAL or not is_alive(folder, files.peer)
