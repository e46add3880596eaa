"""The state of all peers of a run, from their status files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from p2pfl import PeerId
from p2pfl.run_folder.folder import RunFolder, Status


@dataclass(frozen=True)
class Snapshot:
    """The statuses written so far, the total number of peers, and who of them attacks."""

    peers: int
    rounds: int
    statuses: list[Status]
    attackers: Collection[PeerId] = ()

    @classmethod
    def take(
        cls,
        folder: RunFolder,
        peers: Sequence[PeerId],
        rounds: int,
        is_stale: Callable[[Status], bool] = lambda status: False,
        attackers: Collection[PeerId] = (),
    ) -> Snapshot:
        """Read the statuses.

        Args:
            is_stale: whether an earlier process of a peer that is about to start has written a status. What the peer
                has achieved counts, but it does nothing yet.
        """
        found = [status for peer in peers if (status := folder.peer(peer).status()) is not None]
        for status in found:
            if is_stale(status):
                status.phase, status.waiting_for = "starting", []
        return cls(len(peers), rounds, found, attackers)

    @cached_property
    def done(self) -> list[int]:
        """Completed rounds of every peer."""
        return [status.rounds_done for status in self.statuses] + [0] * (self.peers - len(self.statuses))

    @property
    def fraction(self) -> float:
        """Completed fraction of all rounds of all peers."""
        return sum(self.done) / (self.peers * self.rounds)

    @property
    def phases(self) -> Counter[str]:
        phases = Counter[str](status.phase for status in self.statuses)
        phases["starting"] += self.peers - len(self.statuses)
        return +phases

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy over the honest peers that have evaluated."""
        honest = (status for status in self.statuses if status.peer not in self.attackers)
        known = [status.accuracy for status in honest if status.accuracy is not None]
        return fmean(known) if known else None

    @property
    def bytes_out(self) -> int:
        return sum(status.bytes_out for status in self.statuses)

    @property
    def slowest(self) -> Status | None:
        """The peer with the fewest rounds done; ties go to peers that compute over peers that wait."""
        return min(
            self.statuses,
            key=lambda status: (status.rounds_done, len(status.waiting_for), status.peer),
            default=None,
        )
