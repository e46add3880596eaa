"""Who aggregates and who sends: the roles in DFML's system (arXiv 2402.01863, section 3.1), without a coordinator.

In each round one peer is the aggregator a, and some of its neighbours are the senders S: they bring it their models
and wait to get them back. Nobody is told so: every peer draws everybody's roles from one shared stream, and knows the
graph from the run file. (In the paper each aggregator picks the next: the same distribution, for one message more.)

The other peers do nothing in that round and wait for nobody, so that a peer may be many rounds ahead of the others
when its turn comes. How long it then has to wait follows from the roles too: see ``Roster.ahead``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from p2pfl import rng
from p2pfl.net import Net
from p2pfl.runfolder import PeerId

Share = Annotated[float, Field(gt=0.0, le=1.0)]


@dataclass(frozen=True)
class Roles:
    """Of one round."""

    aggregator: PeerId
    senders: tuple[PeerId, ...]
    """S, ascending: neighbours of the aggregator."""

    @property
    def participants(self) -> tuple[PeerId, ...]:
        """P = S ∪ {a}, ascending."""
        return tuple(sorted((self.aggregator, *self.senders)))


class Roster:
    """The roles of all rounds.

    Args:
        seed: the run's.
        share: senders in a round, as a fraction of all peers, rounded (halves to the even number); at least one, and
            at most all neighbours of the aggregator.
        fixed: peer 0 always aggregates; otherwise only in round 0, and any peer in the others.
        patience: deadlines that an aggregation may take.
    """

    def __init__(self, seed: int, share: float, fixed: bool = False, patience: float = 1.0) -> None:
        self.seed = seed
        self.share = share
        self.fixed = fixed
        self.patience = patience
        self._drawn: dict[int, Roles] = {}

    def senders(self, peers: int) -> int:
        """|S| among so many peers, where the aggregator has as many neighbours."""
        return max(1, round(self.share * peers))

    def roles(self, t: int, net: Net) -> Roles:
        """Those of round ``t``, the same on every peer."""
        if t not in self._drawn:
            stream = rng.shared(self.seed, "roles", t)
            drawn = int(stream.integers(net.peers))
            aggregator = 0 if self.fixed or t == 0 else drawn
            chosen = stream.permutation(net.neighbors_of(aggregator, t))[: self.senders(net.peers)]
            self._drawn[t] = Roles(aggregator, tuple(sorted(int(peer) for peer in chosen)))
        return self._drawn[t]

    def coming(self, net: Net) -> float:
        """The aggregator's wait: deadlines that may pass until all participants have come and trained."""
        return 1.0 + self.ahead(net) * (1.0 + self.patience)

    def returning(self, net: Net) -> float:
        """A sender's wait: deadlines that may pass until the models come back."""
        return self.coming(net) + self.patience

    def ahead(self, net: Net) -> int:
        """How many earlier meetings, one after the other, may still stand before this round's when I am ready for it.

        A meeting is a round for its participants. When I am ready, the last one that I had is over, and so are those
        that its participants had had before, and so on. All others may not have begun. The answer is the longest
        chain among them, each waiting for the one before, that ends with a participant of this round.
        """
        past = [0] * net.peers
        """Per peer, the rounds that are over when it is ready, one bit for each."""
        for t in range(net.t):
            participants = self.roles(t, net).participants
            over = 1 << t
            for peer in participants:
                over |= past[peer]
            for peer in participants:
                past[peer] = over
        awaited = 0
        for peer in self.roles(net.t, net).participants:
            awaited |= past[peer]
        awaited &= ~past[net.me]
        chain = [0] * net.peers
        for t in range(net.t):
            if awaited >> t & 1:
                participants = self.roles(t, net).participants
                longest = 1 + max(chain[peer] for peer in participants)
                for peer in participants:
                    chain[peer] = longest
        return max(chain[peer] for peer in self.roles(net.t, net).participants)
