"""What ZmqLink uses of the world, and the real world: ZeroMQ's sockets, a thread, the system's clock, a folder.

    ZmqLink, the protocol  ──  World  ──  Sockets: ROUTER, DEALERs and their monitors on an I/O thread
                                      └─  simulated wires in virtual time, for tests

The link's I/O loop is a generator. It yields the seconds that it can wait and is sent the sockets that have something
for it: whatever drives it, the protocol is the same code. It runs on one thread only, or looks as if it did.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Literal, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from p2pfl.addresses import AddressBook, is_ipv6, join, split
from p2pfl.config import Transport
from p2pfl.errors import RunFolderError
from p2pfl.keys import Keys
from p2pfl.runfolder import PeerId, write_atomically
from p2pfl.wire import Buffer
from peers.door import DOMAIN, HANDSHAKE, Allowed, Bouncer
from peers.health import Health
from peers.refusals import Refusals
from peers.resolver import Resolver

HEARTBEAT = 5.0
SILENCE = 30.0
"""Seconds between heartbeats, and without any until a connection counts as dead."""
ANSWERED_BY = 5.0
"""Seconds within which a host answers that is there: TCP itself would ask ever more rarely, up to once a minute."""
STUCK = 1.0
"""Seconds that libzmq may take to say that it connects again."""
STRANGERS = 64
"""Connections, of whoever it is, that may be open besides those of neighbours."""
SLACK = 1 << 26
"""Bytes that may be under way on a connection besides full queues: what the kernel holds, framing, heartbeats."""
CURVE_OVERHEAD = 64
"""Bytes that encryption may add to a frame (it adds 33): ``max_message`` bytes fit all the same."""
ANSWER = 1 << 16
"""Bytes of the largest frame that may come as an answer."""
ANSWERS_WAITING = 64
FRAMES = 20_000
"""Frames of a message that are looked at; no header that is short enough announces more."""

SETTLED = 2.0
"""Seconds after which a change of the folder of addresses cannot be followed by one with the same time stamp: no file
system's clock is coarser."""

Turns = Generator[float, Collection[object], None]
"""The I/O loop: yields the seconds until something is due, is sent the Routers and Dealers that have something."""

INPUT, ROOM = 1, 2
"""What a Dealer may be watched for: messages to read, and room to send once there was none."""


Event = Literal["connected", "lost", "unwelcome", "foreign"]
"""What may happen to a Dealer's connection.

``unwelcome``: who listens there does not take our key; the Dealer tries no more. ``foreign``: who listens there does
not speak as we do, or did not prove to have the neighbour's key; the Dealer tries again.
"""


