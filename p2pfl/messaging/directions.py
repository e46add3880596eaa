"""Which neighbors a peer receives from, and which receive from it. Methods that prune change that between rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from p2pfl import PeerId
from p2pfl.messaging.schema import Body


@dataclass(frozen=True)
class Begin(Body):
    """Opens a round towards all neighbors, and closes all earlier ones: the first entry of every round.

    Attributes:
        sources: the neighbors that the sender receives from in this round, if its method prunes; otherwise empty.
    """

    sources: tuple[int, ...]


MAX_STATEMENTS = 64
"""Statements kept of a neighbor that is ahead."""


class Directions:
    """The directed edges of one peer that a method uses.

    A peer drops sources between rounds and states the remaining ones in Begin. It sends to the neighbors whose
    statement for the round names it; where none has arrived in time, their statement of the latest round stands.

    Args:
        me: this peer.
        sources: the neighbors that take part from round 0. Messages flow in both directions at first.
    """

    def __init__(self, me: PeerId, sources: Iterable[PeerId]) -> None:
        self.me = me
        self.sources = set(sources)
        """Neighbors that this peer receives from in this round."""
        self._dropped: set[PeerId] = set()  # not received from after this round
        self._stated: dict[PeerId, dict[int, bool]] = {}  # {neighbor: {round: whether it receives from this peer}}

    def begin(self, t: int, joining: Iterable[PeerId]) -> None:
        """Begin round ``t``, in which some neighbors join."""
        self.sources = (self.sources - self._dropped) | set(joining)
        self._dropped = set()
        for neighbor, stated in self._stated.items():  # of earlier rounds, only the latest may count
            self._stated[neighbor] = {s: receives for s, receives in stated.items() if s >= t or s == max(stated)}

    def receive_only_from(self, senders: Iterable[PeerId]) -> None:
        """Drop all other sources after this round."""
        self._dropped |= self.sources - set(senders)

    def state(self, neighbor: PeerId, t: int, sources: Iterable[PeerId]) -> None:
        """Note a neighbor's statement for round ``t``."""
        stated = self._stated.setdefault(neighbor, {})
        if len(stated) == MAX_STATEMENTS:
            del stated[max(stated)]
        stated[t] = self.me in sources

    def receives(self, neighbor: PeerId, t: int) -> bool:
        """Return whether a neighbor receives from this peer in round ``t``, as far as known."""
        stated = self._stated.get(neighbor)
        return stated is None or stated.get(t, stated[max(stated)])

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two rounds."""
        return {
            "sources": sorted(self.sources),
            "stated": {neighbor: [*max(stated.items())] for neighbor, stated in self._stated.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sources = set(state["sources"])
        for neighbor, (t, receives) in state["stated"].items():  # in one process, newer ones may have arrived
            self._stated.setdefault(neighbor, {}).setdefault(t, receives)
