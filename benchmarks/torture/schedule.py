"""What one schedule is: the mesh, what its peers say in which round, how patient they are, and what befalls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from benchmarks.torture.wires import Partition, Weather
from p2pfl.config import Transport
from p2pfl.runfolder import PeerId
from p2pfl.topology import Topology

Verb = Literal["exchange", "again", "reply", "some", "sum"]
"""exchange with all; the same kind once more; a different body to each; some speak and all hear; allreduce."""
Fault = Literal["crash", "break", "part", "stall", "train", "stop"]
"""Kill some peers; break a connection; break all of a peer's; stall an I/O thread, or an event loop; stop a peer."""

FOREVER = 1e6
"""Virtual seconds that nothing lasts."""
ABSENCE = 300.0
"""Virtual seconds for which nobody is away who comes back."""


@dataclass(frozen=True)
class Schedule:
    """Attributes:
    patient: waits last as long as it takes, and all come back: everything must end as if nothing had happened.
    verbs: by round.
    prunes: rounds after which each peer stops hearing some of the others.
    training: mean seconds of it in a round.
    faults: what befalls the mesh, in order; ``pause`` seconds in between, on average.
    crashes: how many there may be, all in all.
    lifetime: mean number of steps that a process takes before it crashes.
    restart: mean seconds until a peer comes back.
    mortal: peers that do not come back once they have crashed.
    rot: how often the newest checkpoint is damaged when a peer comes back.
    """

    patient: bool
    topology: Topology
    rounds: int
    checkpoint_every: int
    joins_at: Mapping[PeerId, int]
    verbs: Sequence[Sequence[Verb]]
    prunes: frozenset[int]
    transport: Transport
    weather: Weather
    training: float
    faults: Sequence[Fault]
    pause: float
    crashes: int
    lifetime: float
    restart: float
    mortal: frozenset[PeerId]
    rot: float

    def __str__(self) -> str:
        transport, weather = self.transport, self.weather
        waits = f"deadline {transport.deadline:g} s, give_up {transport.give_up:g} s, quorum {transport.quorum:g}"
        if transport.adaptive is not None:
            waits += f", adaptive {transport.adaptive:g}"
        lines = [
            f"{self.topology.peers} peers, edges {' '.join(f'{i}-{j}' for i, j in self.topology.edges)}",
            f"{self.rounds} rounds, a checkpoint after every {self.checkpoint_every}; joining {dict(self.joins_at)}",
            *(f"round {t}: {', '.join(verbs)}{'; prune' * (t in self.prunes)}" for t, verbs in enumerate(self.verbs)),
            "as patient as it takes" if self.patient else waits,
            f"queues of {transport.queue}; messages take {weather.delay:g} s, {weather.wild:.0%} much longer",
            *["with keys"] * weather.keys,
            *(f"cut off: {sorted(p.island)} from {p.begins:g} to {p.heals:g}" for p in weather.partitions),
            f"faults: {', '.join(self.faults) or 'none'}",
            f"up to {self.crashes} crashes, one in {self.lifetime:g} steps; mortal {sorted(self.mortal)}",
            f"back after {self.restart:g} s, with a damaged checkpoint in {self.rot:.0%}",
        ]
        return "\n".join(lines)


def draw(random: Random) -> Schedule:
    """One schedule."""
    patient = random.random() < 0.6
    peers = random.choice([2, 2, 3, 3, 4, 4, 5, 6])
    rounds = random.randint(2, 7) if patient else random.randint(4, 20)
    delay = 10.0 ** random.uniform(-4.0, -1.0 if patient else -1.7)
    joiners = random.sample(range(peers), random.randint(1, peers - 1)) if random.random() < 0.2 else []
    return Schedule(
        patient=patient,
        topology=_graph(random, peers),
        rounds=rounds,
        checkpoint_every=random.choice([1, 1, 2, 3] if patient else [1, 2, 4, 8]),
        joins_at={peer: random.randint(1, rounds - 1) for peer in sorted(joiners)},
        verbs=[_verbs(random) for _ in range(rounds)],
        prunes=frozenset(t for t in range(rounds) if random.random() < 0.3) if random.random() < 0.3 else frozenset(),
        transport=_transport(random, patient),
        weather=Weather(
            delay=delay,
            wild=random.choice([0.0, 0.02, 0.1]) if patient else 0.0,
            fits=random.choice([1, 4, 100]),
            turn=10.0 ** random.uniform(-4.0, -2.0),
            keys=random.random() < 0.4,
            partitions=[_partition(random, peers) for _ in range(random.choice([0, 0, 0, 1, 2]))],
        ),
        training=random.choice([0.01, 0.1, 1.0]) if patient else random.choice([0.1, 1.0]),
        faults=random.choices(("crash", "break", "part", "stall", "train", "stop"), k=random.randint(0, 10)),
        pause=random.choice([0.02, 0.2, 1.0, 4.0]),
        crashes=random.choice([0, 1, 2, 4, 8] if patient else [0, 2, 4, 8, 16]),
        lifetime=random.choice([5.0, 30.0, 100.0, 300.0] if patient else [30.0, 100.0, 300.0, 1000.0]),
        restart=random.choice([0.1, 2.0, 10.0] if patient else [0.1, 4.0, 10.0, 20.0]),
        mortal=frozenset() if patient else frozenset(peer for peer in range(peers) if random.random() < 0.2),
        rot=random.choice([0.0, 0.0, 0.3] if patient else [0.0, 0.3, 0.6]),
    )


def _graph(random: Random, peers: int) -> Topology:
    tree = [(peer, random.randrange(peer)) for peer in range(1, peers)]
    share = random.choice([0.0, 0.3, 1.0])
    more = [(i, j) for i in range(peers) for j in range(i) if random.random() < share]
    return Topology.from_edges(peers, [*tree, *more])


def _verbs(random: Random) -> list[Verb]:
    more: tuple[Verb, ...] = ("again", "reply", "some", "sum")
    return ["exchange", *(verb for verb in more if random.random() < 0.25)]


def _transport(random: Random, patient: bool) -> Transport:
    queue = random.choice([1, 2, 4, 64])
    if patient:
        return Transport(deadline=FOREVER, give_up=ABSENCE, queue=queue)
    return Transport(
        deadline=random.choice([2.0, 5.0]),
        adaptive=random.choice([None, None, 4.0]),
        quorum=random.choice([0.0, 0.0, 0.5, 1.0]),
        give_up=random.choice([0.5, 2.0, 10.0]),
        queue=queue,
    )


def _partition(random: Random, peers: int) -> Partition:
    island = frozenset(random.sample(range(peers), random.randint(1, peers - 1)))
    begins = random.uniform(0.0, 8.0)
    return Partition(island, begins, begins + random.choice([0.5, 5.0, 45.0]))
