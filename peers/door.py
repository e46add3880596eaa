"""The door of a listening peer: who is let in, who is turned away, and how many may stand in it.

    connection ── ZMTP greeting ── CURVE: proves its key ── ZAP: do we know this key? ── the ROUTER
                       │                    │                          │
                       └────────────────────┴── refused: a line in the log, see Refusals

With keys, libzmq asks a ZAP handler (ZeroMQ RFC 27) about every connection that has proved that it has the private
key to some public key. Ours answers from a list: the public keys of our neighbours in the graph. It runs in the I/O
loop, and libzmq lets nobody in while nobody answers. The neighbour's number becomes the connection's User-Id, which
libzmq attaches to every message: that is who speaks, whatever the message says.

Connections are counted, by the ROUTER's monitor. libzmq itself sets no bound, and each one takes a file descriptor of
which checkpoints and logs need some too. When there are too many, the kernel is told to ignore further ones until
some have gone: a handshake that does not get anywhere is cut off after HANDSHAKE seconds. Neighbours that want to
connect meanwhile keep on trying. Those that are connected notice nothing.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from p2pfl.keys import Keys, short
from p2pfl.runfolder import PeerId
from peers.refusals import Refusals

HANDSHAKE = 10.0
"""Seconds that a connection may take until it is known who it is."""
DOMAIN = b"p2pfl"
LOOK = 1.0
"""Seconds between two looks at what the connections have brought."""
_FRAMING = 2
"""Bytes that a frame takes on the wire at least, besides its content."""
_BYTES_RECEIVED = 128
"""Where tcpi_bytes_received stands in struct tcp_info of <linux/tcp.h>."""
_AT_ONCE = 64
"""Questions and events that are taken in one turn of the I/O loop."""


class Allowed:
    """The ZAP handler: lets those in whose keys are those of neighbours. To be made before the ROUTER is bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, neighbors: tuple[PeerId, ...]) -> None:
        self._neighbors = {keys.public[one]: one for one in neighbors}
        self._others = {key: one for one, key in enumerate(keys.public) if one not in neighbors}
        self.socket = context.socket(zmq.REP)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self, refusals: Refusals) -> None:
        """All that libzmq asks at the moment."""
        for _ in range(_AT_ONCE):
            try:
                version, request, _, address, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            key = credentials[0] if mechanism == b"CURVE" and credentials else b""
            peer = self._neighbors.get(key)
            if peer is None:
                refusals.say("strangers with keys that are no neighbour's", self._who(key, address.decode()))
                verdict = [b"400", b"No neighbour's key", b""]
            else:
                verdict = [b"200", b"", b"%d" % peer]
            self.socket.send_multipart([version, request, *verdict, b""])

    def _who(self, key: bytes, address: str) -> str:
        if key in self._others:
            return f"refused peer {self._others[key]} at {address}: it is no neighbour"
        return f"refused a stranger at {address}: its key {short(key)} belongs to no peer of this run"


@dataclass
class _Connection:
    taken: int = 0
    """Bytes of the messages that came over it and were read."""
    early: bool = False
    """A message was read before the news that there is such a connection."""


