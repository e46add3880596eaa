"""ROUTER and DEALER sockets configured for a link."""

from __future__ import annotations

import secrets
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from p2pfl import PeerId
from p2pfl.messaging.control import CHUNK
from p2pfl.messaging.schema import MAX_HEADER
from p2pfl.messaging.wire import Buffer
from p2pfl.run_file.addresses import is_ipv6, split
from p2pfl.run_folder.key_files import Keys
from peers.admission import DOMAIN, HANDSHAKE_TIMEOUT, ConnectionGuard, readable
from peers.effects import SocketEvent
from peers.limited_log import LimitedLog

HEARTBEAT_INTERVAL = 5.0
HEARTBEAT_TIMEOUT = 30.0
"""Seconds without a heartbeat after which a connection counts as dead."""
CONNECT_TIMEOUT = 5.0
"""Maximum seconds of a connection attempt: without it, TCP would back off to one retry per minute."""
RECONNECT_TIMEOUT = 1.0
"""Maximum seconds for libzmq to report that it reconnects."""
EXTRA_CONNECTIONS = 64
"""Connections allowed in addition to the neighbors'."""
UNREAD_ALLOWANCE = 1 << 26
"""Bytes allowed in flight on a connection beyond full queues: kernel buffers, framing, heartbeats."""
CURVE_OVERHEAD = 64
"""Allowance per frame for encryption, which adds 33 bytes, so that a frame of ``MAX_FRAME`` bytes fits."""
MAX_ANSWER = 1 << 16
"""Maximum bytes of a frame of an answer."""
MAX_UNREAD_ANSWERS = 64
MAX_FRAMES = 4
"""Maximum frames kept of a message: envelope, header, chunk, and one more to see that there are too many."""
QUEUE = 16
"""Messages that libzmq holds per connection and direction; each is at most about CHUNK bytes."""
MAX_FRAME = CHUNK + MAX_HEADER

Options = dict[zmq.SocketOption, int | bytes]


def sockets_for(neighbors: int) -> int:
    """Return how many ZeroMQ sockets a peer needs: a DEALER and both ends of its monitor for each neighbor."""
    return 3 * neighbors + 64


@dataclass(frozen=True)
class SocketContext:
    """What the sockets of a peer share.

    Attributes:
        me, neighbors: this peer, and the peers that connect to it.
        keys: None disables encryption and authentication.
        limited_log: receives a line for each refused connection or message.
        now: the clock, in seconds.
    """

    me: PeerId
    neighbors: tuple[PeerId, ...]
    keys: Keys | None
    limited_log: LimitedLog
    now: Callable[[], float]
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    poller: zmq.Poller = field(default_factory=zmq.Poller)
    monitors: select.epoll = field(default_factory=select.epoll)
    """The monitors of all DEALERs as one descriptor to poll: polling hundreds of sockets would take milliseconds.

    libzmq's descriptor of a socket is edge-triggered: read a ready monitor to its end.
    """
    owners: dict[zmq.Socket[bytes] | int, object] = field(default_factory=dict)
    """{socket, or descriptor of a monitor: the ZmqRouter or ZmqDealer that owns it}"""

    def open(self, owner: object, kind: int, options: Options) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        common: Options = {zmq.HANDSHAKE_IVL: int(HANDSHAKE_TIMEOUT * 1000), zmq.LINGER: 0}
        for option, value in {**options, **common}.items():
            socket.set(option, value)
        self.owners[socket] = owner
        return socket

    def close(self, socket: zmq.Socket[bytes]) -> None:
        socket.disable_monitor()  # before its monitor is closed: libzmq would block on an event that is not read
        self.poller.register(socket, 0)  # unregister
        del self.owners[socket]
        socket.close(0)

    def destroy(self) -> None:
        """Close all that is still open."""
        self.monitors.close()
        self.context.destroy(linger=0)


