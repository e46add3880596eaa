"""The journal: what a peer has sent and may have to send again, each entry once, however many neighbors read it.

An entry is identified by its round and its number in the round. Rounds computed again after a crash get the same ids,
skipped rounds have none, and nothing is ever renumbered. An entry is released when none of its addressees can ask for
it any more: it is in their checkpoints before the last one, or they have finished or were declared dead.

Bodies lie in a ``BodyStore``. The index of the entries kept, with a checksum of each body, is part of a checkpoint.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.messaging.control import BEFORE, FOREVER, INLINE, Id
from p2pfl.messaging.wire import Buffer, Encoded

UNKNOWN = Id(FOREVER, 0)
"""After every entry but the last Begin."""


@dataclass(frozen=True)
class Place:
    """Where a body lies in its store."""

    segment: int
    at: int


class BodyStore:
    """Holds the bodies of a journal in numbered segments. A number is never used again, not even after a restart.

    This one holds them in memory, one in a segment, and nothing survives the process; ``FileStore``
    (p2pfl/session/body_files.py) holds them in files.
    """

    current = 1
    """The segment to which the next small body may be appended."""

    def __init__(self) -> None:
        self._bodies: dict[int, bytearray] = {}

    def write(self, encoded: Encoded) -> Place:
        """Append a body. Raises WriteError."""
        self.current += 1
        self._bodies[self.current - 1] = bytearray().join(encoded.parts())
        return Place(self.current - 1, 0)

    def read(self, place: Place, offset: int, length: int) -> Buffer:
        """Return a part of a body. Raises OSError; FileNotFoundError if it was released."""
        if (body := self._bodies.get(place.segment)) is None:
            raise FileNotFoundError(f"segment {place.segment}")
        return memoryview(body)[offset : offset + length]

    def map(self, place: Place, size: int) -> Tensor:
        """Return a body, uint8 [size], which may be modified: that does not modify the store. Raises OSError."""
        return torch.frombuffer(self.read(place, 0, size), dtype=torch.uint8).clone()  # aligned

    def release(self, segment: int) -> None:
        """Delete a segment; called when no entry refers to it and no body will be appended to it."""
        self._bodies.pop(segment, None)

    def restore(self, segments: Iterable[int]) -> set[int]:
        """Return which of the segments exist, and delete all other segments. Called before the first ``write``."""
        return set()

    def sync(self, segments: Iterable[int]) -> None:
        """Wait until these segments, if they still exist, are on disk. Raises WriteError."""


@dataclass(eq=False)
class JournalEntry:
    """One entry of the journal.

    Attributes:
        header: as in ``wire``.
        size: bytes of the stored body.
        place: None if the body is empty.
        checksum: CRC-32 of the stored body, once computed.
    """

    id: Id
    header: bytes
    size: int
    place: Place | None
    to: tuple[PeerId, ...]
    optional: bool = False
    """A Begin that no method awaits: a later entry makes it superfluous."""
    checksum: int | None = None


@dataclass
class _Addressed:
    """The entries addressed to one neighbor, ascending."""

    entries: list[JournalEntry] = field(default_factory=list)
    previous: list[Id] = field(default_factory=list)
    """For each entry, the last one before it that is not optional."""
    last: Id = BEFORE
    floor: int = 0
    """Entries of rounds before this one were dropped."""
    newest: dict[str, JournalEntry] = field(default_factory=dict)
    """By kind, where entries supersede earlier ones."""
    offered: Id = UNKNOWN
    """The neighbor may have read the entries before this one, from this process or an earlier one of this peer, which
    may have ended before its first checkpoint. So until the neighbor has said what it has, nothing is superseded."""

    def has(self, entry: JournalEntry) -> bool:
        """Return whether an entry was neither dropped nor superseded."""
        position = _position(self.entries, entry.id)
        return position < len(self.entries) and self.entries[position] is entry

    def remove(self, entry: JournalEntry) -> None:
        position = _position(self.entries, entry.id)
        before = self.previous[position]
        del self.entries[position], self.previous[position]
        for later in range(position, len(self.entries)):
            if self.previous[later] != entry.id:
                break
            self.previous[later] = before
        if self.last == entry.id:
            self.last = before


class Journal:
    """The entries of one peer. The event loop's thread appends; any thread may read and drop.

    Args:
        supersedes: a new entry replaces earlier ones of its kind that its addressees cannot have read.
        keeps: kinds of which none replaces another.
        replaces: kinds of which an entry also replaces those of earlier rounds to other neighbors.
    """

    def __init__(
        self,
        neighbors: Iterable[PeerId],
        store: BodyStore | None = None,
        *,
        supersedes: bool = False,
        keeps: Collection[str] = (),
        replaces: Collection[str] = (),
    ) -> None:
        self.store = store or BodyStore()
        self.supersedes = supersedes
        self._keeps = keeps
        self._replaces = replaces
        self._addressed = {neighbor: _Addressed() for neighbor in neighbors}
        self._live: dict[int, int] = {}
        """{segment: addressees that may still ask for a body in it}"""
        self._saved_before = 0
        """The last checkpoint names the entries of rounds before this one."""
        self._held: list[int] = []
        """Segments with entries of that checkpoint, once for each entry dropped for a reader declared dead."""
        self._releasable: list[int] = []
        """Segments that the checkpoint in progress does not need."""
        self._next = Id(0, 0)
        self._last_read: tuple[JournalEntry | None, int, Buffer] = None, 0, b""
        """The last small part that was read, and where it begins: each neighbor is sent the same."""
        self._lock = threading.RLock()

    # ---- writing

    def begin(self, t: int) -> None:
        """Number the next entries (t, 0), (t, 1), …"""
        self._next = Id(t, 0)

    def append(self, encoded: Encoded, to: Sequence[PeerId], *, optional: bool = False) -> JournalEntry:
        """Store a body once for all its addressees. Raises WriteError."""
        segment = self.store.current
        self._use(segment)  # another thread may drop the last other entry in it while the body is written
        try:
            place = self.store.write(encoded) if encoded.size else None
            entry = JournalEntry(self._next, encoded.header, encoded.size, place, tuple(to), optional)
            self._add(entry)
            # The last Begin supersedes nothing: a neighbor that has not read the one before it may not have started
            # yet, and this peer waits for it.
            if self.supersedes and encoded.kind not in self._keeps and entry.id.t < FOREVER:
                self._supersede(encoded.kind, entry)
        finally:
            self._use(segment, -1)
        self._next = self._next.next
        return entry

    def _add(self, entry: JournalEntry) -> None:
        with self._lock:
            if entry.place is not None:
                self._use(entry.place.segment, len(entry.to))
            for neighbor in entry.to:
                addressed = self._addressed[neighbor]
                addressed.entries.append(entry)
                addressed.previous.append(addressed.last)
                if not entry.optional:
                    addressed.last = entry.id

    def _supersede(self, kind: str, entry: JournalEntry) -> None:
        """Drop what an entry supersedes."""
        with self._lock:
            for neighbor in self._addressed if kind in self._replaces else entry.to:
                addressed = self._addressed[neighbor]
                earlier = addressed.newest.get(kind)
                if neighbor in entry.to:
                    addressed.newest[kind] = entry
                elif earlier is None or earlier.id.t == entry.id.t:
                    continue
                if earlier is not None and earlier.id >= addressed.offered and addressed.has(earlier):
                    addressed.remove(earlier)
                    if earlier.place is not None:
                        self._use(earlier.place.segment, -1)

    def offer(self, to: PeerId, entry: JournalEntry) -> bool:
        """Return whether an entry is to be sent: it is not superseded yet, and will not be any more."""
        if not self.supersedes:
            return True
        with self._lock:
            addressed = self._addressed[to]
            if not addressed.has(entry):
                return False
            addressed.offered = max(addressed.offered, entry.id.next)
            return True

    def read_by(self, to: PeerId, before: Id) -> None:
        """Note that a neighbor may have read the entries before this one, and no later ones of an earlier process."""
        if not self.supersedes:
            return
        with self._lock:
            addressed = self._addressed[to]
            addressed.offered = before if addressed.offered == UNKNOWN else max(addressed.offered, before)

    def _use(self, segment: int, count: int = 1) -> None:
        """Note how many more readers may ask for bodies in a segment; release it if none may."""
        with self._lock:
            self._live[segment] = self._live.get(segment, 0) + count
            if self._live[segment] == 0 and segment != self.store.current:
                del self._live[segment]
                self.store.release(segment)

    # ---- reading

    def after(self, to: PeerId, id: Id) -> tuple[JournalEntry, Id] | None:
        """Return the first entry to a neighbor from ``id`` on, and the last one before it that must be read.

        An optional entry with a later one behind it is passed over.
        """
        with self._lock:
            addressed = self._addressed[to]
            position = _position(addressed.entries, id)
            while position + 1 < len(addressed.entries) and addressed.entries[position].optional:
                position += 1
            if position == len(addressed.entries):
                return None
            return addressed.entries[position], addressed.previous[position]

    def waiting(self, to: PeerId, id: Id) -> int:
        """Return the number of entries to a neighbor from ``id`` on."""
        with self._lock:
            entries = self._addressed[to].entries
            return len(entries) - _position(entries, id)

    def count(self, to: PeerId) -> int:
        """Return the number of all entries to a neighbor."""
        return len(self._addressed[to].entries)

    def keeps_for(self, to: PeerId) -> bool:
        """Return whether the neighbor may still ask for an entry, apart from the last Begin."""
        with self._lock:
            entries = self._addressed[to].entries
            return bool(entries) and entries[0].id.t < FOREVER

    def floor(self, to: PeerId) -> int:
        """Return the first round with all entries to this neighbor: earlier ones were dropped."""
        return self._addressed[to].floor

    def read(self, entry: JournalEntry, offset: int, length: int) -> Buffer:
        """Return a part of an entry's body. Raises OSError if the entry was released."""
        if entry.place is None:
            return b""
        if length > INLINE:
            return self.store.read(entry.place, offset, length)
        read, at, part = self._last_read
        if read is not entry or (at, len(part)) != (offset, length):
            part = self.store.read(entry.place, offset, length)
            self._last_read = entry, offset, part
        return part

    def map(self, entry: JournalEntry) -> Tensor | None:
        """Return an entry's body, uint8 [size], which may be modified; None if it is empty. Raises OSError."""
        return None if entry.place is None else self.store.map(entry.place, entry.size)

    # ---- dropping

    def drop(self, to: PeerId, before: int, *, declared_dead: bool = False) -> None:
        """Drop the entries to a neighbor of rounds before this one.

        Args:
            declared_dead: it was declared dead, though it may need them. If both peers roll back to their
                checkpoints, it can get the entries that this peer's names: their bodies stay until the next one.
        """
        with self._lock:
            addressed = self._addressed[to]
            addressed.floor = max(addressed.floor, before)
            count = bisect_left(addressed.entries, before, key=lambda entry: entry.id.t)
            dropped = addressed.entries[:count]
            del addressed.entries[:count], addressed.previous[:count]
            for entry in dropped:
                if entry.place is not None:
                    if declared_dead and entry.id.t < self._saved_before:
                        self._held.append(entry.place.segment)
                    else:
                        self._use(entry.place.segment, -1)

    def readmit(self, to: PeerId, floor: int) -> None:
        """Keep the entries of rounds from ``floor`` on again, for a neighbor that seemed to have finished."""
        with self._lock:
            self._addressed[to].floor = floor

    def saved(self, before: int) -> None:
        """Note that the last ``state_dict``, of the rounds before this one, is in a checkpoint on disk."""
        with self._lock:
            self._saved_before, released, self._releasable = before, self._releasable, []
            for segment in released:
                self._use(segment, -1)

    # ---- checkpoints

    def state_dict(self, before: int) -> dict[str, Any]:
        """Return the index of the entries of rounds before this one, once their bodies are on disk. On any thread.

        Raises WriteError, or OSError if a body cannot be read.
        """
        kept: dict[Id, JournalEntry] = {}
        with self._lock:
            self._releasable, self._held = [*self._releasable, *self._held], []
            for addressed in self._addressed.values():
                kept.update((entry.id, entry) for entry in addressed.entries if entry.id.t < before)
            # Rounds from ``before`` on are computed again, also for a neighbor that had finished.
            floors = {neighbor: min(addressed.floor, before) for neighbor, addressed in self._addressed.items()}
        self.store.sync({entry.place.segment for entry in kept.values() if entry.place is not None})
        rows = []
        for id in sorted(kept):
            entry = kept[id]
            if entry.place is not None and entry.checksum is None:
                try:
                    entry.checksum = self._checksum(entry)
                except FileNotFoundError:
                    continue  # released meanwhile
            place = None if entry.place is None else [entry.place.segment, entry.place.at]
            rows.append([*id, entry.header, entry.size, place, list(entry.to), entry.optional, entry.checksum])
        return {"entries": rows, "floors": floors}

    def _checksum(self, entry: JournalEntry) -> int:
        found, step = 0, 1 << 20
        for offset in range(0, entry.size, step):
            found = zlib.crc32(self.read(entry, offset, min(step, entry.size - offset)), found)
        return found

    def damaged(self, state: Mapping[str, Any]) -> str:
        """Return which body that the state refers to is damaged, or an empty string."""
        for entry in _entries(state):
            try:
                if entry.place is not None and self._checksum(entry) != entry.checksum:
                    return f"damaged: the body of entry {entry.id.number} of round {entry.id.t} in the journal"
            except FileNotFoundError:
                pass  # released after the checkpoint was written
            except OSError as error:
                return f"damaged: entry {entry.id.number} of round {entry.id.t} in the journal: {error}"
        return ""

    def clear(self) -> None:
        """Delete every stored body: before the first entry, or when no neighbor needs the last ones."""
        self.store.restore(())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the entries whose bodies still exist."""
        self._saved_before = max((t for t, *_ in state["entries"]), default=-1) + 1
        for neighbor, floor in state["floors"].items():
            self._addressed[neighbor].floor = floor
        entries = _entries(state)
        exist = self.store.restore({entry.place.segment for entry in entries if entry.place is not None})
        for segment in exist:
            self._use(segment)  # until all entries are added: an unneeded one would release a shared segment
        for entry in entries:
            if entry.place is not None and entry.place.segment not in exist:
                # Released after the checkpoint was written. The floor matters only if a user removed the file.
                for neighbor in entry.to:
                    self.drop(neighbor, entry.id.t + 1)
                continue
            entry.to = tuple(to for to in entry.to if entry.id.t >= self._addressed[to].floor)
            self._add(entry)
        for segment in exist:
            self._use(segment, -1)


def _position(entries: Sequence[JournalEntry], id: Id) -> int:
    """Return the position of the first entry from ``id`` on: mostly, the end."""
    if not entries or entries[-1].id < id:
        return len(entries)
    return bisect_left(entries, id, key=lambda entry: entry.id)


def _entries(state: Mapping[str, Any]) -> list[JournalEntry]:
    return [
        JournalEntry(Id(t, number), header, size, place and Place(*place), tuple(to), optional, checksum)
        for t, number, header, size, place, to, optional, checksum in state["entries"]
    ]
