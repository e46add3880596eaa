"""The injected faults of one edge's messages: delay, jitter, bandwidth, loss."""

from __future__ import annotations

from collections import deque
from random import Random

from p2pfl.messaging.control import Id
from p2pfl.messaging.journal import JournalEntry
from p2pfl.run_file.faults import LinkFaults


class Delays:
    """When the entries for one neighbor may be sent, and which are lost.

    Args:
        faults: of the run file.
        random: differs between runs by default: it changes nothing but times.
    """

    def __init__(self, faults: LinkFaults, random: Random | None = None) -> None:
        self.active = bool(faults.delay or faults.jitter or faults.loss or faults.bandwidth is not None)
        """Any fault is injected; otherwise, nothing of this needs to be called."""
        self._faults = faults
        self._random = random or Random()
        self._due: deque[tuple[Id, float]] = deque()
        """The entries that are delayed, in order."""
        self._free_at = 0.0
        """When the last entry has been sent, at the limit of the bandwidth."""

    def add(self, entry: JournalEntry, now: float) -> None:
        """Delay a new entry."""
        faults, due = self._faults, now
        if faults.bandwidth is not None:
            due = self._free_at = max(due, self._free_at) + entry.size / faults.bandwidth
        due += faults.delay + (self._random.uniform(0.0, faults.jitter) if faults.jitter else 0.0)
        if self._due:  # keep the order
            due = max(due, self._due[-1][1])
        self._due.append((entry.id, due))

    def due_at(self, id: Id) -> float:
        """Return when an entry may be sent; call it in the order of the entries."""
        while self._due and self._due[0][0] < id:
            self._due.popleft()
        return self._due[0][1] if self._due and self._due[0][0] == id else 0.0

    def drop(self, before: int) -> None:
        """Forget the entries of rounds before this one."""
        while self._due and self._due[0][0].t < before:
            self._due.popleft()

    def loses(self) -> bool:
        """Draw whether the next message is lost, and its connection with it."""
        return self._faults.loss > 0.0 and self._random.random() < self._faults.loss