class ZmqRouter:
    """Receives from all neighbors, in order for each of them. Raises zmq.ZMQError if it cannot be bound."""

    def __init__(self, shared: SocketContext, host: str, address: str) -> None:
        self._shared = shared
        options: Options = {
            zmq.ROUTER_HANDOVER: 1,
            zmq.MAXMSGSIZE: MAX_FRAME,
            zmq.RCVHWM: QUEUE,
            zmq.BACKLOG: 1024,
            # Set it without keys too, although there is no ZAP handler then: it makes libzmq reject ZMTP < 3, whose
            # first message would abort this process if it arrived while the socket is being closed.
            zmq.ZAP_DOMAIN: DOMAIN,
        }
        if shared.keys:
            options |= {
                zmq.CURVE_SERVER: 1,
                zmq.CURVE_SECRETKEY: shared.keys.private,
                zmq.ZAP_ENFORCE_DOMAIN: 1,
                zmq.MAXMSGSIZE: MAX_FRAME + CURVE_OVERHEAD,
            }
        self.socket = shared.open(self, zmq.ROUTER, options)
        max_connections = EXTRA_CONNECTIONS + 4 * len(shared.neighbors)
        max_unread = (QUEUE + 1) * 2 * MAX_FRAME + UNREAD_ALLOWANCE
        self.guard = ConnectionGuard(self.socket, max_connections, max_unread, bool(shared.keys), shared.now)
        self._routes: dict[bytes, bytes] = {}
        """{``sender>receiver``: socket identity of the sender's last connection}"""
        self.socket.set(zmq.IPV6, is_ipv6(host))
        self.socket.bind(address)
        self.bound = self.socket.get_string(zmq.LAST_ENDPOINT)
        """The address that it is bound to."""
        self.watch(True)

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        """Return the next message, if there is one: the sender's identity and the frames.

        With keys, the identity is verified against the connection's key. It is empty if they do not match: the
        message was refused.
        """
        try:
            identity = part = self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        frames: list[zmq.Frame] = []
        size = count = 0
        while part.more:  # does not block: libzmq delivers whole messages
            part = self.socket.recv(copy=False)
            size, count = size + len(part), count + 1
            if count <= MAX_FRAMES:
                frames.append(part)
        self.guard.message_read(identity, size, count)
        sender = self._verified(identity) if self._shared.keys else identity.bytes
        return sender, [frame.buffer for frame in frames]

    def _verified(self, identity: zmq.Frame) -> bytes:
        """Return ``sender>receiver`` if the connection's key is the sender's, otherwise an empty identity."""
        claimed, _, _ = identity.bytes.partition(b".")
        owner = identity.get("User-Id")
        if claimed != f"{owner}>{self._shared.me}".encode():
            text = f"message refused identity={claimed[:32]!r}: the connection has the key of peer {owner}"
            self._shared.limited_log.warning("messages with another peer's identity", text)
            return b""
        self._routes[claimed] = identity.bytes
        return claimed

    def send(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        """Refuse a connection; lost if the other side is disconnected or does not read."""
        self.socket.send_multipart([self._routes.get(identity, identity), *frames])

    def watch(self, on: bool) -> None:
        """Set whether messages wake the I/O loop."""
        self._shared.poller.register(self.socket, zmq.POLLIN if on else 0)

    def close(self) -> None:
        self._shared.poller.register(self.guard.monitor, 0)  # unregister
        self.guard.stop_listening(self.bound)
        self._shared.close(self.socket)
        self.guard.close()


class ZmqDealer:
    """Sends to one neighbor at one address, and receives its answers. Reconnects by itself."""

    def __init__(self, shared: SocketContext, to: PeerId, address: str) -> None:
        self.watched = False
        """Room to send wakes the I/O loop."""
        self._shared = shared
        self._address = address
        self._handshake_succeeded = False
        """Whether the last connection completed its handshake."""
        self._lost_at: float | None = None
        """When the connection was lost; None once libzmq has reported that it reconnects."""
        self._rejected = False
        options: Options = {
            zmq.IPV6: is_ipv6(split(address)[0]),
            zmq.IDENTITY: f"{shared.me}>{to}".encode(),
            # The TTL has the other side close a connection without heartbeats, so it need not send any.
            zmq.HEARTBEAT_IVL: int(HEARTBEAT_INTERVAL * 1000),
            zmq.HEARTBEAT_TIMEOUT: int(HEARTBEAT_TIMEOUT * 1000),
            zmq.HEARTBEAT_TTL: int(HEARTBEAT_TIMEOUT * 1000),
            zmq.SNDHWM: QUEUE,
            zmq.RCVHWM: MAX_UNREAD_ANSWERS,
            zmq.MAXMSGSIZE: MAX_ANSWER,
            zmq.CONNECT_TIMEOUT: int(CONNECT_TIMEOUT * 1000),
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 2000,
        }
        if shared.keys:
            options |= {
                zmq.CURVE_SERVERKEY: shared.keys.public[to],
                zmq.CURVE_PUBLICKEY: shared.keys.public[shared.me],
                zmq.CURVE_SECRETKEY: shared.keys.private,
                # ROUTER_HANDOVER hands a connection over to any client with the same identity. Make it unguessable,
                # so that another neighbor, which has a valid key, cannot take over this connection.
                zmq.IDENTITY: f"{shared.me}>{to}.{secrets.token_hex(8)}".encode(),
            }
        self.socket = shared.open(self, zmq.DEALER, options)
        # Do not subscribe to EVENT_HANDSHAKE_FAILED_PROTOCOL; see ConnectionGuard.
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )  # fmt: skip
        shared.owners[self.monitor.fileno()] = self
        shared.monitors.register(self.monitor, select.EPOLLIN)
        self.socket.connect(address)

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send a message. Return False if there is no room.

        The message is lost if the connection breaks before it has arrived. Large frames are not copied and must not
        be modified afterwards.
        """
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """Return the next answer, if there is one."""
        return self.socket.recv_multipart() if readable(self.socket) else None

    def event(self) -> SocketEvent | None:
        """Return the connection's next event, if there is one. An event wakes the I/O loop."""
        while readable(self.monitor):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._handshake_succeeded = True
                return "connected"
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._rejected = True
                return "rejected"
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._shared.keys:
                return "unproven"
            if event == zmq.EVENT_CONNECT_RETRIED:
                self._lost_at = None
            elif event == zmq.EVENT_DISCONNECTED:
                self._lost_at = self._shared.now()
                return "lost"
        return self._reconnect()

    def _reconnect(self) -> SocketEvent | None:
        """Reconnect if libzmq does not: it stops after a protocol error, even if a byte was corrupted in transit."""
        if self._rejected or self._lost_at is None or self._shared.now() - self._lost_at < RECONNECT_TIMEOUT:
            return None
        self._lost_at = None
        with suppress(zmq.ZMQError):
            self.socket.disconnect(self._address)
        self.socket.connect(self._address)
        succeeded, self._handshake_succeeded = self._handshake_succeeded, False
        return None if succeeded else "unproven"

    def watch(self, on: bool) -> None:
        """Set whether room to send wakes the I/O loop: polling idle sockets costs more than the messages."""
        if on != self.watched:
            self.watched = on
            self._shared.poller.register(self.socket, zmq.POLLOUT if on else 0)

    def close(self) -> None:
        self._shared.monitors.unregister(self.monitor)
        del self._shared.owners[self.monitor.fileno()]
        self._shared.close(self.socket)
        self.monitor.close(0)