class Router(Protocol):
    """Hears all neighbours. What each of them says comes in order."""

    bound: str
    """Where it listens."""
    address: str
    """Where neighbours may connect."""

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        """The next message, if there is one: the identity of who sent it, and its frames. With keys, the sender
        that the identity names is the owner of the key; a message for which that does not hold has been refused, and
        comes without identity."""

    def send(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        """Answer. It gets lost if the other side is no longer connected, or does not read."""

    def watch(self, on: bool) -> None:
        """Whether messages wake the I/O loop."""

    def close(self) -> None: ...


class Dealer(Protocol):
    """Speaks to one neighbour and hears its answers. Reconnects by itself."""

    def connect(self, address: str) -> None: ...

    def send(self, frames: Sequence[Buffer]) -> bool:
        """False if there is no room at the moment. It gets lost if the connection breaks before it has arrived.
        Large frames are not copied: nobody may change them any more."""

    def receive(self) -> list[bytes] | None:
        """The next answer, if there is one."""

    def event(self) -> Event | None:
        """What happened to the connection since the last event, if anything did."""

    def watch(self, events: int) -> None:
        """Which of INPUT and ROOM wake the I/O loop; none at the beginning."""

    def close(self) -> None: ...


class World(Protocol):
    """Everything that a link touches besides its endpoint. One link, one world."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def listen(self) -> Router:
        """The one Router; it is watched. Comes first. Raises RunFolderError if it cannot listen."""

    def dealer(self, to: PeerId) -> Dealer:
        """A new Dealer for a neighbour, not connected yet."""

    def publish(self, address: str) -> None:
        """Tell all peers where this one listens."""

    def withdraw(self, address: str) -> None:
        """This peer no longer listens there."""

    def address_of(self, peer: PeerId) -> str | None:
        """Where a peer listens, by the run file or by what it has published; None if neither says it now. It may
        change; asked for as long as there is no connection."""

    def settled(self, peer: PeerId) -> bool:
        """Whether the run file says where a peer listens, and not the peer itself."""

    def absent(self, peer: PeerId) -> bool:
        """Whether a peer might have published where it listens, and has not: it has not come up yet, or has left for
        good. One that was killed or stopped is not absent."""

    def published(self) -> int:
        """A number that changes whenever an address may have; 0 while it cannot be told."""

    def start(self, io: Turns) -> None:
        """Drive the I/O loop from now on."""

    def wake(self) -> None:
        """From the event loop: have the I/O loop take a turn."""

    def call_soon(self, function: Callable[[], None]) -> None:
        """From the I/O loop: have the event loop call a function; in order, and not at all if it has ended."""

    async def ended(self) -> None:
        """Return when the I/O loop has come to its end and nothing is left of it."""


# ---- the real one --------------------------------------------------------------------------------------------


class Sockets:
    """ZeroMQ's sockets and a thread that drives the I/O loop. It owns all sockets but one end of the pipe that
    wakes it.

    Args:
        me: this peer.
        addresses: folder in which each peer writes where it listens.
        book: where peers listen of which that is known beforehand.
        transport: the run file's section.
        neighbors: who may come in.
        largest: bytes of the largest message that a neighbour may have to send.
        log: learns who is refused.
        keys: without them nothing is encrypted, and nobody is asked for more than an identity.
        health: answers whoever asks on this host how the peer does; None: nobody can ask.
    """

    def __init__(
        self,
        me: PeerId,
        addresses: Path,
        book: AddressBook,
        transport: Transport,
        neighbors: tuple[PeerId, ...],
        largest: int,
        log: logging.Logger,
        keys: Keys | None = None,
        health: Health | None = None,
    ) -> None:
        self.me = me
        self.addresses = addresses
        self.book = book
        self.transport = transport
        self.neighbors = neighbors
        self.keys = keys
        self.health = health
        self.largest = largest
        self.refusals = Refusals(log, self.now)
        self._resolver = Resolver(self.now, log)
        self._moving = any(book.address_of(one) is not None for one in neighbors)
        """Neighbours may change their address without publishing anything."""
        self._changed = 0
        self._changed_at = 0.0

    def now(self) -> float:
        return monotonic()

    # -- sockets

    def listen(self) -> Router:
        self.loop = asyncio.get_running_loop()
        self.poller = zmq.Poller()
        self.owners: dict[zmq.Socket[bytes], object] = {}
        """Of the sockets that the I/O loop knows of."""
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 4096)
        self._wake = self.context.socket(zmq.PAIR)
        self._wake.bind("inproc://wake")
        self._allowed = Allowed(self.context, self.keys, self.neighbors) if self.keys else None
        try:
            self._router = ZmqRouter(self)
        except zmq.ZMQError as error:
            self.context.destroy(linger=0)
            raise RunFolderError(f"{_wanted(self)} cannot be bound: {error}") from None
        return self._router

    def dealer(self, to: PeerId) -> Dealer:
        return ZmqDealer(self, to)

    # -- addresses

    def publish(self, address: str) -> None:
        write_atomically(self._file(self.me), address.encode())

    def withdraw(self, address: str) -> None:
        if self._read(self.me) == address:  # else another process of this peer has taken over already
            with suppress(OSError):
                self._file(self.me).unlink()

    def address_of(self, peer: PeerId) -> str | None:
        address = self.book.address_of(peer) or self._read(peer)
        try:
            return None if address is None else self._resolver.numeric(address)
        except ValueError:
            return None  # a damaged file: its peer will write it again

    def settled(self, peer: PeerId) -> bool:
        return self.book.address_of(peer) is not None

    def absent(self, peer: PeerId) -> bool:
        if self.settled(peer):
            return False
        try:
            self._file(peer).stat()
        except FileNotFoundError:
            return True
        except OSError:
            pass  # that says nothing
        return False

    def _read(self, peer: PeerId) -> str | None:
        try:
            return self._file(peer).read_text()
        except (OSError, UnicodeDecodeError):
            return None  # not up yet, just closed, or the whole folder is gone

    def published(self) -> int:
        if self._moving:
            return 0
        try:
            changed = self.addresses.stat().st_mtime_ns
        except OSError:
            return 0
        # Two changes within one tick of the file system's clock look like one: look again for a while. That clock may
        # jump, so that its times say nothing but that something has changed.
        if changed != self._changed:
            self._changed, self._changed_at = changed, self.now()
        return changed if self.now() - self._changed_at > SETTLED else 0

    def _file(self, peer: PeerId) -> Path:
        return self.addresses / f"{peer:02d}"

    # -- the thread

    def start(self, io: Turns) -> None:
        self.thread = threading.Thread(target=self._drive, args=[io], name="p2pfl-io", daemon=True)
        self.thread.start()

    def _drive(self, io: Turns) -> None:
        woken = self.context.socket(zmq.PAIR)
        woken.connect("inproc://wake")
        self.poller.register(woken, zmq.POLLIN)
        bouncer = self._router.bouncer
        self.poller.register(bouncer.monitor, zmq.POLLIN)
        if self._allowed:
            self.poller.register(self._allowed.socket, zmq.POLLIN)
        if self.health:
            self.health.open(self.poller)
        with suppress(StopIteration):
            patience = next(io)
            while True:
                stirred = dict(self.poller.poll(int(patience * 1000)))
                if woken in stirred:
                    while woken.poll(0):
                        woken.recv()
                if self._allowed and self._allowed.socket in stirred:
                    self._allowed.answer(self.refusals)
                patience = io.send({self.owners[socket] for socket in stirred if socket in self.owners})
                bouncer.look(self.refusals)
                if self.health:
                    self.health.look(stirred, self.poller)
                self.refusals.sum_up()
        self.refusals.sum_up(last=True)
        if self.health:
            self.health.close(self.poller)
        if self._allowed:
            self._allowed.socket.close()
        woken.close(0)

    def wake(self) -> None:
        with suppress(zmq.Again):  # the I/O thread has ended, or is awake anyway
            self._wake.send(b"", zmq.NOBLOCK)

    def call_soon(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended: nobody is left to be told
            self.loop.call_soon_threadsafe(function)

    async def ended(self) -> None:
        await asyncio.to_thread(self.thread.join)
        self.context.destroy(linger=0)


class _Socket:
    """A ZeroMQ socket of a world, with its place in the poller."""

    def __init__(self, world: Sockets, sort: int, options: dict[zmq.SocketOption, int | bytes]) -> None:
        self.world = world
        self.socket: zmq.Socket[bytes] = world.context.socket(sort)
        world.owners[self.socket] = self
        heartbeats: dict[zmq.SocketOption, int | bytes] = {
            zmq.HEARTBEAT_IVL: int(HEARTBEAT * 1000),
            zmq.HEARTBEAT_TIMEOUT: int(SILENCE * 1000),
            zmq.HEARTBEAT_TTL: int(SILENCE * 1000),
        }
        limits = {zmq.HANDSHAKE_IVL: int(HANDSHAKE * 1000), zmq.LINGER: 0}
        for option, value in {**options, **heartbeats, **limits}.items():
            self.socket.set(option, value)

    def close(self) -> None:
        self.world.poller.register(self.socket, 0)  # takes it out
        del self.world.owners[self.socket]
        self.socket.close(0)


class ZmqRouter(_Socket):
    """Raises zmq.ZMQError if it cannot be bound."""

    def __init__(self, world: Sockets) -> None:
        options: dict[zmq.SocketOption, int | bytes] = {
            zmq.ROUTER_HANDOVER: 1,
            zmq.MAXMSGSIZE: world.transport.max_message,
            zmq.RCVHWM: world.transport.queue,
            zmq.BACKLOG: 1024,
            # Also without keys, when nobody asks: then libzmq lets in no ZMTP before 3, whose first message would end
            # this process if it came while the socket is being closed.
            zmq.ZAP_DOMAIN: DOMAIN,
        }
        if world.keys:
            options |= {
                zmq.CURVE_SERVER: 1,
                zmq.CURVE_SECRETKEY: world.keys.private,
                zmq.ZAP_ENFORCE_DOMAIN: 1,
                zmq.MAXMSGSIZE: world.transport.max_message + CURVE_OVERHEAD,
            }
        super().__init__(world, zmq.ROUTER, options)
        most = STRANGERS + 4 * len(world.neighbors)
        under_way = (world.transport.queue + 1) * world.largest + SLACK
        self.bouncer = Bouncer(self.socket, most, under_way, bool(world.keys), world.now)
        self._routes: dict[bytes, bytes] = {}
        """By the sender's identity, that of its last connection."""
        self.socket.set(zmq.IPV6, is_ipv6(world.transport.host))
        self.socket.bind(_wanted(world))
        self.bound = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.address = world.book.advertised(world.me, self.bound)
        self.watch(True)

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        try:
            identity = part = self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        frames: list[zmq.Frame] = []
        size = count = 0
        while part.more:  # libzmq has the whole message
            part = self.socket.recv(copy=False)
            size, count = size + len(part), count + 1
            if count <= FRAMES:
                frames.append(part)
        self.bouncer.heard(identity, size, count)
        sender = self._checked(identity) if self.world.keys else identity.bytes
        return sender, [frame.buffer for frame in frames]

    def _checked(self, identity: zmq.Frame) -> bytes:
        """``sender>receiver``, of a connection whose key is the sender's; nothing if it is not."""
        claimed, _, _ = identity.bytes.partition(b".")
        owner = identity.get("User-Id")
        if claimed != f"{owner}>{self.world.me}".encode():
            text = f"refused a message: its sender says that it is {claimed[:32]!r} and has the key of peer {owner}"
            self.world.refusals.say("messages with another's identity", text)
            return b""
        self._routes[claimed] = identity.bytes
        return claimed

    def send(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        self.socket.send_multipart([self._routes.get(identity, identity), *frames])

    def watch(self, on: bool) -> None:
        self.world.poller.register(self.socket, zmq.POLLIN if on else 0)

    def close(self) -> None:
        self.world.poller.register(self.bouncer.monitor, 0)
        self.socket.disable_monitor()
        self.bouncer.close()
        super().close()


class ZmqDealer(_Socket):
    def __init__(self, world: Sockets, to: PeerId) -> None:
        options: dict[zmq.SocketOption, int | bytes] = {
            zmq.IDENTITY: f"{world.me}>{to}".encode(),
            zmq.SNDHWM: world.transport.queue,
            zmq.RCVHWM: ANSWERS_WAITING,
            zmq.MAXMSGSIZE: ANSWER,
            zmq.CONNECT_TIMEOUT: int(ANSWERED_BY * 1000),
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 2000,
        }
        if world.keys:
            options |= {
                zmq.CURVE_SERVERKEY: world.keys.public[to],
                zmq.CURVE_PUBLICKEY: world.keys.public[world.me],
                zmq.CURVE_SECRETKEY: world.keys.private,
                # ROUTER_HANDOVER gives a connection away to whoever comes with the same identity. Another neighbour,
                # with a key of its own, might: it cannot guess this.
                zmq.IDENTITY: f"{world.me}>{to}.{secrets.token_hex(8)}".encode(),
            }
        super().__init__(world, zmq.DEALER, options)
        # Never EVENT_HANDSHAKE_FAILED_PROTOCOL: see Bouncer.
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )  # fmt: skip
        self._address = ""
        self._understood = False
        """Whether the last connection got through its handshake."""
        self._stuck_since: float | None = None
        """When the connection was lost, unless libzmq has said that it tries again."""
        self._hopeless = False

    def connect(self, address: str) -> None:
        self._address = address
        self.socket.set(zmq.IPV6, is_ipv6(split(address)[0]))
        self.socket.connect(address)

    def send(self, frames: Sequence[Buffer]) -> bool:
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def event(self) -> Event | None:
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._understood = True
                return "connected"
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._hopeless = True
                return "unwelcome"
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self.world.keys:
                return "foreign"
            if event == zmq.EVENT_CONNECT_RETRIED:
                self._stuck_since = None
            elif event == zmq.EVENT_DISCONNECTED:
                self._stuck_since = self.world.now()
                return "lost"
        return self._go_on()

    def _go_on(self) -> Event | None:
        """After what it takes for the other side's fault, be it a byte that was damaged on the way, libzmq does not
        connect again by itself."""
        if self._hopeless or self._stuck_since is None or self.world.now() - self._stuck_since < STUCK:
            return None
        self._stuck_since = None
        with suppress(zmq.ZMQError):
            self.socket.disconnect(self._address)
        self.socket.connect(self._address)
        understood, self._understood = self._understood, False
        return None if understood else "foreign"

    def watch(self, events: int) -> None:
        self.world.poller.register(self.socket, events)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        super().close()


def _wanted(world: Sockets) -> str:
    """What to bind."""
    port = world.book.bound_port(world.me)
    return join(world.transport.host, "*" if port is None else port)


assert (INPUT, ROOM) == (zmq.POLLIN, zmq.POLLOUT)
