"""Simulated ROUTER and DEALER sockets: what ZmqRouter and ZmqDealer are in production."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from p2pfl import PeerId
from p2pfl.messaging import control
from p2pfl.messaging.wire import Buffer
from tests.simulation.network import Connection

if TYPE_CHECKING:
    from tests.simulation.world import SimulatedWorld


class SimulatedRouter:
    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self.network, self.process = world.network, world.process
        self.bound = self.network.allocate_port()
        self.open = True
        self.watched = True
        self.inbox: deque[tuple[Connection, list[bytes]]] = deque()
        self.by_identity: dict[bytes, Connection] = {}
        self.routes: dict[bytes, bytes] = {}
        """With keys: the identity of the connection last read from, by name of its DEALER."""
        self.network.routers[self.bound] = self

    @property
    def is_ready(self) -> bool:
        return self.watched and bool(self.inbox)

    def on_connected(self, connection: Connection) -> None:
        identity = connection.dealer.identity
        old = self.by_identity.get(identity)
        if old is not None:
            old.replace()
            self.inbox = deque(item for item in self.inbox if item[0] is not old)
        self.by_identity[identity] = connection

    def on_message(self, connection: Connection, frames: list[bytes], label: str) -> None:
        if self.open:
            self.network.trace(f"{connection}: {label} arrives")
            self.inbox.append((connection, frames))
            connection.unread += 1
            self.world.wake_if_ready()

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        if not self.inbox:
            return None
        self.process.step("read a message")
        position = 0
        if self.network.conditions.keys:
            chosen = self.network.random.choice(list(dict.fromkeys(connection for connection, _ in self.inbox)))
            position = next(n for n, (connection, _) in enumerate(self.inbox) if connection is chosen)
        connection, frames = self.inbox[position]
        del self.inbox[position]
        connection.unread -= 1
        connection.dealer.pump()
        name = connection.dealer.name.encode()
        self.routes[name] = connection.dealer.identity
        return name, list(frames)

    def send(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        label = _label(frames)
        self.process.step(f"answer {label}")
        connection = self.by_identity.get(self.routes.get(identity, identity))
        if connection is not None and connection.up:
            connection.to_dealer.carry(frames, label)
        else:
            self.network.trace(f"{identity.decode()} at {self.bound}: {label} dropped, no connection")

    def watch(self, on: bool) -> None:
        self.watched = on
        self.world.wake_if_ready()

    def close(self) -> None:
        if self.open:
            self.open = False
            del self.network.routers[self.bound]
            for connection in list(self.network.connections):
                if connection.router is self:
                    connection.break_off()


class SimulatedDealer:
    def __init__(self, world: SimulatedWorld, to: PeerId, address: str) -> None:
        self.world = world
        self.network, self.process = world.network, world.process
        self.to = to
        self.name = f"{self.process.peer}>{to}"
        self.identity = self.name.encode()
        if self.network.conditions.keys:
            self.identity += f".{self.network.random.getrandbits(64):016x}".encode()
        self.open = True
        self.watched = False
        self.address = address
        self.connection: Connection | None = None
        self.established = False
        self.queue: deque[tuple[Sequence[Buffer], str]] = deque()
        self.inbox: deque[list[bytes]] = deque()
        self.events: deque[Literal["connected", "lost"]] = deque()
        self.process.step(f"connect to {address}")
        self._connect_in(self.network.draw(self.network.conditions.delay))

    @property
    def is_ready(self) -> bool:
        return bool(self.events) or (self.watched and self.has_room)

    @property
    def has_room(self) -> bool:
        return len(self.queue) < self.world.queue

    # -- connecting

    def _connect_in(self, seconds: float) -> None:
        now = self.network.loop.time()
        when = self.network.passes_at(self.process.peer, self.to, now + seconds)
        self.network.loop.call_at(when, self._connect)

    def _connect(self) -> None:
        if not self.open:
            return
        router = self.network.routers.get(self.address)
        if router is None:
            self._connect_in(self.network.random.uniform(0.1, 2.0))  # libzmq's RECONNECT_IVL and RECONNECT_IVL_MAX
            return
        now = self.network.loop.time()
        if self.network.passes_at(self.process.peer, router.process.peer, now) > now:
            self._connect_in(1.0)  # another peer, beyond a partition, listens on that port now
            return
        self.connection = Connection(self.network, self, router)
        router.on_connected(self.connection)
        self.network.trace(f"{self.connection}: connected")
        self.network.loop.call_later(
            self.network.draw(self.network.conditions.delay), self._on_handshake, self.connection
        )

    def _on_handshake(self, connection: Connection) -> None:
        if self.open and self.connection is connection:
            self.established = True
            self.events.append("connected")
            self.pump()
            self.world.wake_if_ready()

    def on_disconnected(self, connection: Connection) -> None:
        connection.to_dealer.lose_after(0)
        if self.open and self.connection is connection:
            self.connection, self.established = None, False
            self.events.append("lost")
            self.world.wake_if_ready()
            self._connect_in(self.network.random.uniform(0.1, 2.0))

    # -- sending and receiving

    def send(self, frames: Sequence[Buffer]) -> bool:
        if not self.has_room:
            return False
        label = _label(frames)
        self.process.step(f"send {label} to {self.to}")
        self.queue.append((frames, label))
        self.pump()
        return True

    def pump(self) -> None:
        """Move queued messages into the connection until it is full; if it has broken unnoticed, they are lost."""
        had_room = self.has_room
        while self.queue and self.established and self.connection is not None and self.connection.has_room:
            frames, label = self.queue.popleft()
            if self.connection.up:
                self.connection.to_router.carry(frames, label)
            else:
                self.connection.lost += 1
                self.network.counts["messages sent on dead connections"] += 1
                self.network.trace(f"{self.connection}: {label} lost, the connection is dead")
        if self.has_room and not had_room:
            self.world.wake_if_ready()

    def on_message(self, frames: list[bytes], label: str) -> None:
        if self.open:
            self.network.trace(f"{self.name}: answer {label} arrives")
            self.inbox.append(frames)
            self.world.wake_if_ready()

    def receive(self) -> list[bytes] | None:
        if not self.inbox:
            return None
        self.process.step("read an answer")
        return self.inbox.popleft()

    def event(self) -> Literal["connected", "lost"] | None:
        return self.events.popleft() if self.events else None

    def watch(self, on: bool) -> None:
        if on != self.watched:
            self.watched = on
            self.world.wake_if_ready()

    def close(self) -> None:
        if self.open:
            self.open = False
            if self.connection is not None:
                self.connection.break_off()


def _label(frames: Iterable[Buffer]) -> str:
    """Describe a message for the trace."""
    message, _, _ = control.unpack(list(frames), None, control.TYPES)
    return f"{type(message).__name__} {[*message]}"
