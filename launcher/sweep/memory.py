"""How much memory runs take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

MARGIN = 1.2
"""A run may take this many times what was measured of another: samples miss peaks."""
RESERVE = 0.05
"""Fraction of the host's memory that runs leave free."""


def in_use(processes: Iterable[psutil.Process]) -> int:
    """Return the memory of processes, in bytes. What several of them share counts once."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


@dataclass
class Estimate:
    """Estimates the memory of runs from the measured memory of others.

    Attributes:
        peers: number of peers by run.
        measured: bytes by run, at the peak so far.
    """

    peers: Mapping[str, int]
    alike: Mapping[str, str]
    """What runs have in common that differ in the seed only, by run."""
    measured: dict[str, int]

    def of(self, name: str) -> int | None:
        """Return the bytes that a run will take, with a margin; None if nothing was measured yet.

        Runs with the same values are the best guide; else the largest counts, in proportion to the number of peers
        if this run has more.
        """
        same = [taken for other, taken in self.measured.items() if self._alike(other) == self._alike(name)]
        if same:
            return int(MARGIN * max(same))
        guesses = [
            taken * max(1.0, self.peers.get(name, 1) / self.peers.get(other, 1))
            for other, taken in self.measured.items()
        ]
        return int(MARGIN * max(guesses)) if guesses else None

    def exceeds(self, name: str, total: int) -> bool:
        """Return whether a run would not even fit alone into ``total`` bytes of which none is in use."""
        needed = self.of(name)
        return needed is not None and needed + RESERVE * total > total

    def _alike(self, name: str) -> str:
        return self.alike.get(name, name)

    def fits(self, name: str, running: Mapping[str, int], free: int, total: int) -> bool:
        """Return whether one more run fits beside those that run.

        Args:
            running: what each running run takes now, in bytes. They may still grow.
            free: bytes that new processes can have.
            total: bytes of this host.
        """
        needed = self.of(name)
        if needed is None:
            return not running  # the first run says how much one takes
        growth = sum(max(0, (self.of(other) or 0) - taken) for other, taken in running.items())
        return needed + growth + RESERVE * total <= free