class Bouncer:
    """Watches the ROUTER's door through its monitor. To be made before the ROUTER is bound.

    Args:
        router: whose door.
        most: connections that may be open at the same time.
        under_way: bytes that a connection may have brought which are in no message that was read.
        keyed: whether the router has keys.
        now: the clock.
    """

    def __init__(
        self, router: zmq.Socket[bytes], most: int, under_way: int, keyed: bool, now: Callable[[], float]
    ) -> None:
        # Never EVENT_HANDSHAKE_FAILED_PROTOCOL: libzmq 4.3.5 also sends it for an encrypted message that was tampered
        # with, and forgets over it that the connection is to be closed. It stays, is read no more, and may end the
        # process with a failed assertion when it is closed at last.
        self.monitor = router.get_monitor_socket(
            zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )  # fmt: skip
        self.most = most
        self.closed = False
        """Whether further connections are ignored."""
        self.connections: dict[int, _Connection] = {}
        """By their file descriptors."""
        self._under_way = under_way
        self._keyed = keyed
        self._now = now
        self._next_count = 0.0
        self._explained = False
        """Whether the last event said why the connection of the next one ends."""
        self._listener: socket.socket | None = None

    def heard(self, identity: zmq.Frame, size: int, frames: int) -> None:
        """A message of so many bytes in so many frames has come; libzmq knows over which connection."""
        connection = self.connections.setdefault(int(identity.get(zmq.SRCFD)), _Connection(early=True))
        connection.taken += size + frames * _FRAMING

    def look(self, refusals: Refusals) -> None:
        """Take in what has happened since the last look. To be called when the monitor stirs, and now and then."""
        for _ in range(_AT_ONCE):
            if not self.monitor.poll(0):
                break
            message = recv_monitor_message(self.monitor)
            self._happened(message["event"], message["value"], refusals)
        if self._now() >= self._next_count:
            self._next_count = self._now() + LOOK
            self._count(refusals)
        full = len(self.connections) >= self.most
        if full != self.closed and self._listener is not None:
            self._shut(self._listener, full, refusals)

    def _count(self, refusals: Refusals) -> None:
        """What the connections have brought. libzmq puts the frames of a message together without end, and shows
        nobody a message before its last frame; the kernel knows how much that is."""
        for descriptor, known in list(self.connections.items()):
            with self._connection(descriptor) as connection:
                if connection is None:  # libzmq does not say of all of them that they have gone
                    del self.connections[descriptor]
                    continue
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                (received,) = struct.unpack_from("=Q", information, _BYTES_RECEIVED)
                if received - known.taken > self._under_way:
                    # libzmq finds its end and closes it, which is a reset for the other side.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.shutdown(socket.SHUT_RD)
                    text = f"cut a connection: {received - known.taken} bytes in messages that do not end"
                    refusals.say("connections with messages that do not end", text)

    @contextmanager
    def _connection(self, descriptor: int) -> Iterator[socket.socket | None]:
        """One of ours, or None if it has gone: its number may be another file's by now."""
        try:
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            yield None
            return
        with connection:
            yield connection if self._is_ours(connection) else None

    def _is_ours(self, connection: socket.socket) -> bool:
        try:
            connection.getpeername()
            return self._listener is not None and connection.getsockname()[1] == self._listener.getsockname()[1]
        except OSError:
            return False

    def _happened(self, event: int, value: int, refusals: Refusals) -> None:
        explained, self._explained = self._explained, False
        if event == zmq.EVENT_LISTENING:
            self._listener = socket.socket(fileno=os.dup(value))
        elif event == zmq.EVENT_ACCEPTED:
            early = self.connections.get(value)
            if early is None or not early.early:
                self.connections[value] = _Connection()
            else:
                early.early = False
        elif event == zmq.EVENT_DISCONNECTED:
            known = self.connections.pop(value, None)
            if known and not known.taken and not explained:
                whom = "it has no key, not our public key" if self._keyed else "it wants keys"
                text = f"refused a connection: {whom}, or does not speak our protocol"
                refusals.say("connections of strangers", text)
        elif event == zmq.EVENT_ACCEPT_FAILED:
            refusals.say("connections that could not be taken", f"a connection failed: {os.strerror(value)}")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._explained = True  # by whoever decided so
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._explained = True
            refusals.say(
                "connections of strangers", "refused a connection: it left, or was cut off, in its handshake"
            )

    def _shut(self, listener: socket.socket, shut: bool, refusals: Refusals) -> None:
        """Have the kernel drop what comes to the listening socket, or no longer. Connections are other sockets."""
        self.closed = shut
        try:
            if shut:
                instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # return 0: drop it
                program = struct.pack("HP", 1, ctypes.addressof(instruction))
                listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
            else:
                listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        except OSError as error:
            refusals.say("the door", f"connections cannot be bounded here: {error.strerror}")
            return
        if shut:
            refusals.say("the door", f"{self.most} connections: further ones are ignored until some have gone")

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self.monitor.close(0)


SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
"""Of <asm-generic/socket.h>, which Python's socket module does not have."""
