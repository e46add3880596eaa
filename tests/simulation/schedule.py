"""One schedule: the graph, the operations of each round, the wait policy and the faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Literal

from p2pfl import PeerId
from p2pfl.messaging.topology import Rounds, Topology, WeightedTopology
from p2pfl.run_file.schema import Synchrony, Transport
from tests.simulation.network import NetworkConditions, Partition

Operation = Literal["exchange", "again", "reply", "some", "sum", "gossip", "every", "ask"]
"""Exchange with all neighbors; exchange the same kind once more; send a different body to each neighbor; exchange
with random participants as senders; allreduce. Only where rounds do not wait for one another, bodies that count once:
send to a random neighbor, as gossip does; to all neighbors, which get every one; ask a random neighbor on the other
side, and wait for its answer, as ad-psgd does."""
Fault = Literal["crash", "disconnect", "isolate", "stall-io", "stall-loop", "stop"]
"""Kill some peers; break one connection; break all connections of a peer; stall an I/O thread; stall an event loop;
stop a peer gracefully."""

FOREVER = 1e6
"""Virtual seconds: longer than any run."""
GIVE_UP = 300.0
"""``transport.give_up`` of schedules without deadlines: longer than any peer stays down."""


@dataclass(frozen=True)
class Schedule:
    """What happens in one simulated run.

    Attributes:
        waits_forever: no deadline ever ends a wait and every peer restarts, so the run must end exactly like a
            fault-free one.
        operations: by round.
        prune_rounds: rounds after which each peer stops receiving from some of its neighbors.
        training: mean seconds per round.
        faults: in order, ``fault_interval`` seconds apart on average.
        crashes: upper bound for the whole run.
        steps_to_crash: mean number of steps that a process takes before it crashes.
        restart_delay: mean seconds until a peer restarts.
        never_restarted: peers that are not restarted after a crash.
        corruption_rate: probability that the latest checkpoint is corrupted when a peer restarts.
        burst: messages that an exchange sends to each neighbor, before it waits for as many.
    """

    waits_forever: bool
    topology: Topology
    rounds: int
    checkpoint_every: int
    joins_at: Mapping[PeerId, int]
    operations: Sequence[Sequence[Operation]]
    prune_rounds: frozenset[int]
    transport: Transport
    conditions: NetworkConditions
    training: float
    faults: Sequence[Fault]
    fault_interval: float
    crashes: int
    steps_to_crash: float
    restart_delay: float
    never_restarted: frozenset[PeerId]
    corruption_rate: float
    burst: int = 1
    rounds_graphs: Rounds | None = None
    """The graph of each round, if it changes."""
    synchrony: Synchrony = Synchrony(name="rounds")
    """Which messages a round takes."""

    @property
    def launcher_declares_dead(self) -> bool:
        """Whether neighbors learn at once that a peer is not restarted; not drawn, so that seeds stay the same."""
        return self.rounds % 2 == 0

    def __str__(self) -> str:
        transport, conditions = self.transport, self.conditions
        waits = f"deadline={transport.deadline:g}s give_up={transport.give_up:g}s quorum={transport.quorum:g}"
        if transport.adaptive is not None:
            waits += f" adaptive={transport.adaptive:g}"
        lines = [
            f"{self.topology.peers} peers, edges {' '.join(f'{i}-{j}' for i, j in self.topology.edges)}"
            + ", time-varying" * (self.rounds_graphs is not None),
            f"rounds={self.rounds} checkpoint_every={self.checkpoint_every} joins_at={dict(self.joins_at)}",
            *(
                f"round {t}: {', '.join(operations)}{'; prune' * (t in self.prune_rounds)}"
                for t, operations in enumerate(self.operations)
            ),
            ("no deadlines" if self.waits_forever else waits) + f" synchrony={self.synchrony.short}",
            f"queue={transport.queue} delay={conditions.delay:g}s slow_fraction={conditions.slow_fraction:g}"
            f" keys={conditions.keys} same_host={conditions.same_host}",
            *(f"partition of {sorted(p.island)} from {p.begins:g}s to {p.heals:g}s" for p in conditions.partitions),
            f"faults: {', '.join(self.faults) or 'none'}",
            f"crashes<={self.crashes}, every {self.steps_to_crash:g} steps; "
            f"never restarted: {sorted(self.never_restarted)}{', declared dead' * self.launcher_declares_dead}",
            f"restart_delay={self.restart_delay:g}s corruption_rate={self.corruption_rate:g} burst={self.burst}",
        ]
        return "\n".join(lines)


def draw(random: Random) -> Schedule:
    """Draw one schedule. The order of the calls on ``random`` is part of every seed: do not change it."""
    waits_forever = random.random() < 0.6
    peers = random.choice([2, 2, 3, 3, 4, 4, 5, 6])
    rounds = random.randint(2, 7) if waits_forever else random.randint(4, 20)
    delay = 10.0 ** random.uniform(-4.0, -1.0 if waits_forever else -1.7)
    joiners = random.sample(range(peers), random.randint(1, peers - 1)) if random.random() < 0.2 else []
    schedule = Schedule(
        waits_forever=waits_forever,
        topology=_graph(random, peers),
        rounds=rounds,
        checkpoint_every=random.choice([1, 1, 2, 3] if waits_forever else [1, 2, 4, 8]),
        joins_at={peer: random.randint(1, rounds - 1) for peer in sorted(joiners)},
        operations=[_operations(random) for _ in range(rounds)],
        prune_rounds=_prune_rounds(random, rounds),
        transport=_transport(random, waits_forever),
        conditions=NetworkConditions(
            delay=delay,
            slow_fraction=random.choice([0.0, 0.02, 0.1]) if waits_forever else 0.0,
            capacity=random.choice([1, 4, 100]),
            thread_latency=10.0 ** random.uniform(-4.0, -2.0),
            keys=random.random() < 0.4,
            partitions=[_partition(random, peers) for _ in range(random.choice([0, 0, 0, 1, 2]))],
        ),
        training=random.choice([0.01, 0.1, 1.0]) if waits_forever else random.choice([0.1, 1.0]),
        faults=random.choices(
            ("crash", "disconnect", "isolate", "stall-io", "stall-loop", "stop"), k=random.randint(0, 10)
        ),
        fault_interval=random.choice([0.02, 0.2, 1.0, 4.0]),
        crashes=random.choice([0, 1, 2, 4, 8] if waits_forever else [0, 2, 4, 8, 16]),
        steps_to_crash=random.choice([5.0, 30.0, 100.0, 300.0] if waits_forever else [30.0, 100.0, 300.0, 1000.0]),
        restart_delay=random.choice([0.1, 2.0, 10.0] if waits_forever else [0.1, 4.0, 10.0, 20.0]),
        never_restarted=frozenset() if waits_forever else frozenset(j for j in range(peers) if random.random() < 0.2),
        corruption_rate=random.choice([0.0, 0.0, 0.3] if waits_forever else [0.0, 0.3, 0.6]),
    )
    schedule = replace(schedule, conditions=replace(schedule.conditions, same_host=random.random() < 0.5))
    if waits_forever and random.random() < 0.5:  # with deadlines, messages of one kind could not be told apart
        # Some wait in a DEALER when its connection breaks, and are read before what was lost is sent again.
        few = min(schedule.conditions.capacity, 4)
        schedule = replace(schedule, burst=8, conditions=replace(schedule.conditions, capacity=few))
    return schedule


def with_time_varying_graph(schedule: Schedule, seed: int) -> Schedule:
    """Return the schedule with another graph in every round, within its topology: half of the edges at random.

    In half of the cases they have one direction only; then nothing is pruned or summed up.
    """
    directed = Random(f"directed {seed}").random() < 0.5
    peers, edges = schedule.topology.peers, schedule.topology.edges

    @cache
    def at(t: int) -> Topology:
        random = Random(f"{seed} {t}")
        if directed:
            arcs = [arc for i, j in edges for arc in ((i, j), (j, i)) if random.random() < 0.5]
            return WeightedTopology.averaging(peers, arcs)
        return Topology.from_edges(peers, [edge for edge in edges if random.random() < 0.5])

    operations = [
        [operation for operation in each if operation != "sum" or not directed] for each in schedule.operations
    ]
    return replace(schedule, operations=operations, prune_rounds=frozenset(), rounds_graphs=at)


def asynchronous(schedule: Schedule, seed: int) -> Schedule:
    """Return the schedule with rounds that do not wait for one another, or for a message of some rounds before."""
    random = Random(f"asynchronous {seed}")
    staleness = random.choice([None, None, 0, 1, 3])
    if random.random() < 0.5:  # slow connections, on which entries are superseded before they are sent
        slow = replace(schedule.conditions, slow_fraction=0.5, capacity=1)
        schedule = replace(schedule, conditions=slow, training=0.01, crashes=max(4, schedule.crashes))
    choices: Sequence[Sequence[Operation]] = (["exchange"], ["gossip"], ["every"], ["ask"], ["exchange", "gossip"])
    operations = Random(f"operations {seed}").choice(choices)
    return replace(
        schedule,
        operations=[operations] * schedule.rounds,
        prune_rounds=frozenset(),
        burst=1,
        synchrony=Synchrony(name="none") if staleness is None else Synchrony(staleness=staleness),
    )


def _graph(random: Random, peers: int) -> Topology:
    tree = [(peer, random.randrange(peer)) for peer in range(1, peers)]
    density = random.choice([0.0, 0.3, 1.0])
    more = [(i, j) for i in range(peers) for j in range(i) if random.random() < density]
    return Topology.from_edges(peers, [*tree, *more])


def _operations(random: Random) -> list[Operation]:
    optional: tuple[Operation, ...] = ("again", "reply", "some", "sum")
    return ["exchange", *(operation for operation in optional if random.random() < 0.25)]


def _prune_rounds(random: Random, rounds: int) -> frozenset[int]:
    if random.random() < 0.3:
        return frozenset(t for t in range(rounds) if random.random() < 0.3)
    return frozenset()


def _transport(random: Random, waits_forever: bool) -> Transport:
    queue = random.choice([1, 2, 4, 64])
    if waits_forever:
        return Transport(deadline=FOREVER, give_up=GIVE_UP, queue=queue)
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
