"""Draw the aggregator and the senders of each round, for DFML and its baselines (arXiv 2402.01863, section 3.1).

In each round one peer is the aggregator. The senders, some of its neighbors, send it their models and wait to get
them back. Every peer draws the same assignments from a shared random stream and knows the graph from the run file, so
this needs neither messages nor a coordinator. (In the paper each aggregator picks the next one,
for one more message; on a complete graph that is the same distribution.)

All other peers skip the round without waiting, so a peer may be many rounds ahead when its turn comes. How long it
then has to wait also follows from the assignments: see ``AggregatorSchedule.pending_rounds``.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import NonNegativeFloat

from p2pfl import PeerId, rng
from p2pfl.algorithms.base import Fraction
from p2pfl.learning.losses import Supervision
from p2pfl.learning.optimizers import LocalTraining, OptimizerName
from p2pfl.messaging.net import Net


@dataclass(frozen=True)
class Aggregation(LocalTraining):
    optimizer: OptimizerName = "sgd"
    """sgd or adam; its state starts anew in each local training."""
    momentum: NonNegativeFloat = 0.9
    weight_decay: NonNegativeFloat = 5e-4
    participation: Fraction = 0.5
    """Senders per round, as a fraction of the peers that have joined (Fig. 19)."""
    fixed_aggregator: bool = False
    """Peer 0 aggregates in every round (Fig. 13)."""
    supervision: Supervision = "wsm"
    """Loss on the labels: re-weighted softmax, asymmetric, masked or plain cross-entropy."""


@dataclass(frozen=True)
class Assignment:
    """Who aggregates and who sends in one round."""

    aggregator: PeerId
    senders: tuple[PeerId, ...]
    """S, ascending: neighbors of the aggregator."""

    @property
    def participants(self) -> tuple[PeerId, ...]:
        """P = S ∪ {a}, ascending."""
        return tuple(sorted((self.aggregator, *self.senders)))


class AggregatorSchedule:
    """The assignments of all rounds.

    Args:
        seed: the run's seed.
        participation: senders per round, as a fraction of the peers that have joined, rounded (halves to even); at
            least one and at most all neighbors of the aggregator.
        fixed: the first of them aggregates in every round, peer 0 unless it joins late; otherwise only in round 0,
            and a random one later.
        deadline_factor: deadlines that one aggregation may take.
    """

    def __init__(self, seed: int, participation: float, fixed: bool = False, deadline_factor: float = 1.0) -> None:
        self.seed = seed
        self.participation = participation
        self.fixed = fixed
        self.deadline_factor = deadline_factor
        self._drawn: dict[int, Assignment] = {}
        self._finished: list[int] = []
        self._noted = 0
        """Number of rounds already included in ``_finished``."""

    def sender_count(self, peers: int) -> int:
        """Return |S| in a mesh of ``peers``, if the aggregator has enough neighbors."""
        return max(1, round(self.participation * peers))

    def assignment(self, t: int, net: Net) -> Assignment:
        """Return the assignment of round ``t``, equal on every peer."""
        if t not in self._drawn:
            key = ("roles", self.seed, self.participation, self.fixed)
            self._drawn[t] = net.drawn(t, key, lambda: self._draw(t, net))
        return self._drawn[t]

    def _draw(self, t: int, net: Net) -> Assignment:
        stream = rng.shared(self.seed, "roles", t)
        joined = net.joined_by(t)
        drawn = joined[stream.integers(len(joined))]
        aggregator = joined[0] if self.fixed or t == 0 else drawn
        chosen = stream.permutation(net.neighbors_of(aggregator, t))[: self.sender_count(len(joined))]
        return Assignment(aggregator, tuple(sorted(int(peer) for peer in chosen)))

    def models_deadlines(self, net: Net) -> float:
        """Return how many deadlines the aggregator waits until all senders have caught up and trained."""
        return 1.0 + self.pending_rounds(net) * (1.0 + self.deadline_factor)

    def reply_deadlines(self, net: Net) -> float:
        """Return how many deadlines a sender waits for the aggregator's reply."""
        return self.models_deadlines(net) + self.deadline_factor

    def pending_rounds(self, net: Net) -> int:
        """Return how many earlier rounds may still have to run, one after the other, once this peer is ready.

        When this peer is ready for round ``net.t``, its last round is over, and so are the earlier rounds of that
        round's participants, and so on. All other rounds may not have begun. The result is the length of the longest
        chain of such rounds, each waiting for the one before, that ends with a participant of round ``net.t``.
        """
        finished = self._finished_before(net)
        awaited = 0
        for peer in self.assignment(net.t, net).participants:
            awaited |= finished[peer]
        awaited &= ~finished[net.me]
        chain = [0] * net.peers
        while awaited:
            first = awaited & -awaited  # the earliest round in it
            awaited ^= first
            participants = self.assignment(first.bit_length() - 1, net).participants
            longest = 1 + max(chain[peer] for peer in participants)
            for peer in participants:
                chain[peer] = longest
        return max(chain[peer] for peer in self.assignment(net.t, net).participants)

    def _finished_before(self, net: Net) -> list[int]:
        """Return, per peer, the rounds before ``net.t`` that are over when it is ready for that one, as a bit set."""
        if net.t < self._noted:
            self._noted = 0
        if not self._noted:
            self._finished = [0] * net.peers
        for t in range(self._noted, net.t):
            participants = self.assignment(t, net).participants
            over = 1 << t
            for peer in participants:
                over |= self._finished[peer]
            for peer in participants:
                self._finished[peer] = over
        self._noted = net.t
        return self._finished
