"""Simulated connections between DEALER and ROUTER sockets, which can be slow, break and lose messages.

Modeled after libzmq and TCP, as far as a protocol can observe it:

- A connection delivers in order; a slow message delays those behind it, but not other connections. Its capacity is
  limited: further messages wait in the DEALER, whose queue is limited too.
- A connection that breaks delivers some of the messages in transit and loses the rest, in both directions. Neither
  side learns how many. The DEALER notices a little later; until then it sends into the dead connection until that is
  full.
- The DEALER reconnects by itself and sends its queued messages *first*, before the link knows of the new connection.
- The ROUTER gets no connection events. A new connection with the same identity replaces the old one
  (ROUTER_HANDOVER); unread messages of the old one are lost. Answers go to the latest connection, or are lost.
- With keys, each DEALER has an unguessable identity (peers/sockets.py), so unread messages of an old connection, even
  of a dead process, are still read before or after those of the new one. Answers go to the connection last read from.
- A partition delays everything that crosses it until it heals; after HEARTBEAT_TIMEOUT, heartbeats break connections.
- Ports of dead processes are reused.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Protocol

from p2pfl import PeerId
from p2pfl.messaging.wire import Buffer
from peers.zmq_sockets import HEARTBEAT_TIMEOUT

if TYPE_CHECKING:
    from tests.simulation.sockets import SimulatedDealer, SimulatedRouter


class Killed(BaseException):
    """This process has been killed. Not an Exception, because kill -9 cannot be caught."""


class Process(Protocol):
    """What sockets and threads need to know of the process that they belong to."""

    peer: PeerId
    dead: bool
    busy_until: float
    """Virtual time at which its event loop is free again (after training, or a stall)."""
    stalled_until: float
    """Virtual time at which its I/O thread runs again."""

    def step(self, description: str) -> None:
        """Precede every step in the outside world. Raises Killed if the process is dead or dies here."""


@dataclass(frozen=True)
class Partition:
    """From ``begins`` to ``heals``, nothing passes between ``island`` and the other peers."""

    island: frozenset[PeerId]
    begins: float
    heals: float

    def separates(self, one: PeerId, other: PeerId, since: float, until: float | None = None) -> bool:
        """Whether it separates two peers at time ``since``, or at any time from ``since`` to ``until``."""
        overlaps = since < self.heals and self.begins <= (since if until is None else until)
        return overlaps and (one in self.island) != (other in self.island)


@dataclass
class NetworkConditions:
    """Speed and reliability of the simulated connections.

    Attributes:
        delay: mean seconds that a message is in transit.
        slow_fraction: fraction of the messages that take up to a hundred times as long.
        capacity: messages that fit into one direction of a connection.
        thread_latency: mean seconds until a thread that has work runs.
        keys: whether the peers use keys.
        same_host: whether the peers read one another's journals.
        partitions: which peers are separated, and when.
    """

    delay: float
    slow_fraction: float
    capacity: int
    thread_latency: float
    keys: bool = False
    same_host: bool = False
    partitions: Sequence[Partition] = ()


@dataclass
class Network:
    """Everything that the simulated processes share: connections, ports and the address folder."""

    loop: asyncio.AbstractEventLoop
    random: Random
    conditions: NetworkConditions
    trace: Callable[[str], None]
    """Record an event."""
    counts: Counter[str]
    routers: dict[str, SimulatedRouter] = field(default_factory=dict)
    connections: dict[Connection, None] = field(default_factory=dict)
    """Connections that are up, in the order in which they were made."""
    addresses: dict[PeerId, str] = field(default_factory=dict)
    declared_dead: set[PeerId] = field(default_factory=set)
    """By the launcher, which does not restart them."""
    address_changes: int = 0
    addresses_changed_at: float = 0.0
    used_ports: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for partition in self.conditions.partitions:
            if partition.heals - partition.begins > HEARTBEAT_TIMEOUT:
                self.loop.call_at(partition.begins + HEARTBEAT_TIMEOUT, self._time_out, partition)

    def draw(self, mean: float) -> float:
        """Draw an exponentially distributed time in seconds."""
        return self.random.expovariate(1.0 / mean)

    def passes_at(self, one: PeerId, other: PeerId, when: float) -> float:
        """Return the first time from ``when`` on at which no partition separates two peers."""
        while heals := [p.heals for p in self.conditions.partitions if p.separates(one, other, when)]:
            when = max(heals)
        return when

    def separated(self, one: PeerId, other: PeerId, since: float, until: float) -> bool:
        """Whether a partition separated two peers at any time from ``since`` to ``until``."""
        return any(partition.separates(one, other, since, until) for partition in self.conditions.partitions)

    def _time_out(self, partition: Partition) -> None:
        for connection in list(self.connections):
            if partition.separates(*connection.ends, self.loop.time()):
                self.counts["connections timed out"] += 1
                connection.break_off()

    def allocate_port(self) -> str:
        """Return a port for a new ROUTER; sometimes one that a dead process used before."""
        free = [address for address in self.used_ports if address not in self.routers]
        if free and self.random.random() < 0.2:
            self.counts["ports reused"] += 1
            return self.random.choice(free)
        self.used_ports.append(f"port {len(self.used_ports)}")
        return self.used_ports[-1]

    def publish(self, peer: PeerId, address: str | None) -> None:
        if address is None:
            del self.addresses[peer]
        else:
            self.addresses[peer] = address
        self._changed_addresses()

    def declare_dead(self, peer: PeerId) -> None:
        self.declared_dead.add(peer)
        self.counts["declared dead"] += 1
        self._changed_addresses()

    def _changed_addresses(self) -> None:
        self.address_changes += 1
        self.addresses_changed_at = self.loop.time()


@dataclass(eq=False)
class _Direction:
    """One direction of a connection."""

    connection: Connection
    deliver: Callable[[list[bytes], str], None]
    in_transit: deque[tuple[list[bytes], str, asyncio.TimerHandle]] = field(default_factory=deque)
    last_arrival: float = 0.0

    def carry(self, frames: Sequence[Buffer], label: str) -> None:
        network = self.connection.network
        conditions, now = network.conditions, network.loop.time()
        delay = network.draw(conditions.delay)
        if network.random.random() < conditions.slow_fraction:
            delay *= network.random.uniform(1.0, 100.0)
        when = max(self.last_arrival, network.passes_at(*self.connection.ends, now + delay))
        self.last_arrival = when
        timer = network.loop.call_at(when, self._arrive)
        self.in_transit.append(([bytes(frame) for frame in frames], label, timer))

    def _arrive(self) -> None:
        # Timers that are due at the same time fire in any order; the queue keeps the messages in order.
        if self.in_transit:
            frames, label, _ = self.in_transit.popleft()
            self.deliver(frames, label)

    def lose_after(self, count: int) -> None:
        """Lose all messages in transit but the first ``count``."""
        while len(self.in_transit) > count:
            _, label, timer = self.in_transit.pop()
            timer.cancel()
            self.connection.network.counts["messages lost in transit"] += 1
            self.connection.network.trace(f"{self.connection}: {label} lost")


class Connection:
    """A connection from a DEALER to a ROUTER."""

    def __init__(self, network: Network, dealer: SimulatedDealer, router: SimulatedRouter) -> None:
        self.network = network
        self.dealer = dealer
        self.router = router
        self.ends = (dealer.process.peer, router.process.peer)
        self.up = True
        self.unread = 0
        """Messages that wait in the ROUTER."""
        self.lost = 0
        """Messages that fill a dead connection: nobody will ever read them."""
        self.to_router = _Direction(self, self._deliver_to_router)
        self.to_dealer = _Direction(self, self._deliver_to_dealer)
        network.connections[self] = None

    def __str__(self) -> str:
        return f"{self.dealer.name} at {self.router.bound}"

    @property
    def has_room(self) -> bool:
        return self.unread + len(self.to_router.in_transit) + self.lost < self.network.conditions.capacity

    def break_off(self) -> None:
        """Break the connection: lose some of the messages in transit. The DEALER notices soon."""
        if not self.up:
            return
        self.up = False
        del self.network.connections[self]
        self.network.trace(f"{self}: connection breaks")
        before = len(self.to_router.in_transit)
        for direction in (self.to_router, self.to_dealer):
            direction.lose_after(self.network.random.randint(0, len(direction.in_transit)))
        self.lost = before - len(self.to_router.in_transit)
        self.network.loop.call_later(self.network.draw(0.05), self.dealer.on_disconnected, self)

    def replace(self) -> None:
        """A new connection with the same identity replaces this one: the ROUTER reads nothing more from it."""
        self.break_off()
        self.to_router.lose_after(0)
        self.to_dealer.lose_after(0)

    def _deliver_to_router(self, frames: list[bytes], label: str) -> None:
        self.router.on_message(self, frames, label)

    def _deliver_to_dealer(self, frames: list[bytes], label: str) -> None:
        self.dealer.on_message(frames, label)
