"""Simulated sockets: what ZeroMQ's ROUTER and DEALER do for a link, over wires that break.

What is modelled of libzmq and TCP, because a protocol can trip over it:

- A connection delivers in order what it delivers, and is as fast as its slowest message; different connections do not
  wait for one another. So many messages fit into it; the rest waits in the DEALER, and then nothing more fits.
- A connection that breaks delivers a part of what is under way, and loses the rest, in both directions. Neither side
  is told how much. The DEALER learns of it a little later, and goes on sending into nothing until then.
- The DEALER connects again by itself, and what waits in it goes out *first*, before the link knows of anything.
- The ROUTER is not told anything. A new connection under the same identity takes the old one's place
  (ROUTER_HANDOVER): what is still unread of the old one is lost. Answers go to the latest connection, or get lost.
- With keys, each DEALER has an identity of its own (peers/sockets.py): what is unread of the old one, be it of a
  process that is no more, is read by and by, before or after what the new one says. Answers go to the one heard last.
- A partition delays everything between its sides until it heals; after SILENCE, heartbeats break the connections.
- Ports of those that died are given to others.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Literal, Protocol

import msgpack

from p2pfl.runfolder import PeerId
from p2pfl.wire import Buffer
from peers.sockets import INPUT, ROOM, SILENCE, Dealer, Router, Turns


class Killed(BaseException):
    """This process has been killed. Not an Exception: kill -9 cannot be caught."""


class Life(Protocol):
    """One process of a peer, as long as it lives."""

    peer: PeerId
    dead: bool
    busy_until: float
    """When its event loop turns again: it is training until then."""
    stalled_until: float
    """When its I/O thread runs again: the host has something else to do."""

    def act(self, what: str) -> None:
        """Comes before everything that it does to the world. Raises Killed if it dies there, or is dead."""


@dataclass(frozen=True)
class Partition:
    """From ``begins`` to ``heals``, nothing passes between ``island`` and the other peers."""

    island: frozenset[PeerId]
    begins: float
    heals: float

    def severs(self, one: PeerId, other: PeerId, since: float, until: float | None = None) -> bool:
        """At that moment, or between two."""
        between = since < self.heals and self.begins <= (since if until is None else until)
        return between and (one in self.island) != (other in self.island)


@dataclass
class Weather:
    """How fast the wires are.

    Attributes:
        delay: mean seconds of a message under way.
        wild: share of the messages that take up to a hundred times as long.
        fits: messages that fit into one direction of a connection.
        turn: mean seconds until a thread that has something to do runs.
        keys: whether the peers have keys.
        partitions: when which peers are cut off.
    """

    delay: float
    wild: float
    fits: int
    turn: float
    keys: bool = False
    partitions: Sequence[Partition] = ()


@dataclass
class Network:
    """All that the processes of a run share: wires, ports, and the folder of addresses."""

    loop: asyncio.AbstractEventLoop
    random: Random
    weather: Weather
    note: Callable[[str], None]
    """Takes down an event."""
    counts: Counter[str]
    routers: dict[str, SimulatedRouter] = field(default_factory=dict)
    connections: dict[Connection, None] = field(default_factory=dict)
    """Those that are up, in the order in which they came up."""
    addresses: dict[PeerId, str] = field(default_factory=dict)
    changes: int = 0
    changed_at: float = 0.0
    used: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for partition in self.weather.partitions:
            if partition.heals - partition.begins > SILENCE:
                self.loop.call_at(partition.begins + SILENCE, self._fall_silent, partition)

    def draw(self, mean: float) -> float:
        """Seconds."""
        return self.random.expovariate(1.0 / mean)

    def passes_at(self, one: PeerId, other: PeerId, when: float) -> float:
        """The first moment from ``when`` on at which something passes between two peers."""
        while heals := [p.heals for p in self.weather.partitions if p.severs(one, other, when)]:
            when = max(heals)
        return when

    def parted(self, one: PeerId, other: PeerId, since: float, until: float) -> bool:
        """Whether at some time in between nothing passed between two peers."""
        return any(partition.severs(one, other, since, until) for partition in self.weather.partitions)

    def _fall_silent(self, partition: Partition) -> None:
        for connection in list(self.connections):
            if partition.severs(*connection.ends, self.loop.time()):
                self.counts["connections fallen silent"] += 1
                connection.break_off()

    def port(self) -> str:
        """Where the next one listens; sometimes where somebody else did before."""
        free = [address for address in self.used if address not in self.routers]
        if free and self.random.random() < 0.2:
            self.counts["ports used again"] += 1
            return self.random.choice(free)
        self.used.append(f"port {len(self.used)}")
        return self.used[-1]

    def publish(self, peer: PeerId, address: str | None) -> None:
        if address is None:
            del self.addresses[peer]
        else:
            self.addresses[peer] = address
        self.changes += 1
        self.changed_at = self.loop.time()


@dataclass(eq=False)
class _Flow:
    """One direction of a connection."""

    connection: Connection
    deliver: Callable[[list[bytes], str], None]
    under_way: deque[tuple[list[bytes], str, asyncio.TimerHandle]] = field(default_factory=deque)
    latest: float = 0.0
    """When the last of them arrives."""

    def carry(self, frames: Sequence[Buffer], label: str) -> None:
        network = self.connection.network
        weather, now = network.weather, network.loop.time()
        delay = network.draw(weather.delay)
        if network.random.random() < weather.wild:
            delay *= network.random.uniform(1.0, 100.0)
        when = max(self.latest, network.passes_at(*self.connection.ends, now + delay))
        self.latest = when
        timer = network.loop.call_at(when, self._arrive)
        self.under_way.append(([bytes(frame) for frame in frames], label, timer))

    def _arrive(self) -> None:
        # Timers of one moment fire in any order: the flow's order is that of its queue.
        if self.under_way:
            frames, label, _ = self.under_way.popleft()
            self.deliver(frames, label)

    def lose(self, first: int) -> None:
        """What is under way from the ``first``-th message on never arrives."""
        while len(self.under_way) > first:
            _, label, timer = self.under_way.pop()
            timer.cancel()
            self.connection.network.counts["messages lost under way"] += 1
            self.connection.network.note(f"{self.connection}: {label} is lost")


class Connection:
    """From a DEALER to a ROUTER."""

    def __init__(self, network: Network, dealer: SimulatedDealer, router: SimulatedRouter) -> None:
        self.network = network
        self.dealer = dealer
        self.router = router
        self.ends = (dealer.life.peer, router.life.peer)
        self.up = True
        self.unread = 0
        """Messages that wait in the ROUTER."""
        self.there = _Flow(self, self._to_router)
        self.back = _Flow(self, self._to_dealer)
        network.connections[self] = None

    def __str__(self) -> str:
        return f"{self.dealer.name} at {self.router.address}"

    @property
    def has_room(self) -> bool:
        return self.unread + len(self.there.under_way) < self.network.weather.fits

    def break_off(self) -> None:
        """Lose what is under way, but for a part. The DEALER notices soon."""
        if not self.up:
            return
        self.up = False
        del self.network.connections[self]
        self.network.note(f"{self}: breaks")
        for flow in (self.there, self.back):
            flow.lose(self.network.random.randint(0, len(flow.under_way)))
        self.network.loop.call_later(self.network.draw(0.05), self.dealer.cut_off, self)

    def handed_over(self) -> None:
        """Another connection under this identity has come: the ROUTER hears no more of this one."""
        self.break_off()
        self.there.lose(0)
        self.back.lose(0)

    def _to_router(self, frames: list[bytes], label: str) -> None:
        self.router.arrived(self, frames, label)

    def _to_dealer(self, frames: list[bytes], label: str) -> None:
        self.dealer.arrived(frames, label)


class SimulatedRouter:
    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self.network, self.life = world.network, world.life
        self.bound = self.address = self.network.port()
        self.open = True
        self.watched = True
        self.inbox: deque[tuple[Connection, list[bytes]]] = deque()
        self.by_identity: dict[bytes, Connection] = {}
        self.routes: dict[bytes, bytes] = {}
        """With keys: by the sender's name, the identity under which it was heard last."""
        self.network.routers[self.address] = self

    @property
    def stirs(self) -> bool:
        return self.watched and bool(self.inbox)

    def connected(self, connection: Connection) -> None:
        identity = connection.dealer.identity
        before = self.by_identity.get(identity)
        if before is not None:
            before.handed_over()
            self.inbox = deque(item for item in self.inbox if item[0] is not before)
        self.by_identity[identity] = connection

    def arrived(self, connection: Connection, frames: list[bytes], label: str) -> None:
        if self.open:
            self.network.note(f"{connection}: {label} arrives")
            self.inbox.append((connection, frames))
            connection.unread += 1
            self.world.stir()

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        if not self.inbox:
            return None
        self.life.act("read a message")
        place = 0
        if self.network.weather.keys:
            read = self.network.random.choice(list(dict.fromkeys(one for one, _ in self.inbox)))
            place = next(n for n, (one, _) in enumerate(self.inbox) if one is read)
        connection, frames = self.inbox[place]
        del self.inbox[place]
        connection.unread -= 1
        connection.dealer.pump()
        name = connection.dealer.name.encode()
        self.routes[name] = connection.dealer.identity
        return name, list(frames)

    def send(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        label = _label(frames)
        self.life.act(f"answer {label}")
        connection = self.by_identity.get(self.routes.get(identity, identity))
        if connection is not None and connection.up:
            connection.back.carry(frames, label)
        else:
            self.network.note(f"{identity.decode()} at {self.address}: {label} finds no connection")

    def watch(self, on: bool) -> None:
        self.watched = on
        self.world.stir()

    def close(self) -> None:
        if self.open:
            self.open = False
            del self.network.routers[self.address]
            for connection in list(self.network.connections):
                if connection.router is self:
                    connection.break_off()


class SimulatedDealer:
    def __init__(self, world: SimulatedWorld, to: PeerId) -> None:
        self.world = world
        self.network, self.life = world.network, world.life
        self.to = to
        self.name = f"{self.life.peer}>{to}"
        self.identity = self.name.encode()
        if self.network.weather.keys:
            self.identity += f".{self.network.random.getrandbits(64):016x}".encode()
        self.open = True
        self.watched = 0
        self.address = ""
        self.connection: Connection | None = None
        self.established = False
        self.waiting: deque[tuple[Sequence[Buffer], str]] = deque()
        self.inbox: deque[list[bytes]] = deque()
        self.events: deque[Literal["connected", "lost"]] = deque()

    @property
    def stirs(self) -> bool:
        return bool((self.watched & INPUT and self.inbox) or (self.watched & ROOM and self.has_room))

    @property
    def has_room(self) -> bool:
        return bool(self.address) and len(self.waiting) < self.world.queue

    # -- connecting

    def connect(self, address: str) -> None:
        self.life.act(f"connect to {address}")
        self.address = address
        self._try_in(self.network.draw(self.network.weather.delay))

    def _try_in(self, seconds: float) -> None:
        now = self.network.loop.time()
        when = self.network.passes_at(self.life.peer, self.to, now + seconds)
        self.network.loop.call_at(when, self._try)

    def _try(self) -> None:
        if not self.open:
            return
        router = self.network.routers.get(self.address)
        if router is None:
            self._try_in(self.network.random.uniform(0.1, 2.0))  # as libzmq's RECONNECT_IVL and _MAX say
            return
        now = self.network.loop.time()
        if self.network.passes_at(self.life.peer, router.life.peer, now) > now:
            self._try_in(1.0)  # somebody else on that port, beyond a partition
            return
        self.connection = Connection(self.network, self, router)
        router.connected(self.connection)
        self.network.note(f"{self.connection}: connected")
        self.network.loop.call_later(self.network.draw(self.network.weather.delay), self._ready, self.connection)

    def _ready(self, connection: Connection) -> None:
        if self.open and self.connection is connection:
            self.established = True
            self.events.append("connected")
            self.pump()

    def cut_off(self, connection: Connection) -> None:
        """The connection is found to be no more."""
        connection.back.lose(0)
        if self.open and self.connection is connection:
            self.connection, self.established = None, False
            self.events.append("lost")
            self._try_in(self.network.random.uniform(0.1, 2.0))

    # -- saying and hearing

    def send(self, frames: Sequence[Buffer]) -> bool:
        if not self.has_room:
            return False
        label = _label(frames)
        self.life.act(f"send {label} to {self.to}")
        self.waiting.append((frames, label))
        self.pump()
        return True

    def pump(self) -> None:
        """Move what waits into the connection, as far as it fits. If it has broken, unnoticed, that is lost."""
        had_room = self.has_room
        while self.waiting and self.established and self.connection is not None and self.connection.has_room:
            frames, label = self.waiting.popleft()
            if self.connection.up:
                self.connection.there.carry(frames, label)
            else:
                self.network.counts["messages sent into nothing"] += 1
                self.network.note(f"{self.connection}: {label} goes nowhere")
        if self.has_room and not had_room:
            self.world.stir()

    def arrived(self, frames: list[bytes], label: str) -> None:
        if self.open:
            self.network.note(f"{self.name}: {label} comes back")
            self.inbox.append(frames)
            self.world.stir()

    def receive(self) -> list[bytes] | None:
        if not self.inbox:
            return None
        self.life.act("read an answer")
        return self.inbox.popleft()

    def event(self) -> Literal["connected", "lost"] | None:
        return self.events.popleft() if self.events else None

    def watch(self, events: int) -> None:
        self.watched = events
        self.world.stir()

    def close(self) -> None:
        if self.open:
            self.open = False
            if self.connection is not None:
                self.connection.break_off()


class SimulatedWorld:
    """A World (peers/sockets.py) of one process. Its I/O loop and its event loop take turns, drawn by lot."""

    def __init__(self, network: Network, life: Life, queue: int) -> None:
        self.network = network
        self.life = life
        self.queue = queue
        self.sockets: list[SimulatedRouter | SimulatedDealer] = []
        self._io: Turns | None = None
        self._begun = False
        self._over: asyncio.Future[None] = network.loop.create_future()
        self._next: asyncio.TimerHandle | None = None
        self._calls: deque[Callable[[], None]] = deque()

    def now(self) -> float:
        return self.network.loop.time()

    def listen(self) -> Router:
        self.life.act("listen")
        router = SimulatedRouter(self)
        self.sockets.append(router)
        return router

    def dealer(self, to: PeerId) -> Dealer:
        dealer = SimulatedDealer(self, to)
        self.sockets = [socket for socket in self.sockets if socket.open]
        self.sockets.append(dealer)
        return dealer

    # -- addresses

    def publish(self, address: str) -> None:
        self.life.act(f"publish {address}")
        self.network.publish(self.life.peer, address)

    def withdraw(self, address: str) -> None:
        self.life.act(f"withdraw {address}")
        if self.address_of(self.life.peer) == address:
            self.network.publish(self.life.peer, None)

    def address_of(self, peer: PeerId) -> str | None:
        return self.network.addresses.get(peer)

    def settled(self, peer: PeerId) -> bool:
        return False

    def absent(self, peer: PeerId) -> bool:
        return self.address_of(peer) is None

    def published(self) -> int:
        return self.network.changes if self.now() - self.network.changed_at > 2.0 else 0

    # -- the two threads

    def start(self, io: Turns) -> None:
        self._io = io
        self.wake()

    def wake(self) -> None:
        self.life.act("wake the I/O loop")
        self._turn_at(self.now() + self.network.draw(self.network.weather.turn))

    def stir(self) -> None:
        """A socket may have something for the I/O loop."""
        if self._begun and any(socket.stirs for socket in self.sockets):
            self._turn_at(self.now() + self.network.draw(self.network.weather.turn))

    def _turn_at(self, when: float) -> None:
        """At the latest, unless the thread is stalled."""
        when = max(when, self.life.stalled_until)
        if self._next is not None:
            if self._next.when() <= when and not self._next.cancelled():
                return
            self._next.cancel()
        self._next = self.network.loop.call_at(when, self._turn)

    def _turn(self) -> None:
        self._next = None
        if self.life.dead or self._io is None:
            return
        if self.life.stalled_until > self.now():
            self._turn_at(self.life.stalled_until)
            return
        try:
            if self._begun:
                ready: Collection[object] = [socket for socket in self.sockets if socket.open and socket.stirs]
                patience = self._io.send(ready)
            else:
                self._begun = True
                patience = next(self._io)
        except StopIteration:
            self._io = None
            self._over.set_result(None)
            return
        except Killed:
            return
        self._turn_at(self.now() + patience)
        self.stir()

    def call_soon(self, function: Callable[[], None]) -> None:
        self.life.act("call the event loop")
        self._calls.append(function)
        if len(self._calls) == 1:
            when = self.now() + self.network.draw(self.network.weather.turn)
            self._call_at(when, put_off=when < self.life.busy_until)

    def _call_at(self, when: float, *, put_off: bool = False) -> None:
        self.network.loop.call_at(max(when, self.life.busy_until), self._call, put_off)

    def _call(self, put_off: bool) -> None:
        """``put_off``: training was in the way, and is over; between that and the next an event loop turns once."""
        if self.life.dead:
            return
        if self.life.busy_until > self.now() and not put_off:
            self._call_at(self.life.busy_until, put_off=True)
            return
        while self._calls:
            function = self._calls.popleft()
            with suppress(Killed):
                self.life.act("hear from the I/O loop")
                function()

    @property
    def has_news(self) -> bool:
        """Whether the event loop has not heard yet all that the I/O loop has told it."""
        return bool(self._calls)

    async def ended(self) -> None:
        self.life.act("wait for the I/O loop to end")
        await self._over

    # -- the end of the process

    def vanish(self) -> None:
        """The process is no more: the system closes its sockets."""
        if self._next is not None:
            self._next.cancel()
        if self._io is not None and self._begun:
            with suppress(Killed):
                self._io.close()
        for socket in self.sockets:
            socket.close()


def _label(frames: Iterable[Buffer]) -> str:
    """Kind, round and number of a message, for the trace."""
    _, _, kind, t, _, seq, *_ = msgpack.unpackb(next(iter(frames)))
    return f"{kind} t={t} seq={seq}"
