"""What ZmqLink uses of the world, and the real world: ZeroMQ's sockets, a thread, the system's clock, a folder.

    ZmqLink, the protocol  ──  World  ──  Sockets: ROUTER, DEALERs and their monitors on an I/O thread
                                      └─  simulated wires in virtual time, for tests

The link's I/O loop is a generator. It yields the seconds that it can wait and is sent the sockets that have something
for it: whatever drives it, the protocol is the same code. It runs on one thread only, or looks as if it did.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, time_ns
from typing import Literal, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from p2pfl.config import Transport
from p2pfl.errors import RunFolderError
from p2pfl.runfolder import PeerId, write_atomically
from p2pfl.wire import Buffer

HEARTBEAT = 5.0
SILENCE = 30.0
"""Seconds between heartbeats, and without any until a connection counts as dead."""

Turns = Generator[float, Collection[object], None]
"""The I/O loop: yields the seconds until something is due, is sent the Routers and Dealers that have something."""

INPUT, ROOM = 1, 2
"""What a Dealer may be watched for: messages to read, and room to send once there was none."""


class Router(Protocol):
    """Hears all neighbours. What each of them says comes in order."""

    address: str
    """Where neighbours may connect."""

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        """The next message, if there is one: the identity of who sent it, and its frames."""

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

    def event(self) -> Literal["connected", "lost"] | None:
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
        """Where a peer has published that it listens."""

    def published(self) -> int:
        """A number that changes whenever somebody publishes; 0 while it cannot be told whether somebody has."""

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
        transport: the run file's section.
    """

    def __init__(self, me: PeerId, addresses: Path, transport: Transport) -> None:
        self.me = me
        self.addresses = addresses
        self.transport = transport

    def now(self) -> float:
        return monotonic()

    # -- sockets

    def listen(self) -> Router:
        self.loop = asyncio.get_running_loop()
        self.poller = zmq.Poller()
        self.owners: dict[zmq.Socket[bytes], object] = {}
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 4096)
        self._wake = self.context.socket(zmq.PAIR)
        self._wake.bind("inproc://wake")
        try:
            return ZmqRouter(self)
        except zmq.ZMQError as error:
            self.context.destroy(linger=0)
            raise RunFolderError(f"transport.host {self.transport.host!r} cannot be bound: {error}") from None

    def dealer(self, to: PeerId) -> Dealer:
        return ZmqDealer(self, f"{self.me}>{to}".encode())

    # -- addresses

    def publish(self, address: str) -> None:
        write_atomically(self._file(self.me), address.encode())

    def withdraw(self, address: str) -> None:
        if self.address_of(self.me) == address:  # else another process of this peer has taken over already
            with suppress(OSError):
                self._file(self.me).unlink()

    def address_of(self, peer: PeerId) -> str | None:
        try:
            return self._file(peer).read_text()
        except OSError:
            return None  # not up yet, just closed, or the whole folder is gone

    def published(self) -> int:
        try:
            changed = self.addresses.stat().st_mtime_ns
        except OSError:
            return 0
        # Two changes within one tick of the file system's clock look like one: look again after a while.
        return changed if abs(time_ns() - changed) > 2e9 else 0

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
        with suppress(StopIteration):
            patience = next(io)
            while True:
                stirred = dict(self.poller.poll(int(patience * 1000)))
                if woken in stirred:
                    while woken.poll(0):
                        woken.recv()
                patience = io.send({self.owners[socket] for socket in stirred if socket is not woken})
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
        for option, value in {**options, **heartbeats, zmq.LINGER: 0}.items():
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
        }
        super().__init__(world, zmq.ROUTER, options)
        self.socket.bind(f"tcp://{world.transport.host}:*")
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.watch(True)

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        try:
            identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return identity.bytes, [frame.buffer for frame in frames]

    def send(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        self.socket.send_multipart([identity, *frames])

    def watch(self, on: bool) -> None:
        self.world.poller.register(self.socket, zmq.POLLIN if on else 0)


class ZmqDealer(_Socket):
    def __init__(self, world: Sockets, identity: bytes) -> None:
        options: dict[zmq.SocketOption, int | bytes] = {
            zmq.IDENTITY: identity,
            zmq.SNDHWM: world.transport.queue,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 2000,
        }
        super().__init__(world, zmq.DEALER, options)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    def connect(self, address: str) -> None:
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

    def event(self) -> Literal["connected", "lost"] | None:
        if not self.monitor.poll(0):
            return None
        event = recv_monitor_message(self.monitor)["event"]
        return "connected" if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else "lost"

    def watch(self, events: int) -> None:
        self.world.poller.register(self.socket, events)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        super().close()


assert (INPUT, ROOM) == (zmq.POLLIN, zmq.POLLOUT)
