"""Draw the senders of each round and one receiver for each, for Def-KT (arXiv 2012.13063).

Every peer draws the same pairs from a shared random stream and knows the graph from the run file, so this needs
neither messages nor a coordinator.

A sender does not wait, and peers without a role skip the round, so peers may be many rounds apart. How long a
receiver has to wait for its sender also follows from the pairs: see ``PairSchedule.deadlines``.
"""

from __future__ import annotations

from collections import defaultdict

from p2pfl import PeerId, rng
from p2pfl.messaging.net import Net


class PairSchedule:
    """The pairs of all rounds.

    Args:
        seed: the run's seed.
        participation: senders per round, as a fraction of the peers that have joined, rounded (halves to even); at
            least one.
        deadline_factor: deadlines that a receiver's work may take; a sender's takes one.
    """

    def __init__(self, seed: int, participation: float, deadline_factor: float = 1.0) -> None:
        self.seed = seed
        self.participation = participation
        self.deadline_factor = deadline_factor
        self._drawn: dict[int, dict[PeerId, PeerId]] = {}

    def pairs(self, t: int, net: Net) -> dict[PeerId, PeerId]:
        """Return {sender: receiver} of round ``t``, equal on every peer; no peer is in two pairs.

        In a random order, each free peer sends to the first free peer that it may send to. On a complete
        graph all sets of pairs are equally likely; on a sparse one there may be fewer pairs than asked for.
        """
        if t not in self._drawn:
            self._drawn[t] = net.drawn(t, ("pairs", self.seed, self.participation), lambda: self._draw(t, net))
        return self._drawn[t]

    def _draw(self, t: int, net: Net) -> dict[PeerId, PeerId]:
        order = [int(peer) for peer in rng.shared(self.seed, "pairs", t).permutation(net.peers)]
        count = max(1, round(self.participation * len(net.joined_by(t))))
        pairs: dict[PeerId, PeerId] = {}
        free = dict.fromkeys(order)
        for sender in order:
            if len(pairs) == count:
                break
            allowed = set(net.receivers_of(sender, t)) if sender in free else ()
            receiver = next((peer for peer in free if peer in allowed), None)
            if receiver is not None:
                del free[sender], free[receiver]
                pairs[sender] = receiver
        return pairs

    def sender_to(self, receiver: PeerId, t: int, net: Net) -> PeerId | None:
        """Return the peer that sends to ``receiver`` in round ``t``, if there is one."""
        return next((sender for sender, to in self.pairs(t, net).items() if to == receiver), None)

    def deadlines(self, sender: PeerId, net: Net) -> float:
        """Return how many deadlines this peer, ready for round ``net.t``, waits until ``sender`` has trained in it.

        The sender may still have earlier rounds to run, and may wait for others in them. The result
        is the length of the longest chain of such work, each waiting for the one before.
        """
        over = self._rounds_over(net)
        longest: defaultdict[PeerId, float] = defaultdict(float)
        for t in range(min(over[peer] for peer in range(net.peers)), net.t):
            for s, r in self.pairs(t, net).items():
                if t >= over[s]:
                    longest[s] += 1.0
                if t >= over[r]:
                    longest[r] = max(longest[r], longest[s]) + self.deadline_factor
        return longest[sender] + 1.0

    def _rounds_over(self, net: Net) -> defaultdict[PeerId, int]:
        """Return how many rounds of each peer are certainly over when this peer is ready for round ``net.t``.

        A peer that has received in a round knows that its sender's part of that round is over, and what the sender
        knew then.
        """
        over: defaultdict[PeerId, int] = defaultdict(int, {net.me: net.t})
        for t in reversed(range(net.t)):
            if len(over) == net.peers:
                break  # all others are at a later round than t
            for sender, receiver in self.pairs(t, net).items():
                if over.get(receiver, 0) > t:
                    over[sender] = max(over.get(sender, 0), t + 1)
        return over
