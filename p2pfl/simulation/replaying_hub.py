"""The peers of one process, whose messages stay in files as long as their receivers may need them.

So an interrupted run can be resumed from checkpoints of different rounds, as a launched one can: each peer gets the
messages again that its neighbors have sent since its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from p2pfl import PeerId
from p2pfl.errors import CheckpointError
from p2pfl.messaging.control import Id
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.journal import JournalEntry
from p2pfl.simulation.local_link import LocalHub, LocalLink


class ReplayingHub(LocalHub):
    """Connects endpoints whose journals are in files."""

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[PeerId, Mapping[PeerId, int]] = {}
        """By receiver and sender, the first round of which a peer that resumes lacks messages."""

    def join(self, endpoint: Endpoint) -> None:
        super().join(endpoint)
        endpoint.link = ReplayingLink(endpoint.me, self)

    def replay(self, resumed: Mapping[PeerId, int]) -> None:
        """Deliver again what peers in later rounds had sent to peers that resume from an earlier round.

        Args:
            resumed: the first round that each peer computes.

        Raises:
            CheckpointError: such a message was already deleted.
        """
        for me, endpoint in self.endpoints.items():
            mailbox = endpoint.mailbox
            self._first[me] = {sender: mailbox.first_read(sender, resumed[me]) for sender in endpoint.neighbors}
        for sender, endpoint in self.endpoints.items():
            for to in endpoint.neighbors:
                first, floor = self._first[to][sender], endpoint.journal.floor(to)
                if resumed[sender] > first and floor > first:
                    raise CheckpointError(
                        f"peer {to} resumes in round {resumed[to]}, but peer {sender} has deleted its messages of "
                        f"rounds before {floor}; start the run again"
                    )
                id = Id(first, 0)
                while (found := endpoint.journal.after(to, id)) is not None:
                    self.deliver(sender, found[0], [to])
                    id = found[0].id.next

    def deliver(self, sender: PeerId, entry: JournalEntry, to: Iterable[PeerId]) -> None:
        # A sender that resumed from an earlier round computes again what its receivers have.
        if missing := [peer for peer in to if entry.id.t >= self._first.get(peer, {}).get(sender, 0)]:
            super().deliver(sender, entry, missing)

    def nothing(self, sender: PeerId, to: PeerId, t: int) -> None:
        """Tell ``to`` that ``sender`` has nothing for it in round ``t``."""
        self.endpoints[to].mailbox.nothing(sender, t)

    def drop(self, reader: PeerId, needed: Mapping[PeerId, int]) -> None:
        """Drop the messages to ``reader`` that its last two checkpoints make superfluous."""
        for neighbor, t in needed.items():
            self.endpoints[neighbor].journal.drop(reader, t)


class ReplayingLink(LocalLink):
    """One peer's link to the others of a ``ReplayingHub``."""

    hub: ReplayingHub

    def announce(self, entry: JournalEntry) -> None:
        self.hub.deliver(self.me, entry, entry.to)
        for to in entry.to:
            self.hub.endpoints[self.me].journal.read_by(to, entry.id.next)

    def nothing(self, to: PeerId, t: int) -> None:
        self.hub.nothing(self.me, to, t)

    def checkpointed(self, needed: Mapping[PeerId, int]) -> None:
        self.hub.drop(self.me, needed)
