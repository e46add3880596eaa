"""What all peers of a run folder are doing at one moment, from their status files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from p2pfl.runfolder import RunFolder, Status


@dataclass(frozen=True)
class Snapshot:
    """``statuses`` holds those peers that have written one so far; ``peers`` counts all."""

    peers: int
    rounds: int
    statuses: list[Status]

    @classmethod
    def take(cls, folder: RunFolder, rounds: int) -> Snapshot:
        found = [place.status() for place in folder.peers()]
        return cls(len(found), rounds, [status for status in found if status is not None])

    @cached_property
    def done(self) -> list[int]:
        """Completed rounds of every peer."""
        return [status.rounds_done for status in self.statuses] + [0] * (self.peers - len(self.statuses))

    @property
    def fraction(self) -> float:
        """Completed share of all rounds of all peers."""
        return sum(self.done) / (self.peers * self.rounds)

    @property
    def phases(self) -> Counter[str]:
        phases = Counter[str](status.phase for status in self.statuses)
        phases["starting"] += self.peers - len(self.statuses)
        return +phases

    @property
    def accuracy(self) -> float | None:
        """Mean personal accuracy over the peers that have measured one."""
        known = [status.accuracy for status in self.statuses if status.accuracy is not None]
        return fmean(known) if known else None

    @property
    def bytes_out(self) -> int:
        return sum(status.bytes_out for status in self.statuses)

    @property
    def slowest(self) -> Status | None:
        """The peer with the fewest rounds; of several, one that computes before one that waits for others."""
        return min(
            self.statuses,
            key=lambda status: (status.rounds_done, len(status.waiting_for), status.peer),
            default=None,
        )
