"""A peer's place in the graph, as the run file says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from p2pfl import PeerId
from p2pfl.messaging.topology import Rounds, Topology


@dataclass(frozen=True)
class Neighborhood:
    """Who exchanges messages with whom in each round.

    Attributes:
        me: this peer.
        topology: the whole graph; of a time-varying graph, the union over all rounds. Its neighbors are connected,
            and open their rounds to each other.
        rounds: the graph of each round, within ``topology``, over which the method sends; default: always that.
        joins: {peer: first round in which it takes part}, for late joiners.
    """

    me: PeerId
    topology: Topology
    rounds: Rounds | None = None
    joins: Mapping[PeerId, int] = field(default_factory=dict)

    @property
    def peers(self) -> int:
        """Number of peers in the mesh, late joiners included."""
        return self.topology.peers

    @property
    def neighbors(self) -> tuple[PeerId, ...]:
        return self.topology.neighbors[self.me]

    def joined(self, t: int) -> list[PeerId]:
        """Return the neighbors that take part in round ``t``."""
        return [neighbor for neighbor in self.neighbors if self.joins.get(neighbor, 0) <= t]

    def topology_at(self, t: int) -> Topology:
        """Return the graph of round ``t``, of the peers that take part in it."""
        absent = frozenset(peer for peer, joins in self.joins.items() if joins > t)
        whole = self.topology if self.rounds is None else self.rounds(t)
        return whole.memoized(("without", absent), lambda: whole.without(absent)) if absent else whole
