"""Link: what an Endpoint needs of a transport."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from p2pfl import PeerId
from p2pfl.messaging.journal import JournalEntry


class Link(Protocol):
    """Delivers the entries of a peer's journal to their addressees, in order, and each once.

    The methods with a default suit a transport on which nothing is ever on its way.
    """

    def announce(self, entry: JournalEntry) -> None:
        """Begin to deliver a new entry."""

    def behind(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """Return the connected ``peers`` that have too many entries left to read."""
        return []

    async def caught_up(self, peers: Iterable[PeerId]) -> None:
        """Wait until none of ``peers`` is behind, at most until the deadline."""
        return

    def nothing(self, to: PeerId, t: int) -> None:
        """Tell a neighbor not to wait for messages to this peer's receivers in round ``t``: it is not one of them."""

    def undelivered(self) -> int:
        """Return how many messages wait to be passed to the transport, one for each connected neighbor."""
        return 0

    def checkpointed(self, needed: Mapping[PeerId, int]) -> None:
        """Tell each neighbor the first of its rounds whose messages it must keep for this peer."""
        return
